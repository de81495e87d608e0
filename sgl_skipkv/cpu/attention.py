"""SGLang's ``torch_native`` attention without repeated keys and without queries of cached tokens.

The stock decode step gathers a request's keys and values with indices of another integer type and
lets PyTorch repeat them for every query head of a KV head. At a few hundred tokens that takes two
thirds of a decode step on a CPU. Its prefill computes a query for every cached token, too: 64 new
tokens behind 2,240 cached ones take 36 ms per layer instead of 3. Here the query heads of a KV head
form one matrix, so the gathered keys are read once, and only new tokens have queries. The
arithmetic is the same, and each request is computed alone, so its result does not depend on the
rest of the batch.

It also has what the stock one lacks: attention sinks (gpt-oss), ``softmax([scale q k, sink])``
without its last weight, so a head may attend to nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import pad, scaled_dot_product_attention


def _with_sinks(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A forward function of the stock backend that takes ``sinks``, float [Hq]: a logit per query
    head. What it calls finds them as ``_sinks``."""

    @functools.wraps(forward)
    def with_sinks(
        backend: GroupedTorchAttnBackend,
        *args: Any,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        backend._sinks = sinks
        try:
            return forward(backend, *args, **kwargs)
        finally:
            backend._sinks = None

    return with_sinks


class GroupedTorchAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]  # untyped base
    """``torch_native`` that groups the query heads of a KV head."""

    #: float [Hq], logits of the layer that runs; None: it has no sinks
    _sinks: torch.Tensor | None = None

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Tokens of a row that pads a batch. DP attention pads with row 0, which is nobody's."""
        return 1

    forward_extend = _with_sinks(TorchNativeAttnBackend.forward_extend)
    forward_decode = _with_sinks(TorchNativeAttnBackend.forward_decode)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor | None,
        extend_seq_lens: torch.Tensor | None,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Causal attention of the requests' new tokens, written to ``output``.

        query: [new tokens, Hq, d]; output: [new tokens, Hq, v]; k_cache: [slots, Hkv, d]; v_cache:
        [slots, Hkv, v]; req_to_token: [rows, width]; req_pool_indices, seq_lens,
        extend_prefix_lens, extend_seq_lens: [B], row, tokens, cached tokens and new tokens of each
        request; without the last two a step verifies a chain of drafts behind each row.
        """
        if extend_prefix_lens is None or extend_seq_lens is None:
            from sglang.srt.runtime_context import get_spec

            # Not as many as there are: DP attention pads a step. A slot behind a chain may have
            # anything, and a weight of 0 does not hide NaN.
            chain_tokens = get_spec().speculative_num_draft_tokens
            extend_prefix_lens = seq_lens
            extend_seq_lens = torch.full_like(seq_lens, chain_tokens)
            seq_lens = seq_lens + extend_seq_lens
        not_here = self._is_left_to_stock(query, k_cache, encoder_lens, options)
        if not_here or not options["causal"]:
            stock: torch.Tensor = super()._run_sdpa_forward_extend(
                *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
                *(extend_prefix_lens, extend_seq_lens, encoder_lens),
                **options,
            )
            return stock
        stop, window = 0, options.get("sliding_window_size")
        lengths = (req_pool_indices, extend_prefix_lens, extend_seq_lens)
        for row, cached, new in zip(*map(_as_list, lengths), strict=True):
            start, stop = stop, stop + new
            slots = self._slots(req_to_token[row, : cached + new], window)
            keys, values = _gathered(k_cache, v_cache, slots)
            by_head = query[start:stop].movedim(0, 1)
            if cached or window is not None or self._sinks is not None:
                seen = _seen(cached, new, window)
                attended = _attended(by_head, keys, values, options["scaling"], seen, self._sinks)
            else:  # a mask costs four times as much
                attended = scaled_dot_product_attention(
                    by_head[None],
                    keys[None],
                    values[None],
                    scale=options["scaling"],
                    is_causal=True,
                    enable_gqa=True,
                )
            output[start:stop] = attended.reshape(-1, new, output.shape[2]).movedim(1, 0)
        output[stop:] = 0  # of what pads a step
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
        window = options.get("sliding_window_size")
        for i, (row, length) in enumerate(
            zip(_as_list(req_pool_indices), _as_list(seq_lens), strict=True)
        ):
            first = 0 if window is None else max(length - 1 - window, 0)
            slots = self._slots(req_to_token[row, first:length], window)
            keys, values = _gathered(k_cache, v_cache, slots)
            attended = _attended(
                query[i][:, None], keys, values, options["scaling"], None, self._sinks
            )
            output[i] = attended.flatten(0, 1)
        return output

    def _slots(self, row: torch.Tensor, window: int | None) -> torch.Tensor:
        """The row's slots in the pool of the layer that runs. The stock form writes to a pool of
        window layers, and reads it as if it were the other one."""
        if window is None or not self.use_sliding_window_kv_pool:
            return row
        slots: torch.Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(row)
        return slots

    def _is_left_to_stock(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> bool:
        """What is not supported here.

        Raises:
            NotImplementedError: nor there.
        """
        left = encoder_lens is not None or query.dtype != k_cache.dtype
        if left and self._sinks is not None:
            raise NotImplementedError("attention sinks with an encoder or a quantised KV cache")
        return left


def _seen(cached: int, new: int, window: int | None) -> torch.Tensor:
    """bool [new, cached + new]: keys before a query and its own, of a window the last ones."""
    seen = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
    return seen if window is None else seen.triu(cached - window)


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """float [Hkv, query heads per KV head * T, d], query heads one after the other.

    Args:
        queries: [Hq, T, d]. keys, values: [Hkv, n, d].
        seen: bool [T, n]; None: everything.
        sinks: [Hq]; None: no sinks.
    """
    (heads, count, width), (kv_heads, tokens, _) = queries.shape, keys.shape
    groups = heads // kv_heads
    mask = None if seen is None else seen.repeat(groups, 1)
    if sinks is not None:
        # One more key, whose logit is the sink and whose value is nothing.
        keys, values = pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1))
        bias = queries.new_zeros(heads, count, tokens + 1)
        if seen is not None:
            bias[..., :-1].masked_fill_(~seen, -torch.inf)
        bias[..., -1] = sinks.to(bias.dtype)[:, None]
        mask = bias.view(1, kv_heads, groups * count, tokens + 1)
    grouped = queries.reshape(1, kv_heads, groups * count, width)
    attended: torch.Tensor = scaled_dot_product_attention(
        grouped, keys[None], values[None], attn_mask=mask, scale=scale
    )
    return attended[0]


def _as_list(values: torch.Tensor) -> list[int]:
    numbers: list[int] = values.tolist()
    return numbers


def _gathered(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of slots, [Hkv, tokens, d] and [Hkv, tokens, v]."""
    keys = k_cache.index_select(0, slots).transpose(0, 1)
    return keys, v_cache.index_select(0, slots).transpose(0, 1)
