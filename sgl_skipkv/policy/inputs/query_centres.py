"""What the queries of a model are on average before they are rotated: the same for all requests.

Measured once, when a server starts, by one forward pass over ``plain_text.txt`` beside this file,
or the operator's ``query_text``. Policies with ``needs_rotation`` may ask what future queries will
look for. In models that know many kinds of text a head's centre hardly depends on the text; in one
that knows a single kind it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Means = tuple[Tensor, Tensor]
TEXT = Path(__file__).with_name("plain_text.txt")
#: how many tokens of it are used
MOST_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotary embedding that a server's queries and keys went through.

    Band ``f`` of a vector is the complex number that is turned by ``frequencies[f]`` per position.
    There are F = d / 2 bands.

    Attributes:
        frequencies: float64 [F], on the CPU; 0 for a band that is not rotated.
        scale: what rotated vectors were multiplied with.
        real, imaginary: int64 [F], on the CPU, the coordinates of each band.
    """

    frequencies: Tensor
    scale: float
    real: Tensor
    imaginary: Tensor

    @classmethod
    def of(
        cls, frequencies: Tensor, head_dim: int, *, scale: float = 1.0, halves: bool = True
    ) -> Rotation:
        """The usual layout: the rotated coordinates first, in halves or else in pairs.

        Args:
            frequencies: float [rotated coordinates / 2], on the CPU.
        """
        rotated, rest = 2 * len(frequencies), head_dim - 2 * len(frequencies)
        pairs = torch.arange(rotated).view(*((2, -1) if halves else (-1, 2)))
        pairs = pairs if halves else pairs.T
        still = torch.arange(rotated, head_dim).view(2, -1)
        real, imaginary = torch.cat([pairs, still], dim=1).unbind()
        unturned = torch.zeros(rest // 2, dtype=torch.float64)
        return cls(torch.cat([frequencies.double(), unturned]), scale, real, imaginary)

    def bands(self, vectors: Tensor) -> Tensor:
        """complex [..., F], of float [..., d]."""
        return torch.complex(vectors[..., self.real], vectors[..., self.imaginary])

    def turns(self, positions: Sequence[int]) -> Tensor:
        """complex128 [len(positions), F], the turn at each position, without ``scale``."""
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] * self.frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def mean_turn(self, count: int) -> Tensor:
        """complex128 [F], the mean of ``turns(range(count))``.

        ``sum over 0 <= t < h of e^(iwt) = e^(iw(h - 1)/2) sin(wh/2) / sin(w/2)``
        """
        half = self.frequencies / 2
        length = torch.where(half == 0, 1.0, (half * count).sin() / (half.sin() * count))
        return torch.polar(length, half * (count - 1))

    def unrotated(self, vectors: Tensor, positions: Sequence[int]) -> Tensor:
        """complex [T, heads, F], of float [T, heads, d] at these positions."""
        turns = self.turns(positions).to(vectors.device, vectors.dtype.to_complex())
        return self.bands(vectors) * turns[:, None].conj() / self.scale


@dataclass(frozen=True, eq=False)
class QueryCentres:
    """Attributes:
    order: int64 [d], the coordinates of all real parts, then the others, on the server's device;
        None: they lie so.
    mean: complex64 [layers, Hq, F], mean of the un-rotated queries.
    magnitude: float32 [layers, Hq, F], mean of their absolute values.
    """

    rotation: Rotation
    order: Tensor | None
    mean: Tensor
    magnitude: Tensor

    @classmethod
    def measured(cls, rotation: Rotation, layers: Iterable[Tensor]) -> QueryCentres:
        """layers: float [T, Hq, d] each, rotated queries of the positions from 0."""
        return cls.of_means(rotation, [means(rotation, queries) for queries in layers])

    @classmethod
    def of_means(cls, rotation: Rotation, layers: Sequence[Means]) -> QueryCentres:
        mean, magnitude = (torch.stack(part) for part in zip(*layers, strict=True))
        return cls(rotation, _order(rotation, mean.device), mean, magnitude)

    def halves(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Real and imaginary parts of the bands, [..., F] each, of float [..., d]."""
        ordered = vectors if self.order is None else vectors[..., self.order]
        real, imaginary = ordered.chunk(2, dim=-1)
        return real, imaginary


def _order(rotation: Rotation, device: torch.device) -> Tensor | None:
    order = torch.cat([rotation.real, rotation.imaginary])
    return None if torch.equal(order, torch.arange(len(order))) else order.to(device)


def means(rotation: Rotation, queries: Tensor) -> Means:
    """One layer's ``mean`` and ``magnitude``, of float [T, Hq, d]: positions from 0."""
    bands = rotation.unrotated(queries.float(), range(len(queries)))
    # Not ``mean`` of complex numbers: with --enable-deterministic-inference SGLang has a Triton
    # kernel in its place, and Triton knows no complex numbers.
    return bands.sum(dim=0) / len(bands), bands.abs().mean(dim=0)
