"""The release of a row: what is inserted into the radix tree, and when a request is closed.

The tree keys a row by the request's tokens, so it takes entry i for token i. For a compacted row
that is wrong: it would silently store wrong KV under a valid key. Generated KV of a steered request
differs from what other requests compute for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_skipkv.patches.engine.backup import back_up
from sgl_skipkv.patches.engine.batch import failure_reason
from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.patches.engine.reuse import leaving_history
from sgl_skipkv.patches.engine.window_pool import free_unmoved, is_out_of_windows


def insertable_tokens(req: Any, *, is_finished: bool) -> int | None:
    """How many row entries the radix tree may take; None: all of them.

    While the request runs, at most its prompt, the beginning of every row: otherwise a recomputed
    request would give its generated tokens to the tree and could not evict them. At its end,
    nothing if tokens were evicted (its prefill inserted the prompt), the prompt if it was steered.
    """
    state = state_of(req)
    if state is None or not state.settings.changes_kv:
        return None
    if state.reuse.row_key is not None:
        return None  # filed under its own keys
    if is_finished and state.kv.evicted_tokens:
        return 0
    if is_finished and not state.settings.steers:
        return None
    shared: int = state.shared_row_tokens
    if is_out_of_windows(req.kv, state):  # a restored row, or one compacted before it was inserted
        shared = min(shared, req.kv.cache_protected_len)
    return shared


def limit_insert(
    result: int | None, component: Any, req: Any, *args: Any, **kwargs: Any
) -> int | None:
    """AFTER ``TreeComponent.prepare_for_caching_req``: no more than ``insertable_tokens``."""
    limit = insertable_tokens(req, is_finished=kwargs["is_finished"])
    return limit if limit is None or result is None else min(result, limit)


def keep_states(
    original: Callable[..., int | None],
    component: Any,
    req: Any,
    insert_params: Any,
    token_ids_len: int,
    is_finished: bool,
) -> int | None:
    """AROUND ``MambaComponent.prepare_for_caching_req``: it hands states of the request to the tree
    and returns for how many row entries they stand. Nothing is inserted if that is more than
    ``insertable_tokens``: no shorter row has these states."""
    limit = insertable_tokens(req, is_finished=is_finished)
    if limit is not None:
        copied: bool = component.cache.enable_mamba_extra_buffer  # in an earlier step
        stand_for = req.kv.mamba_last_track_seqlen if copied else token_ids_len
        if is_finished or (stand_for or 0) > limit:
            return 0
    return original(component, req, insert_params, token_ids_len, is_finished)


def close_request(
    original: Callable[..., None], req: Any, tree_cache: Any, *, checkpoint: bool
) -> None:
    """AROUND ``release_kv_cache``: close a finished or aborted request, back up a retracted one."""
    state, row_tokens = state_of(req), req.kv.kv_committed_len
    if state is not None and not req.finished():
        if state.runtime.recomputes:  # a decode server has done so: ``pd_decode.back_up_row``
            back_up(state, req, tree_cache)
    elif state is not None:
        # Its answer has not been sent. It may have ended before its last compaction was read.
        state.runtime.read_back(state)
        if state.failure is not None and _finish_type(req) != "abort":
            req.finished_reason = failure_reason(req, state)
    if state is not None:
        free_unmoved(tree_cache, req, state)
    with leaving_history(req, state, tree_cache, checkpoint=checkpoint):
        original(req, tree_cache, checkpoint=checkpoint)
    if state is not None and req.finished() and state.report.summary is None:
        state.runtime.close(state, row_tokens, req.output_ids_through_stop, _finish_type(req))


def _finish_type(req: Any) -> str | None:
    return (req.finished_reason.to_json() or {}).get("type")
