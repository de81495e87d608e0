"""The scheduler's decode batch, in which compactions run.

``check_decode_mem`` runs after finished requests have left the batch and before the scheduler
decides about retraction, so freed slots count at once. Step N may still be running on the device;
the compaction waits for it on the device, never on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import torch

from sgl_skipkv.eviction.compaction import Plan
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.patches.engine.admission import prefill_tokens
from sgl_skipkv.patches.engine.backup import resume
from sgl_skipkv.patches.engine.binding import Binding, binding_of, state_of
from sgl_skipkv.patches.engine.kv_cache import (
    check_lengths,
    due_of,
    free_evicted,
    paged_cache,
    shorten_row,
)
from sgl_skipkv.request.state import RequestState

logger = logging.getLogger(__name__)


def compact_due_requests(batch: Any, selected_indices: list[int] | None = None) -> None:
    """BEFORE ``ScheduleBatch.check_decode_mem``: compact every request that is due.

    With ``selected_indices`` the caller is SGLang's retraction loop, which checks a subset.
    """
    binding = binding_of(batch.req_to_token_pool)
    if selected_indices is not None or binding is None or binding.runtime is None:
        return
    runtime = binding.runtime
    if runtime.open_requests == 0:
        return
    due: dict[RequestState, int] = {}
    tracked: dict[RequestState, int] = {}
    measured: dict[RequestState, int] = {}
    for i, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is None:
            continue
        row_tokens = req.kv.kv_allocated_len
        runtime.observe(state, row_tokens)
        if state.failure is not None:
            end_request(req, state)
        else:
            is_due = runtime.due(state, row_tokens)
            if is_due:
                check_lengths(req, state, int(batch.seq_lens_cpu[i]))
                due[state] = i
            if runtime.planner.must_track(state, row_tokens, is_due):
                tracked[state] = i
            if not is_due and state.must_measure(row_tokens):
                measured[state] = i
    if not due and not tracked and not measured:
        return
    # The running step writes keys, queries and hidden states on the forward stream.
    binding.scheduler.schedule_stream.wait_stream(binding.scheduler.forward_stream)
    cache = paged_cache(batch.req_to_token_pool, batch.token_to_kv_pool_allocator)
    runtime.track([due_of(batch, i, state, cache) for state, i in tracked.items()])
    sound = [(state, i) for state, i in measured.items() if state.failure is None]
    runtime.measure([due_of(batch, i, state, cache) for state, i in sound])
    wanted = [due_of(batch, i, state, cache) for state, i in due.items() if state.failure is None]
    if not wanted:
        return
    done = runtime.compact(wanted, batch.req_to_token_pool.req_to_token)
    freed = [slots for compaction in done for slots in compaction.freed]
    plans = [plan for compaction in done for plan in compaction.plans]
    if plans:
        _shorten(batch, binding, {due[plan.state]: plan for plan in plans}, freed)


def _shorten(
    batch: Any, binding: Binding, plans: dict[int, Plan], freed: Sequence[torch.Tensor]
) -> None:
    """Free the evicted slots and shorten SGLang's lengths of the rewritten rows.

    All lengths shrink together; ``orig_seq_lens``, the logical length, is unchanged.

    Args:
        plans: index of the request in the batch -> its plan.
    """
    allocator, evicted = batch.token_to_kv_pool_allocator, [0] * len(batch.reqs)
    allocator.free_group_begin()
    free_evicted(binding, allocator, freed)
    allocator.free_group_end()
    for i, plan in plans.items():
        evicted[i] = plan.evicted_tokens
        shorten_row(batch.reqs[i], plan.evicted_tokens)
    binding.metrics.compacted(len(freed), sum(evicted))
    # New tensors, because the running step still uses the old ones.
    batch.seq_lens = batch.seq_lens - device_tensor(evicted, batch.seq_lens.device)
    batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(evicted)
    batch.seq_lens_sum = None
    batch.batch_is_full = False


def end_request(req: Any, state: RequestState) -> None:
    """End a request with ``failure`` set; the others continue."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if req.to_finish is None:
        message = f"kv_budget request {req.rid}: {state.failure}"
        logger.error(message)
        req.to_finish = FINISH_ABORT(
            message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        )


def admit_rows(result: None, batch: Any) -> None:
    """AFTER ``ScheduleBatch.prepare_for_extend``: the batch's requests have rows now."""
    binding = binding_of(batch.req_to_token_pool)
    if binding is None or binding.runtime is None:
        return
    for i, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is not None:
            if state.offloaded.backup is not None:
                resume(req)
            if state.kv.evicted_tokens:  # the row is shorter than the sequence
                batch.orig_seq_lens[i] = prefill_tokens(req)
            binding.runtime.admit(state, req.kv.req_pool_idx, prefill_tokens(req))
