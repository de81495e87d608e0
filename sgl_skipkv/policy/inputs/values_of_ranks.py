"""``distinct_values`` in plain torch: where no kernel runs, and over the ranks of a tensor parallel
server.

The nearest later value is the nearest one of all ranks' heads together: squared distances add up
over ranks, their minimum does not. So the products of every pair of values are gathered, a block of
rows at a time, for all requests. The values themselves would be more bytes: for the 18 middle
layers of an 8B model and 4 KV heads per rank in half precision, as long as the tokens are fewer
than 8,704.

Operations grow with the compared layers. A block bounds the memory, and a layer is read when it is
needed. How many rows a request's blocks have follows from its own length, so neither other requests
nor their number change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sgl_skipkv.kernels.reference import nearest_later
from sgl_skipkv.policy.inputs.score_input import ScoreInput

#: tokens whose products with all later ones are gathered together, and numbers of one request at
#: most: a row of 100,000 tokens, as of a conversation that is computed again, has smaller blocks
BLOCK_TOKENS, BLOCK_NUMBERS = 512, 2**23
_EPS = 1e-8


def numbers_of_ranks(tokens: Sequence[int]) -> list[int]:
    """How many numbers each gather of ``values_of_ranks`` takes.

    Args:
        tokens: of each request, from its first on.
    """
    of_blocks = (
        sum(rows * (n - start) for n, (start, rows) in zip(tokens, block, strict=True))
        for block in _blocks(tokens)
    )
    return [2 * sum(tokens), *of_blocks]


def _blocks(tokens: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Of every block the first token and the number of rows of each request, 0 behind its last."""
    most = [min(BLOCK_TOKENS, max(BLOCK_NUMBERS // max(n, 1), 1)) for n in tokens]
    # The last token has no later one.
    for block in range(max(-(-(n - 1) // rows) for n, rows in zip(tokens, most, strict=True))):
        starts = [min(block * rows, n) for n, rows in zip(tokens, most, strict=True)]
        parts = zip(tokens, starts, most, strict=True)
        yield [(start, min(max(n - 1 - start, 0), rows)) for n, start, rows in parts]


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
    for spans in _blocks(tokens):
        blocks = [
            request_values.products(start, rows)
            for request_values, (start, rows) in zip(values, spans, strict=True)
        ]
        flat = ranks.summed(torch.cat([block.view(-1) for block in blocks]))
        pieces = torch.split(flat, [block.numel() for block in blocks])
        for i, (start, rows) in enumerate(spans):
            products = pieces[i].view(blocks[i].shape)
            if rows:
                nearest[i][start : start + rows] = nearest_later(squares[i][start:], products)
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
            products = products + self._layer_products(layer, start, rows)
        return products

    def _layer_products(self, layer: int, start: int, rows: int) -> Tensor:
        values = self._values(layer)[self._first + start :].float()
        units = (values / self._means[layer][:, None]).flatten(1)
        return exact_product(units[:rows], units)


def exact_product(rows: Tensor, columns: Tensor) -> Tensor:
    """float32 [R, C], products of float32 vectors [R, D] and [C, D].

    On a GPU some models and ``--enable-deterministic-inference`` multiply the first 10 bits of each
    number only (TF32). Between equal vectors that error is larger than ``SAME_VALUE``.
    """
    return rows @ columns.T if rows.is_cpu else product_in_parts(rows, columns)


def product_in_parts(rows: Tensor, columns: Tensor) -> Tensor:
    """As ``exact_product``, of numbers in two parts, their first bits and the rest, which TF32 cuts
    by little. What is left out, the product of two rests, is a thousandth of ``SAME_VALUE``."""
    (high, rest), (high_columns, rest_columns) = _parts(rows), _parts(columns)
    return high @ high_columns.T + (high @ rest_columns.T + rest @ high_columns.T)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    high = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return high, x - high
