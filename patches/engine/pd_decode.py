"""PD disaggregation: a prefill server computes prompts, and the decode server evicts.

Nothing is evicted before the first decode step, so a prefill server has nothing to do. A decode
server gets a row without a prefill: its keys and values arrive over the network, and SGLang makes a
batch of such rows without a forward pass (``prebuilt``). What eviction needs is recorded from the
first decode step on; a request that needs more of its prompt is refused (``limits.py``).

A decode server cannot compute a row anew. So a retracted request is restored from its backup, and
one without a backup ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.patches.engine.backup import back_up, lengthen_input
from sgl_skipkv.patches.engine.binding import bound_to, evicting_state_of, runtime_of, state_of
from sgl_skipkv.patches.engine.future_kv import backup_bytes, prefill_tokens
from sgl_skipkv.patches.engine.kv_cache import row_buffers, wait_for_forward
from sgl_skipkv.patches.engine.waiting import end_stranded
from sgl_skipkv.request.state import RequestState

logger = logging.getLogger(__name__)


def hold_back_untracked(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """AROUND ``_get_new_prebuilt_batch``: requests wait until a track is free for them. Those that
    need none pass them."""
    runtime = runtime_of(scheduler)
    if runtime is None:
        return original(scheduler, running_batch)
    if scheduler.enable_priority_scheduling:
        scheduler.policy.calc_priority(scheduler.waiting_queue, running_batch)
    ready, held_back, before = list[Any](), list[Any](), list[RequestState]()
    for req in scheduler.waiting_queue:
        state = state_of(req)
        if state is None or runtime.has_track(state, before):
            ready.append(req)
            before += [] if state is None else [state]
        else:
            held_back.append(req)
    scheduler.waiting_queue = ready
    batch = original(scheduler, running_batch)
    scheduler.waiting_queue = held_back + scheduler.waiting_queue
    return batch


def start_rows(batch: Any, future_map: Any) -> None:
    """BEFORE ``ScheduleBatch.process_prebuilt``: rows have arrived, or are restored.

    SGLang has let the schedule stream wait for the running step, and the next one waits for it.
    """
    runtime = runtime_of(batch.req_to_token_pool)
    if runtime is None:
        return
    states = [state_of(req) for req in batch.reqs]
    for req, state in zip(batch.reqs, states, strict=True):
        if state is None:
            continue
        if state.offloaded.backup is not None:
            lengthen_input(req)
        tokens = prefill_tokens(req) - 1  # the newest token has no KV yet
        runtime.admit(state, req.kv.req_pool_idx, tokens)
        runtime.start_recording(state)
        # The step that ran when it was retracted has recorded that token, and its result is lost.
        if state.held.track_id and state.kv.recorded_tokens > tokens:
            runtime.silence(state, silent=True)
        if state.schedule is not None and runtime.steerer is not None:
            schedule = state.schedule.copy()
            schedule.feed(req.output_ids[:-1])
            runtime.steerer.start(state.row, schedule)
    evicted = [0 if state is None else state.kv.evicted_tokens for state in states]
    if any(evicted):  # SGLang has made them of the requests' tokens
        batch.seq_lens = batch.seq_lens - device_tensor(evicted, batch.seq_lens.device)
        batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(evicted)
        batch.seq_lens_sum -= sum(evicted)


def end_silence(runtime: Runtime, batch: Any, states: Sequence[RequestState | None]) -> None:
    """Restored rows record again from the first token on that is not recorded yet."""
    if runtime.recomputes:
        return
    for state, tokens in zip(states, batch.seq_lens_cpu.tolist(), strict=True):
        if state is not None and state.held.is_silent:
            if tokens + state.kv.evicted_tokens > state.kv.recorded_tokens:
                runtime.silence(state, silent=False)


def row_tokens(original: Callable[..., int], req: Any) -> int:
    """AROUND ``DecodePreallocQueue._pre_alloc_fill_len``: tokens of the row to be allocated."""
    state = state_of(req)
    if state is None or state.offloaded.backup is None:
        return original(req)
    tokens: int = state.offloaded.backup.row_tokens
    return tokens


def back_up_row(
    original: Callable[..., bool],
    req: Any,
    tree_cache: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    backend: str,
) -> bool:
    """AROUND ``backup_kv_cache``: the request's row and recordings, in our host memory.

    SGLang ends a request that has no backup.
    """
    state = evicting_state_of(req)
    if state is None:
        return original(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend)
    back_up(state, req, tree_cache)
    if state.offloaded.backup is None and state.failure is None:
        needed, limit = backup_bytes(req, state), state.runtime.config.retraction_backup_bytes
        why = "it cannot be copied in this moment"
        if needed is not None:
            why = f"{needed} bytes do not fit beside others into retraction_backup_bytes ({limit})"
        state.failure = (
            f"kv_budget request {state.rid}: the KV pool was full, a decode server computes no "
            f"prompts, and the request has no backup: {why}. Lower the load, or raise "
            "retraction_backup_bytes (host memory), --max-total-tokens or --mem-fraction-static."
        )
        logger.error(state.failure)
    return state.offloaded.backup is not None


def discard_backup(original: Callable[..., None], req: Any, tree_cache: Any, backend: str) -> None:
    """AROUND ``discard_kv_cache_backup``: ``drop_backup`` frees our backup."""
    if evicting_state_of(req) is None:
        original(req, tree_cache, backend)


def restore_row(
    original: Callable[..., None],
    req: Any,
    tree_cache: Any,
    req_to_token_pool: Any,
    token_to_kv_pool_allocator: Any,
    backend: str,
) -> None:
    """AROUND ``restore_kv_cache``: keys and values of the backup; ``start_rows`` restores what was
    recorded."""
    state = state_of(req)
    if state is None or state.offloaded.backup is None:
        original(req, tree_cache, req_to_token_pool, token_to_kv_pool_allocator, backend)
        return
    backup = state.offloaded.backup
    wait_for_forward(req_to_token_pool)  # a running step may still write to these slots
    row = req_to_token_pool.req_to_token[req.kv.req_pool_idx, : backup.row_tokens]
    slots = row.to(torch.int64)
    buffers = row_buffers(bound_to(req_to_token_pool).scheduler)
    for buffer, saved in zip(buffers, backup.kv, strict=True):
        buffer[slots] = saved.to(buffer.device)


def end_paused(original: Callable[..., None], queue: Any, req: Any) -> None:
    """AROUND ``DecodePreallocQueue.hold_rebootstrap``: ``pause_generation`` (mode ``retract``) has
    freed the request's KV, to let the prefill server compute all of its tokens with new weights.

    What was recorded of them and how they were steered is not computed there, so the request ends.
    """
    state = state_of(req)
    if state is None or not state.settings.changes_kv:
        original(queue, req)
        return
    if req.pd_rebootstrap_forced_output_id is not None:
        req.output_ids.append(req.pd_rebootstrap_forced_output_id)
        req.pd_rebootstrap_forced_output_id = None
    req.pd_rebootstrap_in_progress = False
    end_stranded(queue.scheduler, req, "a pause")
