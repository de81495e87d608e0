"""Expected Attention (arXiv 2510.00636): attention from queries that are still to come.

Before they are rotated, a head's queries are taken to be Gaussian with mean ``m`` and covariance
``C``. ``R`` is the mean rotation over the next ``horizon`` positions. What such a query gives to
key ``k`` is, up to a constant, ``exp(l)``, ``l = (R m).k / sqrt(d) + k^T (R C R^T) k / (2 d)``. The
score of a token is the softmax of ``l`` over the candidates, the mean over the query heads of a KV
head, times the length of the token's value; then the mean over KV heads and layers. Candidates are
the tokens that are not protected.

``m`` and ``C`` are those of the request's last ``window`` queries: turned back by their positions
and on by ``R``, they are synthetic queries, and ``l`` is the mean of their logits plus half the
variance of these. So no covariance is stored, and nothing is measured or carried beside the ring.

Deviations: one set for all layers and heads. The authors' program has ``m`` and ``C`` of all
queries of a prompt behind the first four, or of another text; ``window`` queries, 8 by default,
have a covariance of rank 7. A larger ``window``, on a server with a ``query_window`` as large, is
nearer. It leaves the four sinks out of the softmax, here every protected token is.

Plain torch on every device, one gather per layer for all requests of like lengths: operations grow
with layers, and with query heads per KV head times ``window``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensors, to_device
from sgl_skipkv.policy.base import Policy, PolicyParams
from sgl_skipkv.policy.inputs.joined_requests import known, scores_of_spans
from sgl_skipkv.policy.inputs.query_centres import QueryCentres, Rotation
from sgl_skipkv.policy.inputs.score_input import ScoreInput

#: whose scores are held at once: fewer take less memory, more take fewer operations
_LAYERS_TOGETHER = 4
#: likewise, of the synthetic queries that a key is multiplied with
_QUERIES_TOGETHER = 8
LayerTensor = Callable[[int], Tensor]


class ExpectedParams(PolicyParams):
    horizon: int = Field(
        512, ge=1, le=65536, description="positions to come, over which attention is expected"
    )


class Expected(Policy):
    name = "expected"
    keeps = "what the queries to come are expected to attend to"
    source = "Expected Attention, arXiv 2510.00636"
    Params: ClassVar[type[PolicyParams]] = ExpectedParams
    needs_queries = True
    needs_rotation = True
    joins_layers = 3
    params: ExpectedParams

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """Of all requests of like lengths from one gather per layer."""
        return scores_of_spans(
            requests,
            [*map(self.candidates, requests)],
            lambda alike, tokens, inside: self._scores(
                alike, self._ring_queries(alike), tokens.keys, tokens.values, inside
            ),
        )

    def scores(self, inputs: ScoreInput) -> Tensor:
        """Of candidates; protected tokens score 0."""
        first, stop = self.candidates(inputs)
        recent = inputs.queries()
        (scores,) = self._scores(
            [inputs],
            lambda layers: recent[layers.start : layers.stop, None],
            lambda layer: inputs.keys(layer)[None, first:stop],
            lambda layer: inputs.values(layer)[None, first:stop],
            torch.ones(1, stop - first, dtype=torch.bool, device=inputs.positions.device),
        )
        return F.pad(scores, (first, self.pinned_tail_tokens))

    def _ring_queries(self, requests: Sequence[ScoreInput]) -> Callable[[range], Tensor]:
        """layers -> float [layers, B, W, Hq, d], newest first."""
        locations = known(request.location for request in requests)
        ring = locations[0].ring
        assert ring is not None
        window, size = self.params.window, ring.shape[2]
        tracks, entries = device_tensors(
            [
                [location.track_id for location in locations for _ in range(window)],
                [
                    (location.last_position - i) % size
                    for location in locations
                    for i in range(window)
                ],
            ],
            ring.device,
        )
        shape = (len(locations), window, *ring.shape[3:])
        return lambda layers: ring[layers.start : layers.stop, tracks, entries].view(-1, *shape)

    def _scores(
        self,
        requests: Sequence[ScoreInput],
        queries: Callable[[range], Tensor],
        keys: LayerTensor,
        values: LayerTensor,
        inside: Tensor,
    ) -> Tensor:
        """float32 [B, n].

        Args:
            queries: layers -> float [layers, B, W, Hq, d].
            keys, values: layer -> float [B, n, Hkv, d].
            inside: bool [B, n].
        """
        centres, layers = requests[0].centres, requests[0].layers
        assert centres is not None
        rotation, scale = centres.rotation, requests[0].scale
        turns = _turns(rotation, self.params.window, self.params.horizon, scale, inside.device)
        total: Tensor | None = None
        for start in range(0, layers, _LAYERS_TOGETHER):
            chunk = range(start, min(start + _LAYERS_TOGETHER, layers))
            real, imaginary = centres.halves(queries(chunk).float())
            turned = torch.complex(real, imaginary) * turns[:, None]
            synthetic = torch.cat([turned.real, turned.imag], dim=-1)
            logits = torch.stack(
                [
                    _products(centres, keys(layer), layer_queries)
                    for layer, layer_queries in zip(chunk, synthetic.unbind(), strict=True)
                ],
                dim=3,
            )
            variance, mean = torch.var_mean(logits, dim=2, correction=0)
            expected = torch.add(mean, variance, alpha=0.5)
            attention = _softmax(expected, inside[..., None, None, None]).mean(dim=-1)
            lengths = torch.stack([values(layer).float().norm(dim=-1) for layer in chunk], dim=2)
            of_chunk = (attention * lengths).flatten(2).sum(dim=2)
            total = of_chunk if total is None else total + of_chunk
        assert total is not None
        return total / (layers * lengths.shape[3])


@functools.lru_cache(maxsize=16)
def _turns(
    rotation: Rotation, window: int, horizon: int, scale: float, device: torch.device
) -> Tensor:
    """complex64 [window, F]: from where a query was asked, newest first, to the positions to come,
    the mean over these; times the factor on logits."""
    ahead = rotation.turns(range(1, window + 1)) * rotation.mean_turn(horizon)
    return to_device((scale * ahead).to(torch.complex64), device)


def _products(centres: QueryCentres, keys: Tensor, queries: Tensor) -> Tensor:
    """float32 [B, n, W, Hkv, G].

    Args:
        keys: float [B, n, Hkv, d]. queries: float32 [B, W, Hq, d], real parts, then the others.
    """
    features = keys.float() if centres.order is None else keys.float()[..., centres.order]
    requests, window, _, width = queries.shape
    grouped = queries.view(requests, 1, window, keys.shape[2], -1, width)
    some = max(1, _QUERIES_TOGETHER // grouped.shape[4])
    # Not as a matrix product: its order of summation depends on how many rows there are.
    starts = range(0, window, some)
    parts = [
        (features[:, :, None, :, None] * grouped[:, :, start : start + some]).sum(dim=-1)
        for start in starts
    ]
    return torch.cat(parts, dim=2)


def _softmax(logits: Tensor, inside: Tensor) -> Tensor:
    """float32 as the logits [B, n, ...], over each request's tokens; 0 elsewhere."""
    masked = torch.where(inside, logits, -torch.inf)
    powers = (masked - masked.amax(dim=1, keepdim=True)).exp()
    # One token after the other: the order of ``sum`` depends on the shape, so on the batch.
    return powers / powers.cumsum(dim=1)[:, -1:]
