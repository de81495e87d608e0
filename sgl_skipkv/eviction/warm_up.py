"""Launches every kernel once, so that Triton compiles it before it is needed.

Triton compiles a kernel at its first launch, for about a second each, and the scheduler would wait.
A kernel is compiled for types, model sizes and parameters, never for the number of requests. So one
compaction of dummy rows per window and one step of dummy rows compile everything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.kv_move import KVMove
from sgl_skipkv.eviction.page_table import RowRewrite
from sgl_skipkv.eviction.select import select_together
from sgl_skipkv.policy.inputs.paged_cache import KeyLocation, PagedCache, paged_at
from sgl_skipkv.recording.recorder import Recorder, Recording
from sgl_skipkv.steering.steerer import Steerer

_REQUESTS, _KEEP_TOKENS, _NEW_TOKENS = 2, 40, 30
# Larger windows are rare, and each slows the first start; Triton caches compiled kernels on disk.
_EVERY_WINDOW_UP_TO = 32


def compiled_windows(config: ServerConfig) -> set[int]:
    """Windows to compile for: all small ones, as any request may use them, and the operator's."""
    windows = {*range(1, _EVERY_WINDOW_UP_TO + 1), config.kv_params.get("window", 1)}
    return {window for window in windows if window <= config.query_window}


def warm_up(
    recorder: Recorder,
    cache: PagedCache | None,
    windows: Collection[int],
    steerer: Steerer | None = None,
    *,
    width: int,
    page_tokens: int = 1,
    buffers: Sequence[Tensor] = (),
    window_pool_tokens: int = 0,
) -> None:
    """Launch every kernel of a step and of a compaction.

    Reads slot 0 of the KV pool; writes to track 0 of the recording buffers and to a temporary page
    table.

    Args:
        cache: None where the scoring kernels do not support the head size; the others run there.
        windows: to compile for; any other is compiled at its first compaction.
        width: of the page table.
        page_tokens, buffers: of ``Compaction``.
        window_pool_tokens: the window of layers with a pool of their own; 0: there are none.
    """
    from sgl_skipkv.kernels.sentence_redundancy import sentence_redundancy

    device, tokens = recorder.device, _KEEP_TOKENS + _NEW_TOKENS
    scratch = torch.zeros(_REQUESTS, dtype=torch.int64, device=device)
    _step(recorder, steerer, scratch)
    table = _table(width, max(_KEEP_TOKENS, *windows, 0) + _NEW_TOKENS, device)
    scores = [torch.zeros(tokens, device=device)] * _REQUESTS
    selections, _ = select_together(scores, [[(0, 1)]] * _REQUESTS, [_KEEP_TOKENS] * _REQUESTS)
    positions = [torch.arange(tokens, device=device)] * _REQUESTS
    rows = [*range(_REQUESTS)]
    if page_tokens > 1:
        slots = [_one_slot(buffer) for buffer in buffers]
        tables = [table]
        if window_pool_tokens:  # of ``WindowMove``; its slots are alike
            tables.append(_table(2 * window_pool_tokens, tokens, device))
        for one in tables:
            KVMove(slots, one, rows, selections, [0] * _REQUESTS).apply()
    RowRewrite(table, rows, selections, positions, page_tokens=page_tokens).write()
    sentence_redundancy(recorder.sentences.vectors, scratch[:1], scratch[:1] + 2, max_count=2)
    if cache is not None:
        table.zero_()
        _score(cache, table, recorder.queries.data, windows)


def _table(width: int, least: int, device: torch.device) -> Tensor:
    """A page table that is at least so wide, all slot 0."""
    while width < least:
        width *= 3  # keeps divisibility by 16, for which Triton specialises
    return torch.zeros(_REQUESTS, width, dtype=torch.int32, device=device)


def _one_slot(buffer: Tensor) -> Tensor:
    """Memory of one slot: a kernel is compiled for it as for the buffer."""
    shape, strides = buffer[:1].shape, buffer.stride()
    return torch.empty_strided(shape, strides, dtype=buffer.dtype, device=buffer.device)


def _score(cache: PagedCache, table: Tensor, ring: Tensor, windows: Collection[int]) -> None:
    """Score rows of this page table."""
    from sgl_skipkv.kernels.distinct_values import distinct_values
    from sgl_skipkv.kernels.key_redundancy import key_redundancy
    from sgl_skipkv.kernels.sentence_scores import sentence_scores
    from sgl_skipkv.kernels.step_attention import OVER, step_attention
    from sgl_skipkv.kernels.window_attention import window_attention

    device, tokens = table.device, _KEEP_TOKENS + _NEW_TOKENS
    thresholds = torch.ones(_REQUESTS, device=device)
    scratch = torch.zeros(_REQUESTS, dtype=torch.int64, device=device)
    ones = [1] * _REQUESTS
    cache, last = replace(cache, req_to_token=table), max(windows, default=0)
    locations = [KeyLocation(cache, row, ring, 0, last) for row in range(_REQUESTS)]
    for window in windows:
        paged = paged_at(locations, [window + _NEW_TOKENS] * _REQUESTS)
        window_attention(*paged, window=window, width=7, scale=1.0)
    paged = paged_at(locations, [tokens] * _REQUESTS)
    key_redundancy(paged[0], thresholds)
    if cache.v_ptrs is not None:
        values = replace(paged[0], k_ptrs=cache.v_ptrs)
        weights = torch.ones(cache.heads, device=device)
        distinct_values(values, scratch, most_compared=tokens, weights=weights, compared=range(1))
    for over in OVER:
        step_attention(*paged, ones, [0] * _REQUESTS, causal=True, scale=1.0, over=over)
    scores = torch.zeros(tokens * _REQUESTS, device=device)
    positions = torch.arange(tokens, device=device).repeat(_REQUESTS)
    sentence_scores(
        *(scores, scores, positions, [tokens] * _REQUESTS, scratch, scratch, thresholds, ones),
        window=1,
        sigma=0.5,
        tau=0.5,
        ending=1,
    )


def _step(recorder: Recorder, steerer: Steerer | None, scratch: Tensor) -> None:
    """Record and steer a decode step of dummy rows. scratch: int64 [B], all 0."""
    vectors, queries = recorder.sentences.vectors, recorder.queries.data
    hidden = vectors.new_zeros(len(scratch), vectors.shape[-1])
    q = queries.new_zeros(len(scratch), *queries.shape[-2:])
    recording = Recording(scratch, scratch)
    recorder.record_queries(recording, 0, q)
    recorder.record_hidden(recording, scratch, hidden)
    of_one_track = scratch[:1], slice(0, len(scratch))
    recomputed = replace(recording, tokens=scratch, generated=(of_one_track,))
    recorder.record_hidden(recomputed, scratch, hidden)
    if steerer is not None:
        steerer.decode(hidden, scratch, scratch)
