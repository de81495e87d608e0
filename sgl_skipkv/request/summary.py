"""The summary of a finished request, for ``meta_info["skipkv"]`` and the trace's last line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sgl_skipkv.request.state import RequestState

META_KEY: Final = "skipkv"
"""The summary's key in ``meta_info``."""


def summarise(state: RequestState, generated: int, output_ids: Sequence[int]) -> dict[str, Any]:
    """Counts of one request, under the names that ``docs/settings.md`` explains.

    Args:
        generated: generated tokens that have KV, all but the last.
        output_ids: all generated tokens.
    """
    report = state.report
    count_prompt = state.settings.policy.params.count_prompt
    full = generated + (state.prompt.uncounted_tokens if count_prompt else 0)
    summary = {
        "policy": state.settings.policy.name,
        "kv_budget": state.settings.kv_budget,
        "compactions": report.compactions,
        "evicted_tokens": report.evicted_tokens,
        "kv_tokens": max(full - state.kv.evicted_tokens + state.prompt_evicted_tokens, 0),
        "peak_kv_tokens": report.peak_budgeted_tokens,
        "mean_kv_tokens": round(report.budgeted_token_steps / max(report.observed_steps, 1), 1),
        "full_kv_tokens": full,
        "sentences": len(state.sentences.tracker.closed),
        "evicted_sentences": report.evicted_sentences,
        "recomputations": report.recomputations or None,
    }
    if state.schedule is not None:
        steered = state.schedule.copy()
        steered.feed(output_ids)
        summary["nonexecution_sentences"] = steered.nonexecution_sentences
        summary["steering_alpha"] = round(steered.alpha, 6)
    if state.settings.kv_reuse is not None:
        continued = state.reuse.continued
        summary["reused_tokens"] = 0 if continued is None else continued.sent_tokens
        summary["reused_kv_tokens"] = 0 if continued is None else continued.row_tokens
        summary["copied_kv_tokens"] = 0 if continued is None else continued.copied_tokens
        summary["kv_reuse_miss"] = state.reuse.miss
    return {name: value for name, value in summary.items() if value is not None}


def trace_fields(state: RequestState) -> dict[str, Any]:
    """What the last line of the trace has beside the summary: spans are logical positions.

    ``continues`` names the request whose history this one went on from, and how many tokens both
    have in common.
    """
    fields: dict[str, Any] = {
        "kv_params": state.settings.policy.params.model_dump(mode="json"),
        "sentence_spans": [state.span(i) for i in range(len(state.sentences.tracker.closed))],
    }
    if state.settings.kv_reuse is not None:
        fields["kv_reuse"] = state.settings.kv_reuse
    if (continued := state.reuse.continued) is not None:
        fields["continues"] = {"rid": continued.rid, "tokens": continued.cut}
    return fields
