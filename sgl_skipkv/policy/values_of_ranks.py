"""``distinct_values`` over the ranks of a tensor parallel server.

The nearest later value is the nearest one of all ranks' heads together: squared distances add up
over ranks, their minimum does not. So the products of every pair of values are gathered, a block of
rows at a time, for all requests. The values themselves would be more bytes: for the 18 middle
layers of an 8B model and 4 KV heads per rank in half precision, as long as the tokens are fewer
than 8,704.

Plain torch on every device: operations grow with the compared layers. A block bounds the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_skipkv.kernels.reference import nearest_later
from sgl_skipkv.policy.inputs.score_input import ScoreInput

#: tokens whose products with all later ones are gathered together
BLOCK_TOKENS = 512
_EPS = 1e-8


def numbers_of_ranks(tokens: Sequence[int]) -> list[int]:
    """How many numbers each gather of ``values_of_ranks`` takes.

    Args:
        tokens: of each request, from its first on.
    """
    of_blocks = (sum(_rows(n, start) * (n - start) for n in tokens) for start in _blocks(tokens))
    return [2 * sum(tokens), *of_blocks]


def _blocks(tokens: Sequence[int]) -> range:
    return range(0, max(tokens) - 1, BLOCK_TOKENS)


def _rows(tokens: int, start: int) -> int:
    """How many tokens of the block at ``start`` have a later token."""
    return min(max(tokens - 1 - start, 0), BLOCK_TOKENS)


def values_of_ranks(
    requests: Sequence[ScoreInput], firsts: Sequence[int], *, weights: Tensor, compared: range
) -> tuple[list[Tensor], list[Tensor]]:
    """Distance and size of every cached token's value from each request's first token on.

    Args:
        firsts: as ``distinct_values`` has it, of each request.
        weights: float32 [layers, Hkv] of this rank, of sum 1 over all of them.
        compared: layers of the distance, at least one.

    Returns:
        float32 [n - first] of each request: distances, sizes.
    """
    ranks = requests[0].ranks
    tokens = [
        request.positions.shape[0] - first for request, first in zip(requests, firsts, strict=True)
    ]
    values = [_Values(*pair, compared) for pair in zip(requests, firsts, strict=True)]
    parts = [
        part for request_values in values for part in request_values.sizes_and_squares(weights)
    ]
    lengths = [n for n in tokens for _ in range(2)]
    summed = torch.split(ranks.summed(torch.cat(parts)), lengths)
    sizes, squares = list(summed[::2]), summed[1::2]
    nearest = [torch.zeros_like(size) for size in sizes]
    for start in _blocks(tokens):
        blocks = [
            request_values.products(start, _rows(n, start))
            for request_values, n in zip(values, tokens, strict=True)
        ]
        flat = ranks.summed(torch.cat([block.view(-1) for block in blocks]))
        pieces = torch.split(flat, [block.numel() for block in blocks])
        for distances, square, block, piece in zip(nearest, squares, blocks, pieces, strict=True):
            rows, products = block.shape[0], piece.view(block.shape)
            if rows:
                distances[start : start + rows] = nearest_later(square[start:], products)
    heads = len(compared) * weights.shape[1] * ranks.size
    return [(square / heads).sqrt() for square in nearest], sizes


class _Values:
    """One request's values on this rank, in units of the mean length of their layer and KV head.

    A layer is read when it is needed: the units of all layers would be larger than a block.
    """

    def __init__(self, inputs: ScoreInput, first: int, compared: range) -> None:
        self._values, self._first, self._layers = inputs.values, first, inputs.layers
        self._compared, self._means = compared, dict[int, Tensor]()

    def sizes_and_squares(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [n - first] each: this rank's part of the sizes, and of the squared lengths of
        what is compared."""
        size = squares = torch.zeros((), device=weights.device)
        for layer in range(self._layers):
            lengths = self._values(layer)[self._first :].float().norm(dim=-1)
            self._means[layer] = mean = lengths.mean(dim=0).clamp_min(_EPS)
            units = lengths / mean
            size = size + (units * weights[layer]).sum(dim=1)
            if layer in self._compared:
                squares = squares + units.square().sum(dim=1)
        return size, squares

    def products(self, start: int, rows: int) -> Tensor:
        """float32 [rows, n - first - start], this rank's part of the products of these tokens with
        themselves and all later ones."""
        products = torch.zeros((), device=self._means[0].device)
        for layer in self._compared:
            values = self._values(layer)[self._first + start :].float()
            units = (values / self._means[layer][:, None]).flatten(1)
            products = products + units[:rows] @ units.T
        return products
