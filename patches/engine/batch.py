"""The scheduler's decode batch: where a compaction happens.

``check_decode_mem`` runs in the scheduler, after finished requests left the batch and before it
decides about retraction, so freed slots count at once. Step N may still be running on the device;
the compaction waits for it there, never on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.eviction.workspace import split_to_fit
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.patches.engine.admission import prefill_tokens
from sgl_skipkv.patches.engine.backup import resume
from sgl_skipkv.patches.engine.binding import Binding, binding_of, state_of
from sgl_skipkv.patches.engine.error_boundary import end_request, plan_requests, track_requests
from sgl_skipkv.patches.engine.kv_cache import due_of, paged_cache
from sgl_skipkv.policy.base import PagedCache
from sgl_skipkv.request.state import RequestState


def compact_due_requests(batch: Any, selected_indices: list[int] | None = None) -> None:
    """BEFORE ``ScheduleBatch.check_decode_mem``: compact every request that is due.

    With ``selected_indices`` the caller is SGLang's retraction loop, which asks about a subset.
    """
    binding = binding_of(batch.req_to_token_pool)
    if selected_indices is not None or binding is None or binding.runtime is None:
        return
    runtime = binding.runtime
    if runtime.open_requests == 0:
        return
    due: list[tuple[int, RequestState]] = []
    tracked: list[tuple[int, RequestState]] = []
    for i, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is None:
            continue
        runtime.observe(state, req.kv.kv_allocated_len)
        if state.failure is not None:
            end_request(req, state)
            continue
        # Before the first decode step the prefill may still be running and its prompt is not in the
        # tree yet. One that was restored is as far as it was: it compacts when it would have.
        if req.decode_batch_idx < 1 and not state.restored:
            continue
        is_due = runtime.due(state, req.kv.kv_allocated_len)
        if is_due:
            due.append((i, state))
        if runtime.planner.must_track(state, req.kv.kv_allocated_len, is_due):
            tracked.append((i, state))
    if not due and not tracked:
        return
    # Keys, queries and hidden states of the running step are written on the forward stream.
    binding.scheduler.schedule_stream.wait_stream(binding.scheduler.forward_stream)
    cache = paged_cache(batch.req_to_token_pool, batch.token_to_kv_pool_allocator)
    if tracked:
        _track(batch, runtime, tracked, cache)
    due = [(i, state) for i, state in due if state.failure is None]
    if due:
        _compact(batch, binding, runtime, due, cache)


def _track(
    batch: Any,
    runtime: Runtime,
    tracked: list[tuple[int, RequestState]],
    cache: PagedCache | None,
) -> None:
    """Replay the attention of every step since the last time, for all these requests together."""
    row_tokens = [batch.reqs[i].kv.kv_allocated_len for i, _ in tracked]
    steps, work_bytes = runtime.recorder.queries.window, runtime.config.compaction_work_bytes
    for part in split_to_fit(row_tokens, 0, work_bytes, steps=steps):
        track_requests(runtime, [due_of(batch, *tracked[j], cache) for j in part])


def _compact(
    batch: Any,
    binding: Binding,
    runtime: Runtime,
    due: list[tuple[int, RequestState]],
    cache: PagedCache | None,
) -> None:
    allocator = batch.token_to_kv_pool_allocator
    evicted = [0] * len(batch.reqs)
    for i, state in due:
        _check_lengths(batch.reqs[i], state, int(batch.seq_lens_cpu[i]))
    heads = 0 if cache is None else cache.heads
    freed: list[torch.Tensor] = []
    row_tokens = [batch.reqs[i].kv.kv_allocated_len for i, _ in due]
    for part in split_to_fit(row_tokens, heads, runtime.config.compaction_work_bytes):
        freed += _compact_part(batch, runtime, [due[j] for j in part], cache, evicted)
    if not freed:
        return
    allocator.free_group_begin()
    for slots in freed:
        allocator.free(slots)
    allocator.free_group_end()
    if binding.poison is not None:
        for slots in freed:
            binding.poison.mark(slots)
    binding.metrics.compacted(len(freed), sum(evicted))
    # New tensors: the running step still holds the old ones.
    batch.seq_lens = batch.seq_lens - device_tensor(evicted, batch.seq_lens.device)
    batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(evicted)
    batch.seq_lens_sum = None
    batch.batch_is_full = False


def _compact_part(
    batch: Any,
    runtime: Runtime,
    due: list[tuple[int, RequestState]],
    cache: PagedCache | None,
    evicted: list[int],
) -> list[torch.Tensor]:
    """Rewrite these rows. What that took is free again afterwards.

    Args:
        evicted: of each of the batch's requests (changed in place).

    Returns:
        int64 [freed] of each request that was compacted.
    """
    planned = plan_requests(runtime, [due_of(batch, i, state, cache) for i, state in due])
    if not planned:
        return []
    number = {id(state): i for i, state in due}
    for one, plan in planned:
        i = number[id(one.state)]
        # One slot holds the KV of one token, so all lengths shrink together; orig_seq_lens, the
        # logical length, stays.
        batch.reqs[i].kv.kv_committed_len -= plan.evicted_tokens
        batch.reqs[i].kv.kv_allocated_len -= plan.evicted_tokens
        evicted[i] = plan.evicted_tokens
    return runtime.commit(
        [(one.state, plan) for one, plan in planned], batch.req_to_token_pool.req_to_token
    )


def _check_lengths(req: Any, state: RequestState, seq_len: int) -> None:
    """The equations that a rewrite of the row rests on."""
    kv = req.kv
    own_from = 0 if state.keeps_prompt_private else state.prompt_tokens
    assert kv.kv_committed_len == kv.kv_allocated_len == seq_len, (
        f"committed = allocated = sequence length: {kv.kv_committed_len}, "
        f"{kv.kv_allocated_len}, {seq_len} ({req.rid})"
    )
    assert kv.cache_protected_len <= own_from, (
        f"the tree owns at most the prompt: {kv.cache_protected_len} > {own_from} ({req.rid})"
    )
    assert kv.req_pool_idx == state.row, f"row: {kv.req_pool_idx} against {state.row} ({req.rid})"


def admit_rows(result: None, batch: Any) -> None:
    """AFTER ``ScheduleBatch.prepare_for_extend``: new requests have their rows now."""
    binding = binding_of(batch.req_to_token_pool)
    if binding is None or binding.runtime is None:
        return
    for i, req in enumerate(batch.reqs):
        state = state_of(req)
        if state is not None:
            if state.backup is not None:
                resume(req, batch, i)
            binding.runtime.admit(state, req.kv.req_pool_idx, prefill_tokens(req))
