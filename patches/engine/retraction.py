"""Retraction: who gives way when the pool is full, and what happens to its state.

A retracted request comes back from its backup (``backup.py``) or, without one, is prefilled again
from prompt + generated tokens. That prefill is exact (full attention), so its eviction starts anew.
Only the prompt may go to the radix tree then: the generated part has to stay the request's own, or
it could not be evicted again.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.engine.admission import must_stay
from sgl_skipkv.patches.engine.binding import state_of


def reset_request(result: None, req: Any) -> None:
    """AFTER ``Req.reset_for_retract``: the row is gone."""
    state = state_of(req)
    if state is not None:
        state.runtime.retract(state, generated=len(req.output_ids))


def order_victims(order: list[int], reqs: list[Any]) -> list[int] | None:
    """AFTER ``ScheduleBatch._get_decode_retraction_order``: the last in the list gives way first.

    Requests that could be neither restored nor recomputed move to the front: they are never chosen
    while another one is left. Behind them come those that have just compacted, because they would
    be recomputed.
    """

    def cost(i: int) -> int:
        state = state_of(reqs[i])
        if state is None:
            return 0
        ahead = state.runtime.compacted_ahead(state, len(reqs[i].output_ids))
        return 2 if must_stay(reqs[i]) else int(ahead)

    costs = {i: cost(i) for i in order}
    return sorted(order, key=lambda i: -costs[i]) if any(costs.values()) else None


def limit_prefix_match(max_prefix_len: int, req: Any, input_len: int) -> int | None:
    """AFTER ``Req._compute_max_prefix_len``: a budgeted or steered request shares at most its
    prompt.

    What the tree owns, nobody else may free, and it is never steered. Without a shared prompt
    (``protect_prompt: false``) nothing is matched at all.
    """
    state = state_of(req)
    if state is None or not state.settings.changes_kv:
        return None
    shareable = 0 if state.keeps_prompt_private else state.prompt_tokens
    return min(max_prefix_len, shareable)
