"""Retraction: which request is retracted when the pool is full, and what happens to its state.

A retracted request is restored from its backup (``backup.py``) or, without one, prefilled again
from prompt + generated tokens. That prefill uses full attention, so eviction starts anew.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.patches.engine.future_kv import must_stay


def reset_request(result: None, req: Any) -> None:
    """AFTER ``Req.reset_for_retract``: the request has lost its row."""
    state = state_of(req)
    if state is not None:
        state.runtime.retract(state, generated=len(req.output_ids))


def order_victims(order: list[int], reqs: list[Any]) -> list[int] | None:
    """AFTER ``ScheduleBatch._get_decode_retraction_order``: the last in it is retracted first.

    Requests that could be neither restored nor recomputed move to the front: they are retracted
    only if no other is left. Next come requests that have just been compacted, because they would
    have to be recomputed; with ``--retraction-policy priority`` only among their equals. On a
    decode server they are the first of all. A full pool never asks for these there: what their
    compaction has freed covers their next step.
    """
    from sglang.srt.runtime_context import get_schedule

    by_priority = get_schedule().retraction_policy == "priority"
    staying = must_stay([reqs[i] for i in reversed(order)])

    def cost(i: int) -> int:
        state = state_of(reqs[i])
        if state is None:
            return 0
        ahead: bool = state.runtime.compactor.compacted_ahead(state, len(reqs[i].output_ids))
        return 2 * (reqs[i] in staying) + ahead

    costs = {i: cost(i) for i in order}
    if not any(costs.values()):
        return None
    firsts: dict[int | None, int] = {}  # priority -> its place in the order
    places = {
        i: firsts.setdefault(reqs[i].priority if by_priority else None, place)
        for place, i in enumerate(order)
    }
    return sorted(order, key=lambda i: (costs[i] < 2, places[i], -costs[i]))


def limit_prefix_match(max_prefix_len: int, req: Any, input_len: int) -> int | None:
    """AFTER ``Req._compute_max_prefix_len``: at most the prompt of a budgeted or steered request.

    Only the tree may free what it owns, and its KV is not steered. A request whose prompt may be
    evicted (``protect_prompt: false``) matches nothing.
    """
    state = state_of(req)
    if state is None or not state.settings.changes_kv:
        return None
    shareable, continued = state.shared_row_tokens, state.reuse.continued
    if continued is not None and state.offloaded.backup is None:
        # Recordings of the new text exist only if the request computes it.
        counts = state.settings.kv_reuse == "budget"
        row_tokens = continued.row_tokens + state.runtime.boundary_tokens
        shareable = row_tokens if counts else shareable
    return min(max_prefix_len, shareable)
