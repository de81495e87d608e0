"""Backup and restore of a retracted request: its KV is copied to host memory and back.

SGLang prefills a retracted request again from all of its tokens. A request with a backup looks to
SGLang like one whose row is cached except for the last token: its input is the tokens of the row,
its prefix is as long as the backup, and one token is computed. ``forward.prepare_forward`` sets the
logical position of that token; ``release.limit_insert`` gives only the prompt to the radix tree.

The host memory of a dropped copy is reused at once, although the device may still be reading it
(``host_memory.py``). Stream order makes this safe:
- Only ``back_up`` writes, by device copies on the schedule stream, after that stream has waited for
  the forward stream.
- ``restore_row`` reads on the schedule stream, ``Runtime.start_recording`` on the forward stream.
  SGLang orders each step behind the schedule stream, so they read after the write. Both have
  launched their reads before ``start_recording`` drops the copy.
The CPU never reads or writes the copies.

On a decode server (PD disaggregation) the network writes to freed slots as well: SGLang sends their
numbers when the CPU has read them from the schedule stream, behind all of these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.patches.engine.binding import bound_to, runtime_of, state_of
from sgl_skipkv.patches.engine.future_kv import backup_bytes
from sgl_skipkv.patches.engine.kv_cache import alloc_slots, row_buffers, wait_for_forward
from sgl_skipkv.patches.engine.output import send_summary
from sgl_skipkv.patches.engine.reuse import copy_history, row_ids
from sgl_skipkv.patches.engine.waiting import end_stranded, is_stranded
from sgl_skipkv.patches.engine.window_pool import (
    alloc_windowed_slots,
    has_window_pool,
    place_windows,
    saved_window_tokens,
    window_buffers,
    window_slots,
)
from sgl_skipkv.request.state import RequestState


def back_up(state: RequestState, req: Any, tree_cache: Any) -> None:
    """The request is about to lose its row: copy its KV and recordings to host memory, if they fit.

    The newest token is left out, because it is computed again.
    """
    pool, kv, runtime = tree_cache.req_to_token_pool, req.kv, state.runtime
    newest = state.prompt.tokens + len(req.output_ids) - 1
    # A row that was restored and has not run since may be shorter than what was recorded of it.
    recorded_tokens = max(kv.kv_committed_len + state.kv.evicted_tokens, state.kv.recorded_tokens)
    if req.input_embeds is not None:
        return  # SGLang drops its output and starts again, so there is nothing to continue
    if not req.output_ids or not newest <= recorded_tokens:
        return  # the request is in its prefill: there is nothing worth saving
    needed = backup_bytes(req, state)
    if needed is None or not runtime.host_memory.fits(needed):
        return
    wait_for_forward(pool)
    row = pool.req_to_token[kv.req_pool_idx]
    slots = row[: newest - state.kv.evicted_tokens].to(torch.int64)
    copy = partial(runtime.back_up, state, _kv_of(tree_cache, slots), recorded_tokens)
    _, error = attempt(f"backup of kv_budget request {state.rid}", copy)
    if runtime.ranks.any(error is not None):
        state.offloaded.backup = None
        state.failure = error or "another rank could not back it up; see the server's log"


def _kv_of(tree_cache: Any, slots: Tensor) -> Iterator[Tensor]:
    """Keys and values of these slots of a row, of one layer after the other, those of a draft model
    too. Of window layers with a pool of their own: of the last tokens."""
    allocator = tree_cache.token_to_kv_pool_allocator
    for buffer in row_buffers(bound_to(tree_cache.req_to_token_pool).scheduler):
        yield buffer[slots]
    if windowed := window_buffers(allocator):
        saved = saved_window_tokens(len(slots), tree_cache)
        seen = window_slots(allocator, slots[len(slots) - saved :])
        for buffer in windowed:
            yield buffer[seen]


def shorten_input(result: None, req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Req.init_next_round_input``: as many tokens as the restored row, and the newest."""
    state = state_of(req)
    if state is not None and state.offloaded.backup is not None:
        tokens = row_ids(req, state)
        row_tokens = state.offloaded.backup.row_tokens
        req.full_untruncated_fill_ids = tokens[:row_tokens] + tokens[-1:]


def lengthen_input(req: Any) -> None:
    """Undo ``shorten_input``: SGLang appends to the input and uses its length."""
    req.full_untruncated_fill_ids = row_ids(req, req.skipkv)


def row_slots(original: Callable[..., Tensor], batch: Any, req: Any) -> Tensor:
    """AROUND ``allocation._prefix_kv_indices``: slots that a row begins with. One hook for both
    cases, because SGLang warns of two around one function."""
    return restore_row(partial(copy_history, original), batch, req)


def restore_row(original: Callable[..., Tensor], batch: Any, req: Any) -> Tensor:
    """Slots of the row; new ones get the backup's KV.

    Prompt tokens that are still in the radix tree are shared, not restored.
    """
    state = state_of(req)
    if state is None or state.offloaded.backup is None or req.kv.holds_kv:
        return original(batch, req)
    backup, matched = state.offloaded.backup, req.kv.cache_protected_len
    req.prefix_len = matched
    shared = original(batch, req)
    req.prefix_len = backup.row_tokens
    allocator, tokens = batch.token_to_kv_pool_allocator, backup.row_tokens - matched
    if has_window_pool(allocator):
        seen = min(tokens, backup.kv[-1].shape[0])
        slots = alloc_windowed_slots(batch.tree_cache, tokens, seen)
        place_windows(batch.tree_cache, req.kv, state, backup.row_tokens, seen)
        req.swa_branching_seqlen = None  # SGLang would insert up to there
    else:
        slots, seen = alloc_slots(batch.tree_cache, tokens), 0
    wait_for_forward(batch.req_to_token_pool)  # a running step may still write to these slots
    buffers = row_buffers(bound_to(batch.req_to_token_pool).scheduler)
    places = [(buffer, slots) for buffer in buffers]
    if windowed := window_buffers(allocator):
        last = window_slots(allocator, slots[tokens - seen :])
        places += [(buffer, last) for buffer in windowed]
    for (buffer, at), saved in zip(places, backup.kv, strict=True):
        buffer[at] = saved.to(buffer.device, first_row=saved.shape[0] - at.shape[0])
    return torch.cat([shared, slots]) if matched else slots


def drop_backup(scheduler: Any, abort_req: Any, req: Any) -> None:
    """BEFORE ``Scheduler.send_abort_output``: a waiting request ends, so its backup is freed, and
    the recordings of a history that it would have continued. Its summary goes with the message.

    SGLang may keep the request itself, as the chunked request of a finished batch.
    """
    state = state_of(req)
    if state is not None:
        if not req.output_ids:  # nothing of it was continued
            state.reuse.continued = None
        if state.report.summary is None:
            state.runtime.close(state, 0, req.output_ids, "abort")
        state.offloaded.backup = state.reuse.continued = None
        send_summary(abort_req, state.report.summary, state.failure)


def forget_backups(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """AROUND ``Scheduler.pause_generation``: mode ``retract`` drops all backups.

    The mode is used to change weights under running requests: KV of old weights must not be
    restored.
    """
    runtime = runtime_of(scheduler)
    if runtime is None or recv_req.mode != "retract":
        original(scheduler, recv_req)
        return
    runtime.backs_up = False
    try:
        _forget_waiting(scheduler, runtime, "a pause")
        original(scheduler, recv_req)
    finally:
        runtime.backs_up = True


def forget_flushed(result: bool, scheduler: Any, empty_cache: bool = True) -> None:
    """AFTER ``Scheduler.flush_cache``: the tree is empty, and its weights may be new ones.

    While it is paused SGLang flushes beside requests that wait.
    """
    runtime = runtime_of(scheduler)
    if result and runtime is not None:
        runtime.histories.lose_all()
        _forget_waiting(scheduler, runtime, "a flush")


def _forget_waiting(scheduler: Any, runtime: Runtime, lost_to: str) -> None:
    """Requests that wait with a backup are computed anew."""
    queues = [scheduler.waiting_queue]
    if not runtime.recomputes:
        queues.append(scheduler.disagg_decode_prealloc_queue.retracted_queue)
    for queue, req in [(one, req) for one in queues for req in one]:
        state = state_of(req)
        # On a decode server a row that is restored waits for its first step, see ``end_paused``.
        if state is not None and state.offloaded.backup is not None and not req.kv.holds_kv:
            runtime.forget_backup(state)
            lengthen_input(req)
            if is_stranded(req):  # it would block the queue for ever
                queue.remove(req)
                end_stranded(scheduler, req, lost_to)
