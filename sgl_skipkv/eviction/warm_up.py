"""Every kernel of ours, launched once before a server is ready.

Triton compiles a kernel when it is launched first, a second or so each, in the scheduler's thread:
everybody would wait. What a launch is compiled for are types, sizes of the model and parameters,
never how much is due, so one compaction of made-up rows does for all that come with the same
window, and one step of lanes that nobody uses for all that record and steer.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.page_table import RowRewrite
from sgl_skipkv.eviction.select import select_together
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.policy.base import PagedCache
from sgl_skipkv.recording.recorder import Recorder, Recording
from sgl_skipkv.steering.steerer import Steerer

_REQUESTS, _KEEP_TOKENS, _NEW_TOKENS = 2, 40, 30
# Larger ones are rare, and each costs a server's first start; Triton keeps on disk what it made.
_EVERY_WINDOW_UP_TO = 32


def windows_of(config: ServerConfig) -> set[int]:
    """Windows to come: every small one, since any request may bring it, and the operator's."""
    found = {*range(1, _EVERY_WINDOW_UP_TO + 1), config.kv_params.get("window", 1)}
    return {window for window in found if window <= config.query_window}


def warm_up(
    recorder: Recorder,
    cache: PagedCache,
    windows: Collection[int],
    steerer: Steerer | None = None,
) -> None:
    """Launch every kernel of a step and of a compaction, twice where a request's second compaction
    has another variant.

    Reads slot 0 of the KV pool and writes to scratch: slot 0 of the tables, its own page table.

    Args:
        windows: of the requests to come; any other is compiled when it comes.
    """
    from sgl_skipkv.kernels.key_redundancy import key_redundancy
    from sgl_skipkv.kernels.paged_keys import PagedKeys
    from sgl_skipkv.kernels.sentence_scores import sentence_scores
    from sgl_skipkv.kernels.step_attention import step_attention
    from sgl_skipkv.kernels.window_attention import window_attention

    warm_up_without_scores(recorder, cache.req_to_token.shape[1], steerer)
    device = recorder.device
    table = _table(cache.req_to_token.shape[1], max(_KEEP_TOKENS, *windows, 0), device)
    rows, thresholds = torch.arange(_REQUESTS, device=device), torch.ones(_REQUESTS, device=device)

    def paged(tokens: int) -> PagedKeys:
        offsets = device_tensor([i * tokens for i in range(_REQUESTS + 1)], device)
        counts = [tokens] * _REQUESTS
        return PagedKeys(cache.layer, cache.k_ptrs, table, rows, counts, offsets, cache.k_scales)

    nobody, last = torch.zeros_like(rows), torch.full_like(rows, max(windows, default=0))
    for window in windows:
        widths = torch.full_like(rows, 7, dtype=torch.int32)
        queries = recorder.queries.data
        one = paged(window + _NEW_TOKENS)
        window_attention(one, queries, nobody, last, widths, window=window, scale=1.0)
    tokens, ring = _KEEP_TOKENS + _NEW_TOKENS, recorder.queries.data
    key_redundancy(paged(tokens), thresholds)
    steps, firsts = [1] * _REQUESTS, [0] * _REQUESTS
    step_attention(paged(tokens), ring, nobody, last, steps, firsts, causal=True, scale=1.0)
    scores = torch.zeros(tokens * _REQUESTS, device=device)
    positions = torch.arange(tokens, device=device).repeat(_REQUESTS)
    sentence_scores(
        *(scores, scores, positions, [tokens] * _REQUESTS),
        *(nobody, nobody, thresholds, [1] * _REQUESTS),
        window=1,
        sigma=0.5,
        tau=0.5,
        ending=1,
    )


def warm_up_without_scores(recorder: Recorder, width: int, steerer: Steerer | None = None) -> None:
    """Launch what also runs where heads have a size that the scoring kernels do not read.

    Args:
        width: of the page table.
    """
    from sgl_skipkv.kernels.sentence_redundancy import raise_redundancy

    device, tokens = recorder.device, _KEEP_TOKENS + _NEW_TOKENS
    nobody = torch.zeros(_REQUESTS, dtype=torch.int64, device=device)
    _step(recorder, steerer, nobody)
    table = _table(width, _KEEP_TOKENS, device)
    scores = [torch.zeros(tokens, device=device)] * _REQUESTS
    selections, _ = select_together(scores, [[(0, 1)]] * _REQUESTS, [_KEEP_TOKENS] * _REQUESTS)
    positions = [torch.arange(tokens, device=device)] * _REQUESTS
    RowRewrite(table, [*range(_REQUESTS)], selections, positions).write()
    sentences = recorder.sentences
    raise_redundancy(
        *(sentences.vectors, sentences.redundancy, nobody[:1], nobody[:1] + 2), max_count=2
    )


def _table(width: int, keep_tokens: int, device: torch.device) -> Tensor:
    """int32 [_REQUESTS, width or more], a page table whose entries are slot 0."""
    while width < keep_tokens + _NEW_TOKENS:
        width *= 3  # a multiple of 16 or not, as it was
    return torch.zeros(_REQUESTS, width, dtype=torch.int32, device=device)


def _step(recorder: Recorder, steerer: Steerer | None, nobody: Tensor) -> None:
    """A decode step of lanes whose row is not steered and has slot 0: what captured steps do, where
    none is captured."""
    vectors, queries = recorder.sentences.vectors, recorder.queries.data
    hidden = vectors.new_zeros(len(nobody), vectors.shape[-1])
    q = queries.new_zeros(len(nobody), *queries.shape[-2:])
    recording = Recording(nobody, nobody)
    recorder.record_queries(recording, 0, q)
    recorder.record_hidden(recording, nobody, hidden)
    if steerer is not None:
        steerer.decode(hidden, nobody, nobody)
