"""SkipKV's score of every token of all due requests: one launch.

``Z - lambda_s + e`` with ``Z = sigma * I - (1 - sigma) * R``, 0 in the last W tokens of a request.
``lambda_s`` is the redundancy of the closed sentence that the token belongs to, if that exceeds
``tau`` and the sentence has two tokens or more, else 0. ``e = max(ending - r, 0)`` for a token with
``r`` further tokens between it and its sentence's last one, 0 for that one and outside of closed
sentences. The truth is ``SkipKVPlus.scores`` in plain torch, whose ``ending = 0`` is ``SkipKV``.

Source: SkipKV (arXiv 2512.07993) section 4.1; ``e`` is ours.

Mutates nothing but its own buffer. Not for CUDA graphs: the grid depends on the lengths. A program
per request and block of tokens; each token finds its sentence by bisection.

Floors, with N tokens and S sentences: bytes ``(4 + 4 + 8 + 4) N + (8 + 8 + 4) S``; operations none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors

_BLOCK = 256


@triton.jit(do_not_specialize=["window", "ending", "blocks", "rounds"])
def _sentence_scores_kernel(
    importance, redundancy, positions, offsets, starts, stops, similarity, sentence_offsets, out,
    sigma, rest, tau, window, ending, blocks, rounds, BLOCK: tl.constexpr,
):  # fmt: skip
    request, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first = tl.load(offsets + request)
    tokens = (tl.load(offsets + request + 1) - first).to(tl.int32)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside, candidate = i < tokens, i < tokens - window
    important = tl.load(importance + (first - request * window) + i, mask=candidate, other=0.0)
    repeated = tl.load(redundancy + first + i, mask=candidate, other=0.0)
    score = sigma * important - rest * repeated
    position = tl.load(positions + first + i, mask=inside, other=0)

    # ``below`` sentences start at or before the token.
    first_sentence = tl.load(sentence_offsets + request)
    sentences = (tl.load(sentence_offsets + request + 1) - first_sentence).to(tl.int32)
    below, above = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + sentences
    for _ in range(0, rounds):
        middle = (below + above) // 2
        searching = below < above
        start = tl.load(starts + first_sentence + middle, mask=searching, other=0)
        below = tl.where(searching & (start <= position), middle + 1, below)
        above = tl.where(searching & (start > position), middle, above)
    known = inside & (below > 0)
    owner = first_sentence + below - 1
    start = tl.load(starts + owner, mask=known, other=0)
    stop = tl.load(stops + owner, mask=known, other=0)
    like = tl.load(similarity + owner, mask=known, other=0.0)
    closed = known & (position < stop)
    score -= tl.where(closed & (like > tau) & (stop - start > 1), like, 0.0)
    to_last = stop - 1 - position
    bonus = tl.maximum(ending + 1 - to_last, 0).to(tl.float32)
    score += tl.where(closed & (to_last > 0), bonus, 0.0)
    tl.store(out + first + i, score, mask=inside)


def sentence_scores(
    importance: Tensor,
    redundancy: Tensor,
    positions: Tensor,
    row_tokens: Sequence[int],
    starts: Tensor,
    stops: Tensor,
    similarity: Tensor,
    sentences: Sequence[int],
    *,
    window: int,
    sigma: float,
    tau: float,
    ending: int,
) -> Tensor:
    """Scores of the N tokens of B requests with S closed sentences, request after request.

    Args:
        importance: float32 [N - B W]. redundancy: float32 [N].
        positions: int64 [N], logical, ascending within a request.
        row_tokens: tokens of each request, W or more.
        starts, stops: int64 [S], half-open spans in logical positions, ascending in a request.
        similarity: float32 [S], highest to a later sentence.
        sentences: closed sentences of each request.
        window: W. sigma, tau, ending: as above.

    Returns:
        float32 [N].
    """
    out = torch.empty(positions.shape[0], dtype=torch.float32, device=positions.device)
    blocks = triton.cdiv(max(row_tokens, default=0), _BLOCK)
    if not blocks:
        return out
    bounds = [[0, *accumulate(counts)] for counts in (row_tokens, sentences)]
    offsets, sentence_offsets = device_tensors(bounds, out.device)
    _sentence_scores_kernel[(len(row_tokens) * blocks,)](
        *(importance, redundancy, positions, offsets),
        *(starts, stops, similarity, sentence_offsets, out),
        *(sigma, 1.0 - sigma, tau, window, ending, blocks, max(sentences).bit_length()),
        BLOCK=_BLOCK,
    )
    return out
