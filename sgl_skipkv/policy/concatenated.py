"""Requests that are due in the same step, laid end to end as one long request.

A score that comes from a token's own position, its sentence and what kernels have found of it is
the same wherever the request stands on the axis of logical positions. So requests with the same
parameters are
moved behind one another there and scored at once: as many launches for all of them as for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.policy.base import ScoreInput, Sentences


def concatenated(requests: Sequence[ScoreInput], window: int) -> ScoreInput:
    """One request made of several; token i of request c is token ``sum of n before c + i``.

    Args:
        requests: with pages, and with importance and redundancy found.
        window: last tokens of each, which have no importance. Between two requests these get none
            and
            no redundancy either, so they score what a last window scores: 0.
    """
    first, lengths = requests[0], [one.positions.shape[0] for one in requests]
    if len(requests) == 1:
        return first
    logical = [one.location.last_position + 1 for one in requests if one.location is not None]
    shifts = [0, *accumulate(logical[:-1])]
    gap = torch.zeros(window, device=first.positions.device)
    return replace(
        first,
        positions=_shifted([one.positions for one in requests], shifts, lengths),
        sentences=_joined([one.sentences for one in requests if one.sentences is not None], shifts),
        importance=_with_gaps([_found(one.importance) for one in requests], gap),
        redundancy=_with_gaps(
            [
                _found(one.redundancy)[: n - window]
                for one, n in zip(requests, lengths, strict=True)
            ],
            gap,
        ),
    )


def _joined(sentences: Sequence[Sentences], shifts: Sequence[int]) -> Sentences | None:
    if not sentences:
        return None
    counts = [one.starts.shape[0] for one in sentences]
    return Sentences(
        _shifted([one.starts for one in sentences], shifts, counts),
        _shifted([one.stops for one in sentences], shifts, counts),
        torch.cat([one.redundancy for one in sentences]),
    )


def _shifted(parts: Sequence[Tensor], shifts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """The parts in a row, each moved by its shift. The length is named, so no device is asked."""
    device = parts[0].device
    shift, count = device_tensor([*shifts, *counts], device).view(2, len(parts))
    shift_of: Tensor = shift.repeat_interleave(count, output_size=sum(counts))
    return torch.cat(list(parts)) + shift_of


def _with_gaps(parts: Sequence[Tensor], gap: Tensor) -> Tensor:
    return torch.cat([piece for part in parts for piece in (part, gap)][:-1])


def _found(scores: Tensor | None) -> Tensor:
    assert scores is not None
    return scores
