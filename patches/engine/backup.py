"""Coming back after a retraction: KV copied out before the row goes, copied in where it comes back.

SGLang prefills a retracted request again from all of its tokens. A request with a backup looks to
it
like one whose whole row but for the last token is cached: its tokens are those of the row, its
prefix is as long as the backup, and one token is computed. Its position is the true one
(``forward.prepare_forward``), and the tree is given the prompt alone (``release.limit_insert``).

A copy that is dropped leaves its host memory to the next at once, though the device may not have
read it yet (``host_memory.py``). Stream order keeps the two apart:
- only ``back_up`` writes, by device copies on the schedule stream, which it has ordered behind all
  work of the forward stream that was launched before;
- ``restore_row`` reads on the schedule stream too, and ``Runtime.start_recording`` on the forward
  stream. SGLang orders each step behind the schedule stream, so what they read is there; and both
  have launched their reads before ``start_recording`` drops the copy.
The CPU never touches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.patches.engine.binding import binding_of, state_of
from sgl_skipkv.patches.engine.kv_cache import kv_buffers
from sgl_skipkv.patches.engine.scheduler import end_stranded, is_stranded
from sgl_skipkv.request.state import RequestState


def back_up(state: RequestState, req: Any, tree_cache: Any) -> None:
    """The request loses its row: copy what it held, if there is room in host memory.

    The newest token is left out: it is computed again.
    """
    pool, kv, runtime = tree_cache.req_to_token_pool, req.kv, state.runtime
    newest = state.prompt_tokens + len(req.output_ids) - 1
    recorded_tokens = kv.kv_allocated_len + state.kv.evicted_tokens
    if req.input_embeds is not None:
        return  # SGLang throws its output away and begins again: it has no tokens to go on from
    if not req.output_ids or not newest <= recorded_tokens:
        return  # in the middle of its prefill: there is nothing yet that cannot be had again
    if not runtime.can_back_up(state, kv.kv_allocated_len, len(req.output_ids)):
        return
    _wait_for_forward(pool)
    row = pool.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
    slots = row[: newest - state.kv.evicted_tokens].to(torch.int64)
    buffers = kv_buffers(tree_cache.token_to_kv_pool_allocator)
    runtime.back_up(state, (buffer[slots] for buffer in buffers), recorded_tokens)


def shorten_input(result: None, req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Req.init_next_round_input``: the tokens of the row that comes back, and the next."""
    state = state_of(req)
    if state is not None and state.offloaded.backup is not None:
        tokens = req.origin_input_ids + req.output_ids
        row_tokens = state.offloaded.backup.row_tokens
        req.full_untruncated_fill_ids = tokens[:row_tokens] + tokens[-1:]


def _lengthen_input(req: Any) -> None:
    """All tokens again. SGLang goes by the length of what is there and appends to it, so a
    shortened input must not be left behind."""
    req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids


def restore_row(original: Callable[..., Tensor], batch: Any, req: Any) -> Tensor:
    """AROUND ``allocation._prefix_kv_indices``: slots of the row; new ones get the backup's KV.

    Of a shared prompt, what the tree still has is used as it is.
    """
    from sglang.srt.mem_cache.allocation import alloc_token_slots

    state = state_of(req)
    if state is None or state.offloaded.backup is None or req.kv.holds_kv:
        return original(batch, req)
    backup, matched = state.offloaded.backup, req.kv.cache_protected_len
    req.prefix_len = matched
    shared = original(batch, req)
    req.prefix_len = backup.row_tokens
    slots: Tensor = alloc_token_slots(batch.tree_cache, backup.row_tokens - matched)
    _wait_for_forward(batch.req_to_token_pool)  # the slots' last owners may still be writing
    buffers = kv_buffers(batch.token_to_kv_pool_allocator)
    for buffer, saved in zip(buffers, backup.kv, strict=True):
        buffer[slots] = saved.to(buffer.device, first_row=matched)
    return torch.cat([shared, slots]) if matched else slots


def resume(req: Any, batch: Any, i: int) -> None:
    """The restored row is in the page table: length and tokens are the true ones again."""
    _lengthen_input(req)
    batch.orig_seq_lens[i] = len(req.full_untruncated_fill_ids)


def drop_backup(result: None, scheduler: Any, abort_req: Any, req: Any) -> None:
    """AFTER ``Scheduler.send_abort_output``: the request ends while it waits; SGLang may still hold
    on to the request, as the chunked one of a batch that is over.
    """
    state = state_of(req)
    if state is not None:
        state.offloaded.backup = None


def forget_backups(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """AROUND ``Scheduler.pause_generation``: ``retract`` asks for KV to be computed again.

    That is how weights are changed under running requests: KV of the old ones must not come back.
    """
    binding = binding_of(scheduler)
    if binding is None or binding.runtime is None or recv_req.mode != "retract":
        original(scheduler, recv_req)
        return
    with binding.runtime.without_backups():
        for req in list(scheduler.waiting_queue):
            state = state_of(req)
            if state is not None and state.offloaded.backup is not None:
                state.runtime.forget_backup(state)
                _lengthen_input(req)
                if is_stranded(req):  # it would wait for ever, and everybody behind it
                    scheduler.waiting_queue.remove(req)
                    end_stranded(scheduler, req)
        original(scheduler, recv_req)


def _wait_for_forward(req_to_token_pool: Any) -> None:
    """Order this stream behind the running step; on the device, never on the CPU."""
    binding = binding_of(req_to_token_pool)
    if binding is not None:
        binding.scheduler.schedule_stream.wait_stream(binding.scheduler.forward_stream)
