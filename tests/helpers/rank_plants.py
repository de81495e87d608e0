"""What tests plant in a real server: traces of all ranks, faults of the last one, and mistakes that
must be seen.

A request is made to fail by its name, or by its policy's interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STARTS = Path(__file__).resolve().parent / "rank_starts"
#: of requests whose policy fails on one rank: once, for good
FAILS_ONCE, FAILS_ALWAYS = 24, 40
ONCE, ALWAYS = "once", "always"
#: weight versions of updates that fail on one rank, and of weights that it cannot measure
FAILED_UPDATE, UNMEASURABLE = "failed on one rank", "unmeasurable on one rank"


def environment(*plants: str) -> dict[str, str]:
    """Of a server with these plants; the first one is always there."""
    path = f"{STARTS}:{STARTS.parent}"
    return {"PYTHONPATH": path, "RANK_PLANTS": " ".join(("traces", *plants))}


def trace_of(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.name}.{rank}")


def plant(names: Iterable[str]) -> None:
    """Before a server starts: every rank gets what is planted there when its communicators open."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    from sgl_skipkv.patches.startup import bind
    from sgl_skipkv.request.trace import TraceWriter

    chosen, opened = [PLANTS[name] for name in names], bind.open_ranks

    def open_ranks(device: Any) -> Any:
        ranks = opened(device)
        for one in chosen:
            one(ranks)
        return ranks

    def writer(path: str) -> TraceWriter:
        return TraceWriter(str(trace_of(Path(path), get_attn_tp_group().rank_in_group)))

    bind.open_ranks = open_ranks
    bind.is_first_rank, bind.TraceWriter = (lambda: True), writer


def _faults(ranks: Any) -> None:
    """The last rank fails to plan, to follow attention, to open and to back up, and with new
    weights."""
    if ranks.index < ranks.size - 1:
        return
    from sgl_skipkv.eviction.runtime import Runtime
    from sgl_skipkv.policy import policy_class

    def by_interval(policy: Any, *_: Any) -> str | None:
        return {FAILS_ONCE: ONCE, FAILS_ALWAYS: ALWAYS}.get(policy.params.interval)

    for name in ("snapkv", "distinct"):
        _fail(policy_class(name), "scores_together", by_interval)
    for name in ("raas", "h2o"):
        _fail(policy_class(name), "follow", by_interval)
    _fail(Runtime, "open", lambda runtime, rid, *_: _marked("open", rid))
    _fail(Runtime, "back_up", lambda runtime, state, *_: _marked("backup", state.rid))
    _fail_with_weights()


def _fail_with_weights() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from sgl_skipkv.patches.startup import bind
    from sgl_skipkv.patches.startup.attention_check import AttentionMismatch

    record, measure, versions = Scheduler.record_weight_version_change, bind.measure_model, [""]

    def recording(scheduler: Any, new_version: str | None) -> None:
        versions[0] = new_version or ""
        if new_version != FAILED_UPDATE:  # SGLang calls it where an update has worked
            record(scheduler, new_version=new_version)

    def measuring(*args: Any, **keywords: Any) -> Any:
        found = measure(*args, **keywords)  # all ranks take part
        if versions[0] == UNMEASURABLE:
            raise AttentionMismatch(f"planted: {UNMEASURABLE}")
        return found

    Scheduler.record_weight_version_change, bind.measure_model = recording, measuring


def _marked(what: str, rid: str) -> str | None:
    return next((how for how in (ONCE, ALWAYS) if rid.startswith(f"{what}-{how}")), None)


def _fail(owner: Any, name: str, marked: Callable[..., str | None]) -> None:
    original, failed = getattr(owner, name), []

    def raising(*args: Any, **kwargs: Any) -> Any:
        how = marked(*args)
        if how == ALWAYS or (how == ONCE and not failed):
            failed.append(True)
            raise RuntimeError(f"planted in {name}")
        return original(*args, **kwargs)

    setattr(owner, name, raising)


def _no_gather(ranks: Any) -> None:
    """Every rank keeps what its own heads say."""
    from sgl_skipkv.eviction import scoring

    def own(due: Any, scores: Any, ranks: Any, agreement: Any) -> None:
        agreement.compare(ranks.gathered(agreement.stamp()))

    scoring._combine = own


def _other_draw(ranks: Any) -> None:
    """The last rank draws another set."""
    from sgl_skipkv.policy.random import Random

    draw = Random._draw
    if ranks.index == ranks.size - 1:
        Random._draw = lambda self, inputs: draw(self, inputs).flip(0)  # type: ignore[method-assign]


def _unprotected(ranks: Any) -> None:
    """A request with such a name is compacted as if the model had no windows."""
    from sgl_skipkv.eviction.runtime import Runtime

    opened = Runtime.open

    def forgetting(runtime: Any, rid: str, settings: Any, prompt_ids: Any) -> Any:
        if rid.startswith("unprotected"):
            settings.policy.model_window_tokens = 0
        return opened(runtime, rid, settings, prompt_ids)

    Runtime.open = forgetting  # type: ignore[method-assign]


def _experts_apart(ranks: Any) -> None:
    """Not a mistake of ours: SGLang's experts on a CPU fail at the -1 that stands for an expert of
    another rank. Here it adds nothing, as on a GPU."""
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native

    def of_own_experts(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        weights, ids, logits = topk_output
        weights, ids = weights.masked_fill(ids < 0, 0.0), ids.clamp_min(0)
        # One choice after the other: that function counts an expert once per token.
        choices = zip(weights.split(1, dim=1), ids.split(1, dim=1), strict=True)
        return sum(forward(layer, x, type(topk_output)(*one, logits), config) for one in choices)

    fused_moe_native.moe_forward_native = of_own_experts


PLANTS: dict[str, Callable[[Any], None]] = {
    "traces": lambda ranks: None,
    "faults": _faults,
    "no-gather": _no_gather,
    "other-draw": _other_draw,
    "unprotected": _unprotected,
    "experts-apart": _experts_apart,
}
