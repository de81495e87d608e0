"""The end of a row: what may be filed in the radix tree, and when a request's state is closed.

The tree keys a row by the request's tokens: entry i is taken for token i. That is false for a
compacted row, and filing it would put wrong KV under a valid key, silently. So a request with
evictions files nothing more; its prompt is in the tree since its prefill. The KV that a steered
request generates is not what others would compute for the same tokens: it files its prompt only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_skipkv.patches.engine.backup import back_up
from sgl_skipkv.patches.engine.binding import state_of


def limit_insert(
    result: int | None, component: Any, req: Any, *args: Any, **kwargs: Any
) -> int | None:
    """AFTER ``TreeComponent.prepare_for_caching_req``: how much of the row may be filed.

    While the request runs, at most its prompt, which is the beginning of every row: a recomputed
    request would otherwise hand its generated part to the tree and could never evict it again. At
    its end nothing after an eviction, and of a steered request its prompt.
    """
    state = state_of(req)
    if state is None or not state.settings.changes_kv:
        return None
    if kwargs["is_finished"] and state.kv.evicted_tokens:
        return 0
    if kwargs["is_finished"] and not state.settings.steers:
        return None
    return state.prompt_tokens if result is None else min(result, state.prompt_tokens)


def close_request(
    original: Callable[..., None], req: Any, tree_cache: Any, *, checkpoint: bool
) -> None:
    """AROUND ``release_kv_cache``: every request that loses its row passes here.

    A finished or aborted one is closed, a retracted one backed up.
    """
    state, row_tokens = state_of(req), req.kv.kv_allocated_len
    if state is not None and not req.finished():
        back_up(state, req, tree_cache)
    original(req, tree_cache, checkpoint=checkpoint)
    if state is not None and req.finished():
        reason = (req.finished_reason.to_json() or {}).get("type")
        state.runtime.close(state, row_tokens, req.output_ids_through_stop, reason)
