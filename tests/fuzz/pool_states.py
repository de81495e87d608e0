"""Layers with a state instead of KV, of a ``World``: SGLang's pools, allocators and tree.

The model has two layers: the first sees the whole row, the second has a state. A state is a hash of
the content of all tokens that it has taken in, so it is right only for exactly these. Whatever
writes to states on a GPU runs on the forward stream, in order, or with nothing else beside it: here
it is written at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from pool_beside import WorldBeside
from pool_content import CONTEXT, KV_HEADS, POOL, ROWS
from pool_state_books import StateBooks, state_after


@contextmanager
def state_flags(
    *,
    copies: bool = False,
    page_tokens: int = 1,
    state_chunk: int = 4,
    interval: int = 8,
    unlocks: bool = False,
) -> Iterator[None]:
    """A published configuration, and SGLang's variables.

    Args:
        copies: whether steps copy states for the tree (``extra_buffer``), or who gives them to it
            does (``no_buffer``).
        state_chunk: tokens between the states that a prefill's kernels know. With 1 and pages of
            one token SGLang itself keeps the state behind another token where prefixes branch.
        interval: decode steps copy states at its multiples.
        unlocks: whether a prefix's state may leave the tree while a request goes on from it.
    """
    from sglang.srt.runtime_context import get_exec, get_server_args

    variables = {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": str(unlocks)}
    settings = {"enable_mamba_extra_buffer": copies, "mamba_track_interval": interval}
    chunk = max(state_chunk, page_tokens)
    with ExitStack() as ends:
        ends.enter_context(patch.dict(os.environ, variables))
        ends.enter_context(get_exec().mamba.override(**settings))
        ends.enter_context(
            patch.object(get_server_args(), "_mamba_cache_chunk_size", chunk, create=True)
        )
        # A decode step pins a mask, which asks for the driver of a GPU.
        ends.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        yield


def states_per_row(*, copies: bool, overlap: bool, unlocks: bool) -> int:
    """How many SGLang provides for each running request (``_calculate_mamba_ratio``)."""
    if not copies:
        return 3
    return 3 - unlocks + (2 if overlap else 1)


class StateWorld(StateBooks, WorldBeside):
    """A world with states.

    Args:
        copies, state_chunk: as in ``state_flags``.
        state_slots: of all states.
    """

    def __init__(
        self,
        *,
        copies: bool = False,
        state_chunk: int = 4,
        state_slots: int = 5 * ROWS,
        **how: Any,
    ) -> None:
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor,
        )

        self.copies_states, self.state_chunk = copies, state_chunk
        self.state_slots = state_slots
        assert copies or not how.get("overlap", True), "SGLang has no overlap without copies"
        super().__init__(**how, reuse_bytes=0, backup_bytes=0)
        self.model_config.hf_text_config = SimpleNamespace(mamba_chunk_size=state_chunk)
        parts = dict.fromkeys(field.name for field in fields(SchedulerBatchResultProcessor))
        self.processor = SchedulerBatchResultProcessor(**{**parts, "tree_cache": self.tree_cache})
        inserting = self.tree_cache.insert

        def insert(params: Any) -> Any:
            result = inserting(params)
            self.book_insert(params, result)
            return result

        self.tree_cache.insert = insert
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(forward=self._measured))
        self.dp_attn_adapter = SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda batch: None)

    def _row_pool(self) -> Any:
        from sglang.srt.configs.mamba_utils import (
            Mamba2CacheParams,
            Mamba2StateDType,
            Mamba2StateShape,
        )
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

        sizes = dict.fromkeys(
            ["intermediate_size", "conv_dim", "ssm_state_size", "num_heads", "head_dim"], 4
        )
        shape = Mamba2StateShape(
            conv=[(4, 1)], temporal=(1, 1, 4), state_size=4, conv_kernel=2, **sizes
        )
        dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
        return HybridReqToTokenPool(
            size=ROWS,
            mamba_size=self.state_slots,
            mamba_spec_state_size=ROWS,
            max_context_len=CONTEXT,
            device=self.device,
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, dtype=dtype, layers=[1]),
            mamba_layer_ids=[1],
            enable_mamba_extra_buffer=self.copies_states,
            enable_overlap_schedule=self.overlap,
        )

    def _allocator(self) -> Any:
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

        paged = {} if self.page_size == 1 else {"page_size": self.page_size}
        allocator_of = PagedTokenToKVPoolAllocator if paged else TokenToKVPoolAllocator
        shared = {"size": POOL, "dtype": torch.float32, "device": self.device}
        pool = HybridLinearKVPool(
            **shared,
            page_size=self.page_size,
            head_num=KV_HEADS,
            head_dim=self.head_dim,
            full_attention_layer_ids=[0],
            mamba_pool=self.req_to_token_pool.mamba_pool,
        )
        return allocator_of(**paged, **shared, need_sort=False, kvcache=pool)

    def _tree_components(self) -> tuple[Any, ...]:
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

        return (ComponentType.FULL, ComponentType.MAMBA)

    def _bind(self, **given: Any) -> None:
        super()._bind(**given)
        limits = replace(self.skipkv.limits, without_reuse=("a state instead of KV",))
        bound = replace(self.skipkv, limits=limits)
        self.skipkv = self.req_to_token_pool.skipkv = bound

    def evict_tree(self, tokens: int, states: int | None = None) -> None:
        """states: how many; None: all, if all tokens are evicted, and none otherwise."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        states = (self.state_slots if tokens == POOL else 0) if states is None else states
        self.tree_cache.evict(EvictParams(num_tokens=tokens, mamba_num=states))

    def abort(self, req: Any) -> None:
        from sglang.srt.mem_cache import common

        waits = req in self.waiting_queue
        super().abort(req)
        if waits and req.kv.holds_mamba:
            common.release_kv_cache(req, self.tree_cache, checkpoint=False)

    def measure(self, tokens: int) -> None:
        """New weights are measured, between two requests."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        from sgl_skipkv.patches.startup.measurements import _prefill

        with patch.object(ForwardBatch, "init_new", lambda batch, runner, **_: batch):
            _prefill(self, [3] * tokens, self.recorder, serving=True)
        self.count["measurements"] += 1

    def _decode_batch(self, batch: Any) -> Any:
        if self.copies_states:
            self.set_next_copies(batch)
        before = self._stored()
        decode = super()._decode_batch(batch)
        assert self._stored() == before, "a compaction or a retraction wrote to states"
        return decode

    def set_next_copies(self, batch: Any) -> None:
        """A step copies a state to the one of two slots that does not have the last copy.

        SGLang chooses it when results arrive, and loses count where a prefill runs beside a step
        that copies, or the step before that. It then writes over the last copy. If the request ends
        just then, the tree gets that slot under the last copy's length.
        """
        pool, written = self.req_to_token_pool, {}
        for launched, _ in self.result_queue:
            if launched.mamba_track_mask_cpu is not None:
                slots = zip(launched.reqs, launched.mamba_track_buffer_indices, strict=True)
                copies = zip(slots, launched.mamba_track_mask_cpu, strict=True)
                written |= {id(req): at for (req, at), copied in copies if copied}
        for req in batch.reqs:
            last = written.get(id(req), req.kv.mamba_last_track_idx)
            req.kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(last)

    # -- results

    def _finish_decode(self, batch: Any, tokens: list[int | None]) -> None:
        for i, (req, token) in enumerate(zip(batch.reqs, tokens, strict=True)):
            if self.overlap and (req.finished() or req.is_retracted):
                continue
            req.output_ids.append(token)
            req.update_finish_state()
            slots = self._row(req)
            result = SimpleNamespace(num_correct_drafts_per_req_cpu=None)
            self.processor._handle_finish_state_updated_req(req, batch, result, i, None)
            if req.finished():
                self._forget(req, slots)

    # -- the forward pass

    def _forward(self, batch: Any) -> list[int | None]:
        tokens = super()._forward(batch)
        self._begin_states(batch)
        decode = batch.forward_mode.is_decode()
        counts = [1] * len(batch.reqs) if decode else batch.extend_lens
        for i, (req, count) in enumerate(zip(batch.reqs, counts, strict=True)):
            new = [entry.tag for entry in self.rows[req.rid][-count:]]
            self.states[req.rid] = state_after(new, self.states[req.rid])
            self._take_in(batch, i, new)
        return tokens

    def _measured(self, batch: Any) -> None:
        self._begin_states(batch)
        self._take_in(batch, 0, range(batch.extend_lens[0]))

    def _begin_states(self, batch: Any) -> None:
        """As SGLang's model runner does before a step."""
        pool = self.req_to_token_pool
        if batch.mamba_clear_indices is not None:
            pool.mamba_pool.clear_slots(batch.mamba_clear_indices)
        if batch.mamba_cow_src_indices is not None:
            pool.copy_mamba_state(batch.mamba_cow_src_indices, batch.mamba_cow_dst_indices)
            self.count["states continued"] += len(batch.mamba_cow_src_indices)

    def _take_in(self, batch: Any, i: int, tags: Any) -> None:
        """One request's tokens. Copies are made of the states behind as many as SGLang's kernels
        find for the length that it asks for."""
        pool = self.req_to_token_pool
        own = int(pool.get_mamba_indices(batch.req_pool_indices[i]))
        conv, recurrent = self._stored()[own]
        self._store_state(own, state_after(tags, conv), state_after(tags, recurrent))
        if batch.mamba_track_mask is None or not batch.mamba_track_mask[i]:
            return
        counts = [len(tags)] * 2
        if not batch.forward_mode.is_decode():
            wanted = int(batch.mamba_track_seqlens[i]) - batch.prefix_lens[i]
            chunk = max(self.state_chunk, self.page_size)
            counts[0] = wanted // chunk * chunk
            if wanted % self.state_chunk:  # otherwise the last state
                counts[1] = wanted // self.state_chunk * self.state_chunk
        copied = (
            state_after(tags[:count], state)
            for count, state in zip(counts, (conv, recurrent), strict=True)
        )
        self._store_state(int(batch.mamba_track_indices[i]), *copied)
        self.count["states copied"] += 1
