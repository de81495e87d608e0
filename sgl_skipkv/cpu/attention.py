"""SGLang's ``torch_native`` attention for decode steps, without repeating keys per query head.

The stock backend gathers a request's keys and values with indices of another integer type and lets
PyTorch repeat them for every query head of a KV head. At a few hundred tokens that takes two thirds
of a decode step on a CPU. Here the query heads of a KV head form one matrix, so the gathered keys
are read once. The arithmetic is the same, and each request is computed alone, so its result does
not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class GroupedTorchAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # untyped base
    """``torch_native`` whose decode step groups the query heads of a KV head."""

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

        query, output: [B, Hq, d]; k_cache, v_cache: [slots, Hkv, d]; req_to_token: [rows, width];
        req_pool_indices, seq_lens: [B], row and tokens of each request.
        """
        windowed = options.get("sliding_window_size") is not None
        if encoder_lens is not None or windowed or query.dtype != k_cache.dtype:
            # Not supported here: the stock backend computes it.
            stock: torch.Tensor = super()._run_sdpa_forward_decode(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                encoder_lens,
                **options,
            )
            return stock
        kv_heads = k_cache.shape[1]
        grouped = query.reshape(query.shape[0], kv_heads, -1, query.shape[2])
        rows, lengths = req_pool_indices.tolist(), seq_lens.tolist()
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            slots = req_to_token[row, :length]
            keys = k_cache.index_select(0, slots).transpose(0, 1)
            values = v_cache.index_select(0, slots).transpose(0, 1)
            attended = scaled_dot_product_attention(
                grouped[i : i + 1], keys[None], values[None], scale=options["scaling"]
            )
            output[i] = attended[0].flatten(0, 1)
        return output
