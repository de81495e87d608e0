"""SGLang's ``torch_native`` attention without repeated keys and without queries of cached tokens.

The stock decode step gathers a request's keys and values with indices of another integer type and
lets PyTorch repeat them for every query head of a KV head. At a few hundred tokens that takes two
thirds of a decode step on a CPU. Its prefill computes a query for every cached token, too: 64 new
tokens behind 2,240 cached ones take 36 ms per layer instead of 3. Here the query heads of a KV head
form one matrix, so the gathered keys are read once, and only new tokens have queries. The
arithmetic is the same, and each request is computed alone, so its result does not depend on the
rest of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class GroupedTorchAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # untyped base
    """``torch_native`` that groups the query heads of a KV head.

    query, output: [new tokens, Hq, d]; k_cache, v_cache: [slots, Hkv, d]; req_to_token: [rows,
    width]; req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens: [B], row, tokens,
    cached tokens and new tokens of each request.
    """

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Causal attention of the requests' new tokens, written to ``output``."""
        if _is_left_to_stock(query, k_cache, encoder_lens, **options) or not options["causal"]:
            super()._run_sdpa_forward_extend(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                *(extend_prefix_lens, extend_seq_lens, encoder_lens),
                **options,
            )
            return
        stop = 0
        lengths = (req_pool_indices, extend_prefix_lens, extend_seq_lens)
        for row, cached, new in zip(*(values.tolist() for values in lengths), strict=True):
            start, stop = stop, stop + new
            slots = req_to_token[row, : cached + new]
            output[start:stop] = _attention(query[start:stop], k_cache, v_cache, slots, **options)

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
    ) -> None:
        """Attention of one query per request over its page-table row, written to ``output``."""
        if _is_left_to_stock(query, k_cache, encoder_lens, **options):
            super()._run_sdpa_forward_decode(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                encoder_lens,
                **options,
            )
            return
        rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        for i, (row, length) in enumerate(rows):
            slots = req_to_token[row, :length]
            output[i] = _attention(query[i : i + 1], k_cache, v_cache, slots, **options)[0]


def _is_left_to_stock(
    query: Tensor,
    k_cache: Tensor,
    encoder_lens: Tensor | None,
    *,
    sliding_window_size: int | None = None,
    **_: Any,
) -> bool:
    """What is not supported here."""
    windowed = sliding_window_size is not None
    return encoder_lens is not None or windowed or query.dtype != k_cache.dtype


def _attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, scaling: float, **_: Any
) -> Tensor:
    """Causal attention of one request's new tokens, the last of these slots: [new, Hq, d]."""
    new, width = len(query), query.shape[2]
    keys = k_cache.index_select(0, slots).transpose(0, 1)
    values = v_cache.index_select(0, slots).transpose(0, 1)
    cached = len(slots) - new
    by_head = query.movedim(0, 1)
    # A mask costs four times a causal prefill from nothing; a single new token needs none.
    how: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    if cached:
        by_head, how = by_head.reshape(len(keys), -1, width), {}
        if new > 1:
            seen = torch.ones(new, new + cached, dtype=torch.bool).tril(cached)
            how = {"attn_mask": seen.repeat(by_head.shape[1] // new, 1)}
    attended = scaled_dot_product_attention(
        by_head[None], keys[None], values[None], scale=scaling, **how
    )
    return attended.reshape(-1, new, width).movedim(1, 0)
