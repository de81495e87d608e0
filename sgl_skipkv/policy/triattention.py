"""TriAttention (arXiv 2604.04921), mode ``union``: what the model's mean query will look for.

A head's queries, before they are rotated, lie around a centre. With
``c_f`` the mean of band ``f`` as a complex number, ``a_f`` the mean of its absolute value, ``k_f``
the un-rotated key at position ``p``, ``w_f`` the band's frequency and ``t`` the position of the
next query, the score of one head is::

    mean over D of sum_f |c_f| |k_f| cos((t + D - p) w_f + arg(c_f conj k_f))
    + sum_f (a_f - |c_f|) |k_f|,   D = 1, 2, 4, ... 65536

Each layer's and query head's scores are divided by their deviation over the candidates, their mean
taken away; a token's score is the highest. Candidates are the tokens that are not protected. So one
set serves all layers and heads; the authors' program has this mode beside others that choose a set
per head.

Since ``k_f`` turned by ``p w_f`` is what is cached, the first term is the product of the cached key
with one synthetic query, ``c_f mean over D of exp(i (t + D) w_f)``. A factor that the rotary
embedding puts on all bands cancels in the deviation.

Deviations: the centres come from a forward pass over one plain text of this package when the server
starts, not from a file per model; they are those of the weights at that time. The authors' program
adds noise of 1e-6 to ties; here they go to the later position. Prompt, sinks and window are pinned
as for every policy. A rotary embedding whose turn does not follow from the position alone (dynamic
NTK, three axes) is refused.

Plain torch on every device, one gather per layer for all requests of like lengths: operations grow
with layers and query heads per KV head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, to_device
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.joined_requests import scores_of_spans
from sgl_skipkv.policy.inputs.query_centres import QueryCentres
from sgl_skipkv.policy.inputs.score_input import ScoreInput

_OFFSETS = tuple(1 << power for power in range(17))
_LEAST_DEVIATION = 1e-6
#: whose scores are held at once: fewer take less memory, more take fewer operations
_LAYERS_TOGETHER = 4


class TriAttention(Policy):
    name = "triattention"
    keeps = "what any head's mean query will look for"
    source = "TriAttention, arXiv 2604.04921"
    needs_rotation = True
    over_ranks = "max"
    joins_layers = 1

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """Of all requests of like lengths from one gather per layer."""
        return scores_of_spans(
            requests,
            [*map(self.candidates, requests)],
            lambda alike, tokens, inside: self._scores(alike, tokens.keys, inside),
        )

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Of candidates; protected tokens score 0."""
        first, stop = self.candidates(inputs)
        inside = torch.ones(1, stop - first, dtype=torch.bool, device=inputs.positions.device)
        (scores,) = self._scores(
            [inputs], lambda layer: inputs.keys(layer)[None, first:stop], inside
        )
        return F.pad(scores, (first, self.pinned_tail_tokens))

    def _scores(
        self,
        requests: Sequence[ScoreInput],
        keys: Callable[[int], Tensor],
        inside: Tensor,
    ) -> Tensor:
        """float32 [B, n]. keys: layer -> float [B, n, Hkv, d]. inside: bool [B, n]."""
        centres, layers = requests[0].centres, requests[0].layers
        assert centres is not None
        looking, spread = _of_model(centres)
        turns = centres.rotation.turns([request.logical_tokens for request in requests])
        turned = looking * to_device(turns.to(torch.complex64), looking.device)[:, None, None]
        queries = torch.cat([turned.real, turned.imag, spread.expand(turned.shape)], dim=-1)
        spans = map(self.candidates, requests)
        counts = device_tensor([stop - first for first, stop in spans], inside.device)
        best: Tensor | None = None
        for start in range(0, layers, _LAYERS_TOGETHER):
            chunk = range(start, min(start + _LAYERS_TOGETHER, layers))
            parts = [_products(centres, keys(layer), queries[:, layer]) for layer in chunk]
            rows = torch.cat([part for of_layer in parts for part in of_layer], dim=2)
            highest = _in_deviations(rows, inside[..., None], counts[:, None, None]).amax(dim=2)
            best = highest if best is None else torch.maximum(best, highest)
        assert best is not None
        return best.float()


@functools.lru_cache(maxsize=1)
def _of_model(centres: QueryCentres) -> tuple[Tensor, Tensor]:
    """complex64 and float32 [layers, Hq, F]: what a mean query at position 0 looks for in those
    before it, mean over the offsets, and the weight of a key's size."""
    ahead = centres.rotation.turns(_OFFSETS).mean(dim=0)
    looking = centres.mean * to_device(ahead.to(torch.complex64), centres.mean.device)
    return looking, centres.magnitude - centres.mean.abs()


def _products(centres: QueryCentres, keys: Tensor, queries: Tensor) -> list[Tensor]:
    """float32 [B, n, Hkv] for each query head of a KV head.

    Args:
        keys: float [B, n, Hkv, d]. queries: float32 [B, Hq, 3 F], real, imaginary, of sizes.
    """
    real, imaginary = centres.halves(keys.float())
    features = torch.cat([real, imaginary, torch.hypot(real, imaginary)], dim=-1)
    grouped = queries.view(queries.shape[0], keys.shape[2], -1, queries.shape[2])
    # Not as a matrix product: its order of summation depends on how many rows there are.
    return [(features * query[:, None]).sum(dim=-1) for query in grouped.unbind(dim=2)]


def _in_deviations(rows: Tensor, inside: Tensor, counts: Tensor) -> Tensor:
    """float64 [B, n, R]: each row over its tokens, mean 0 and deviation 1; 0 where all are equal.

    Args:
        rows: float32 [B, n, R]. inside: bool [B, n, 1]. counts: int64 [B, 1, 1], tokens of each.
    """
    # One token after the other: the order of ``sum`` depends on the shape, so on the batch.
    masked = torch.where(inside, rows, 0.0)
    mean = masked.cumsum(dim=1, dtype=torch.float64)[:, -1:] / counts
    centred = torch.where(inside, rows - mean, 0.0)
    variance = centred.square().cumsum(dim=1)[:, -1:] / counts
    return centred / variance.sqrt().clamp_min(_LEAST_DEVIATION)
