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

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class GroupedTorchAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # untyped base
    """``torch_native`` that groups the query heads of a KV head."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Causal attention of the requests' new tokens, written to ``output``.

        query: [new tokens, Hq, d]; output: [new tokens, Hq, v]; k_cache: [slots, Hkv, d]; v_cache:
        [slots, Hkv, v]; req_to_token: [rows, width]; req_pool_indices, seq_lens,
        extend_prefix_lens, extend_seq_lens: [B], row, tokens, cached tokens and new tokens of each
        request.
        """
        not_here = self._is_left_to_stock(query, k_cache, encoder_lens, options)
        if not_here or not options["causal"]:
            stock: torch.Tensor = super()._run_sdpa_forward_extend(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                *(extend_prefix_lens, extend_seq_lens, encoder_lens),
                **options,
            )
            return stock
        stop = 0
        lengths = (req_pool_indices, extend_prefix_lens, extend_seq_lens)
        for row, cached, new in zip(*map(_as_list, lengths), strict=True):
            start, stop = stop, stop + new
            keys, values = _gathered(k_cache, v_cache, req_to_token[row, : cached + new])
            by_head = query[start:stop].movedim(0, 1)
            # A mask costs four times a causal prefill from nothing.
            how: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
            if cached:
                by_head = by_head.reshape(keys.shape[0], -1, query.shape[2])
                seen = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
                how = {"attn_mask": seen.repeat(by_head.shape[1] // new, 1)}
            attended = scaled_dot_product_attention(
                by_head[None], keys[None], values[None], scale=options["scaling"], **how
            )
            output[start:stop] = attended.reshape(-1, new, output.shape[2]).movedim(1, 0)
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of one query per request over its page-table row, written to ``output``.

        query: [B, Hq, d]; output: [B, Hq, v]; k_cache: [slots, Hkv, d]; v_cache: [slots, Hkv, v];
        req_to_token: [rows, width]; req_pool_indices, seq_lens: [B], row and tokens of each
        request.
        """
        if self._is_left_to_stock(query, k_cache, encoder_lens, options):
            stock: torch.Tensor = super()._run_sdpa_forward_decode(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                encoder_lens,
                **options,
            )
            return stock
        kv_heads = k_cache.shape[1]
        grouped = query.reshape(query.shape[0], kv_heads, -1, query.shape[2])
        for i, (row, length) in enumerate(
            zip(_as_list(req_pool_indices), _as_list(seq_lens), strict=True)
        ):
            keys, values = _gathered(k_cache, v_cache, req_to_token[row, :length])
            attended = scaled_dot_product_attention(
                grouped[i : i + 1], keys[None], values[None], scale=options["scaling"]
            )
            output[i] = attended[0].flatten(0, 1)
        return output

    @staticmethod
    def _is_left_to_stock(
        query: torch.Tensor,
        k_cache: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> bool:
        """What is not supported here."""
        windowed = options.get("sliding_window_size") is not None
        return encoder_lens is not None or windowed or query.dtype != k_cache.dtype


def _as_list(values: torch.Tensor) -> list[int]:
    found: list[int] = values.tolist()
    return found


def _gathered(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of slots, [Hkv, tokens, d] and [Hkv, tokens, v]."""
    keys = k_cache.index_select(0, slots).transpose(0, 1)
    return keys, v_cache.index_select(0, slots).transpose(0, 1)
