"""Speculative decoding without a GPU: SGLang's own workers, with its kernels in plain torch.

A draft is a chain (``--speculative-eagle-topk 1``), and tokens are sampled greedily: SGLang's
kernels for trees and for drafts that are accepted by chance have no form here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.cpu.attention import GroupedTorchAttnBackend


def serve_speculation() -> None:
    """Replace the kernels that a step of a chain starts, and the draft's attention."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.managers import overlap_utils
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils, eagle_worker_common
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    # It tries the kernel that moves the accepted path of a tree.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None
    allocation.assign_req_to_token_pool_func = _write_rows
    cache_locs.assign_extend_cache_locs_uniform_func = _verified_slots
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = _drafted_slots
    eagle_worker_common.fill_bonus_tokens_func = _last_accepted
    eagle_worker_common.build_tree_kernel_efficient = _chain
    eagle_utils.verify_tree_greedy_func = _accept_greedily
    overlap_utils.gather_spec_extras = _gather_rows
    DraftBackendFactory.create_decode_backend = _draft_steps
    DraftBackendFactory.create_draft_extend_backend = lambda factory: GroupedTorchAttnBackend(
        factory.draft_model_runner
    )


def _write_rows(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, stops: Tensor, slots: Tensor, count: int
) -> None:
    """Entries ``[start, stop)`` of each row, from ``slots`` one after the other."""
    lengths = (stops - starts).tolist()
    parts = torch.split(slots, lengths)
    for row, start, new in zip(rows.tolist(), starts.tolist(), parts, strict=True):
        req_to_token[row, start : start + len(new)] = new.to(req_to_token.dtype)


def _entries(req_to_token: Tensor, rows: Tensor, starts: Tensor, count: int) -> Tensor:
    """int64 [rows * count]: ``count`` entries of each row, from its start."""
    columns = starts[:, None] + torch.arange(count)
    return req_to_token[rows[:, None], columns].to(torch.int64).flatten()


def _verified_slots(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    draft_token_num: int,
    **sizes: Any,
) -> Tensor:
    return _entries(req_to_token, req_pool_indices, start_offset, draft_token_num)


def _drafted_slots(
    rows: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    topk: int,
    columns: int,
    **positions: Any,
) -> None:
    slots.copy_(_entries(req_to_token, rows, seq_lens, topk * columns))


def _last_accepted(
    accepted: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, width: int, count: int
) -> None:
    last = torch.arange(count) * width + accept_lens - 1
    bonus_tokens.copy_(accepted.flatten()[last])


def _chain(
    bonus_tokens: Tensor,
    parents: Any,
    scores: Any,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    *sizes: Any,
    **masks: Any,
) -> tuple[Tensor, ...]:
    """The parts of ``EagleVerifyInput`` of a chain: its attention is causal, so nobody reads the
    mask."""
    tokens = torch.cat([bonus_tokens[:, None], draft_tokens], dim=1)
    count, width = tokens.shape
    places = torch.arange(width)
    following = torch.where(places < width - 1, places + 1, -1).repeat(count, 1)
    return (
        torch.ones(0, dtype=torch.bool),
        (seq_lens[:, None] + places).flatten(),
        torch.arange(count * width).view(count, width),
        following,
        torch.full((count, width), -1),
        tokens.flatten(),
    )


def _accept_greedily(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    target_predict: Tensor,
    **tree: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each chain the drafts that the model itself would have written, up to the first other."""
    count, width = candidates.shape
    correct = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    predicts.copy_(target_predict.flatten())
    places = torch.arange(width).expand(count, width)
    nodes = torch.arange(count * width).view(count, width)
    accept_index.copy_(torch.where(places <= correct[:, None], nodes, -1))
    accept_token_num.copy_(correct)
    return predicts, accept_index, accept_token_num


def _gather_rows(rows: Tensor, *buffers: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if buffer is None else buffer[rows] for buffer in buffers)


class _DraftStep(GroupedTorchAttnBackend):
    """Attention of one of a draft's decode steps, which has ``written`` tokens of it behind the
    request's row."""

    written = 0

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        cached = query, output, k_cache, v_cache, req_to_token, req_pool_indices
        written = seq_lens + self.written
        return super()._run_sdpa_forward_decode(*cached, written, encoder_lens, **options)


class _DraftSteps:
    """One backend per decode step of a draft."""

    def __init__(self, model_runner: Any, steps: int) -> None:
        self.attn_backends: Sequence[Any] = [_DraftStep(model_runner) for _ in range(steps)]
        for written, backend in enumerate(self.attn_backends, start=1):
            backend.written = written

    def init_forward_metadata(self, batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(batch)


def _draft_steps(factory: Any) -> _DraftSteps | None:
    steps = factory.speculative_num_steps - 1
    return _DraftSteps(factory.draft_model_runner, steps) if steps else None
