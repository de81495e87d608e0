"""The scheduler's decode batch, in which compactions run.

``check_decode_mem`` runs after finished requests have left the batch and before the scheduler
decides about retraction, so freed slots count at once. Step N may still be running on the device;
the compaction waits for it on the device, never on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import torch

from sgl_skipkv.eviction.compaction import Compaction
from sgl_skipkv.eviction.due import Due
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.patches.engine.backup import lengthen_input
from sgl_skipkv.patches.engine.binding import bound_to, runtime_of, state_of
from sgl_skipkv.patches.engine.future_kv import prefill_tokens
from sgl_skipkv.patches.engine.kv_cache import (
    check_lengths,
    due_of,
    paged_cache,
    release_evicted,
    row_buffers,
    wait_for_forward,
)
from sgl_skipkv.patches.engine.speculation import (
    evictable_tokens,
    published_lengths,
    shorten_published,
)
from sgl_skipkv.patches.engine.window_pool import free_out_of_windows
from sgl_skipkv.request.state import RequestState

logger = logging.getLogger(__name__)


def compact_due_requests(batch: Any, selected_indices: list[int] | None = None) -> None:
    """BEFORE ``ScheduleBatch.check_decode_mem``: compact every request that is due.

    With ``selected_indices`` the caller is SGLang's retraction loop, which checks a subset.
    """
    runtime = runtime_of(batch.req_to_token_pool)
    if selected_indices is not None or runtime is None or runtime.open_requests == 0:
        return
    places, row_tokens = dict[RequestState, int](), dict[RequestState, int]()
    for i, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is None:
            continue
        places[state], row_tokens[state] = i, evictable_tokens(batch, req, state)
        runtime.observe(state, row_tokens[state])
        if state.failure is not None and req.to_finish is None:  # the others continue
            req.to_finish = failure_reason(req, state)
    if runtime.metrics.gauges_due():
        runtime.metrics.running(row_tokens)
    work = runtime.compactor.work_before_step(row_tokens)
    if not any(work):
        return
    # The running step writes keys, queries and hidden states on the forward stream.
    wait_for_forward(batch.req_to_token_pool)
    pools = batch.req_to_token_pool, batch.token_to_kv_pool_allocator
    binding, cache = bound_to(pools[0]), paged_cache(*pools)
    rows = {state: (batch.reqs[places[state]], row_tokens[state]) for state in work.compacted}
    windows = free_out_of_windows(batch.tree_cache, rows, binding.limits.model_window_tokens)
    published = published_lengths(batch)

    def due(state: RequestState) -> Due:
        place = places[state]
        req, tokens = batch.reqs[place], row_tokens[state]
        check_lengths(req, state)
        made = due_of(req, state, tokens, *pools, cache)
        if published is not None:
            return made._replace(written_tokens=published[state.row])
        seq_len = int(batch.seq_lens_cpu[place])
        assert seq_len == tokens, f"sequence length {seq_len}, row {tokens} ({req.rid})"
        return made

    table = batch.req_to_token_pool.req_to_token
    buffers = row_buffers(binding.scheduler)
    done = runtime.compactor.before_step(work, due, table, buffers, windows)
    if done:
        _shorten(batch, done, {state: batch.reqs[i] for state, i in places.items()})


def _shorten(batch: Any, done: Sequence[Compaction], reqs: Mapping[RequestState, Any]) -> None:
    """Free the evicted slots and shorten SGLang's lengths of the rewritten rows.

    All lengths shrink together; ``orig_seq_lens``, the logical length, is unchanged.
    """
    allocator = batch.token_to_kv_pool_allocator
    allocator.free_group_begin()
    release_evicted(batch.req_to_token_pool, allocator, done, reqs)
    allocator.free_group_end()
    plans = [plan for compaction in done for plan in compaction.plans]
    evicted_of: dict[RequestState | None, int] = {plan.state: plan.evicted_tokens for plan in plans}
    evicted = [evicted_of.get(state_of(req), 0) for req in batch.reqs]
    # New tensors, because the running step still uses the old ones.
    batch.seq_lens = batch.seq_lens - device_tensor(evicted, batch.seq_lens.device)
    batch.seq_lens_sum = None
    if batch.seq_lens_cpu is not None:
        batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(evicted)
    shorten_published(batch, [plan.state.row for plan in plans], [*evicted_of.values()])
    batch.batch_is_full = False


def failure_reason(req: Any, state: RequestState) -> Any:
    """The finish reason of a request with ``failure`` set."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = f"kv_budget request {state.rid}: {state.failure}"
    logger.error(message)
    return FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def admit_rows(result: None, batch: Any) -> None:
    """AFTER ``ScheduleBatch.prepare_for_extend``: the batch's requests have rows now."""
    runtime = runtime_of(batch.req_to_token_pool)
    if runtime is None:
        return
    for i, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is not None:
            if state.offloaded.backup is not None:
                lengthen_input(req)
            if state.kv.evicted_tokens:  # the row is shorter than the sequence
                batch.orig_seq_lens[i].fill_(prefill_tokens(req))
            runtime.admit(state, req.kv.req_pool_idx, prefill_tokens(req))
