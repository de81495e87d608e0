"""What the CPU learns of a compaction, a few steps later: which tokens were kept, which sentences
were evicted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from sgl_skipkv.request.state import RequestState
from sgl_skipkv.request.trace import TraceWriter


def read_back(state: RequestState, trace: TraceWriter | None) -> None:
    """Read back the request's last compaction, if that has not been done: count evicted sentences,
    write the trace line."""
    last, sentences = state.kv.last, state.sentences
    if last is None or state.kv.last_is_read:
        return
    kept, finite = last.read()
    state.kv.last_is_read = True
    if not finite:
        policy = state.settings.policy.name
        state.failure = (
            f"a score was not finite (policy {policy}), so the kept tokens are arbitrary"
        )
    live, gone = list[int](), list[int]()
    for i in sentences.live:
        (live if _has_kept(state.span(i), kept) else gone).append(i)
    sentences.live = live
    state.report.evicted_sentences += len(gone)
    if trace is not None:
        sentences.read_similar()
        compares = state.settings.policy.needs_sentences
        similar = {"similar": [_similar(state, i) for i in gone]} if compares else {}
        trace.write(
            "compact",
            rid=state.rid,
            policy=state.settings.policy.name,
            prompt_tokens=state.prompt.tokens,
            generated=last.logical_tokens - state.prompt.tokens,
            before=last.row_tokens,
            after=len(kept),
            kept=kept,
            evicted_sentences=[state.span(i) for i in gone],
            **({} if last.written_tokens is None else {"running": last.running_tokens}),
            **similar,
        )


def _similar(state: RequestState, sentence: int) -> tuple[int, int, float] | None:
    """Span of the later sentence that is most similar to this one, and their cosine."""
    if (found := state.sentences.similar.get(sentence)) is None:
        return None
    return (*state.span(found[0]), round(found[1], 4))


def _has_kept(span: tuple[int, int], kept: Sequence[int]) -> bool:
    """Whether an ascending list of kept positions has one in the span."""
    at = bisect_left(kept, span[0])
    return at < len(kept) and kept[at] < span[1]
