"""Speculative decoding (EAGLE, EAGLE3 and MTP, STANDALONE): a step adds several tokens to a row.

SGLang gives a row more slots than it has tokens: those that the next drafts are written to, its
tail. With the overlap scheduler a step is running when a compaction comes, and only the device
knows how many of its drafts are right. So a compaction evicts from the tokens of finished steps,
and the tail follows behind what is kept. The draft model reads the same row, in its own pool: what
is evicted is evicted for both.

Three lengths are of row entries: SGLang's (``kv_committed_len``, as of the last result), the
batch's, and the one on the device that the running step has published for the next one. Positions
of drafts and of verified tokens are computed from these, so they are shifted as in other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, device_tensors
from sgl_skipkv.patches.engine.binding import bound_to, state_of
from sgl_skipkv.request.state import RequestState

_SHIFTS = "skipkv_shifts"


def is_speculative(holder: Any) -> bool:
    """Whether a scheduler or a batch decodes speculatively."""
    return not holder.spec_algorithm.is_none()


def chain_tokens(scheduler: Any) -> int:
    """The most tokens of a step that verifies drafts; 0: it decodes one token of each request."""
    if not is_speculative(scheduler):
        return 0
    from sglang.srt.runtime_context import get_spec

    tokens: int = get_spec().speculative_num_draft_tokens
    return tokens


def reserved_tokens(scheduler: Any) -> int:
    """The most slots of a row beyond a token per step: its tail, and what a step adds before the
    next compaction can come."""
    if not is_speculative(scheduler):
        return 0
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_len_per_decode,
        get_alloc_reserve_per_decode,
    )

    tokens: int = get_alloc_reserve_per_decode() + get_alloc_len_per_decode()
    return tokens


def boundary_tokens(scheduler: Any) -> int:
    """How many tokens behind an entry its key in the radix tree contains: with EAGLE the next one,
    of which the draft model's KV was computed, so a tree of N entries names N + 1 tokens."""
    return int(scheduler.spec_algorithm.is_eagle())


def evictable_tokens(batch: Any, req: Any, state: RequestState) -> int:
    """Row entries that a compaction may evict from: those of the steps before the last one that
    was launched, with overlap, because its result is not known yet. Where it is, as behind another
    request's prefill, it does not count either: what is kept must not depend on others."""
    tokens: int = req.kv.kv_committed_len
    if is_speculative(batch) and batch.enable_overlap and not state.kv.running_steps:
        tokens -= state.kv.step_tokens
    return tokens


def count_step(result: Any, states: Sequence[RequestState | None]) -> None:
    """A step is launched: it verifies once."""
    if result.forward_mode.is_target_verify():
        for state in states:
            if state is not None:
                state.kv.running_steps += 1


def read_step(result: list[list[int]], processor: Any, output: Any, batch: Any) -> None:
    """AFTER ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``: how many tokens a step has
    added to each row."""
    for req, tokens in zip(batch.reqs, result, strict=True):
        state = state_of(req)
        if state is not None and not req.is_retracted:
            state.kv.running_steps -= 1
            state.kv.step_tokens = len(tokens)


def published_lengths(batch: Any) -> Tensor | None:
    """int64 [table rows], row entries with a token once the running step has ended, on the device;
    None where SGLang's own are up to date."""
    if not is_speculative(batch) or not batch.enable_overlap:
        return None
    lengths: Tensor = bound_to(batch.req_to_token_pool).scheduler.future_map.new_seq_lens_buf
    return lengths


def shorten_published(batch: Any, rows: Sequence[int], evicted_tokens: Sequence[int]) -> None:
    """Shorten the lengths that the running step has published, on the stream of the compactions,
    which has waited for that step. Readers wait for ``publish_ready``; recorded again, it makes
    them wait for this write."""
    lengths = published_lengths(batch)
    if lengths is None:
        return
    at, evicted = device_tensors([rows, evicted_tokens], lengths.device)
    lengths.index_add_(0, at, evicted, alpha=-1)
    scheduler = bound_to(batch.req_to_token_pool).scheduler
    if (published := scheduler.future_map.publish_ready) is not None:
        published.record()


def place_step(result: Any, shifts: Sequence[int]) -> None:
    """Logical positions of a verify step, or of a draft model's pass behind it. Those of its decode
    steps follow in ``place_draft``: until then attention backends take them for row lengths."""
    if not any(shifts):
        return
    per_request = result.positions.shape[0] // len(shifts)
    shift = device_tensor(shifts, result.positions.device).repeat_interleave(per_request)
    shift = shift.to(result.positions.dtype)
    if result.forward_mode.is_decode():
        setattr(result, _SHIFTS, shift)
    else:
        result.positions = result.positions + shift


def place_draft(worker: Any, forward_batch: Any) -> None:
    """BEFORE ``EagleDraftWorker.draft_forward``: the attention of all steps is planned."""
    shift = getattr(forward_batch, _SHIFTS, None)
    if shift is not None:
        forward_batch.positions = forward_batch.positions + shift


def place_captured_draft(runner: Any, shape_key: Any, forward_batch: Any) -> None:
    """BEFORE ``EAGLEDraftCudaGraphRunner._replay_graph``: the same for the buffer that the graph
    reads, whose padded rows are nobody's."""
    shift = getattr(forward_batch, _SHIFTS, None)
    if shift is not None:
        runner.buffers.positions[: shift.shape[0]].add_(shift)
