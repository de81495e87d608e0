"""Scores of requests that are due in the same step, one after the other in one tensor.

As many launches for all of them as for one; what a request gets does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_skipkv.policy.base import ScoreInput


def with_windows(parts: Sequence[Tensor], window: int) -> Tensor:
    """float32 [tokens of all requests]: scores of each one's candidates, then 0 for its window."""
    zeros = parts[0].new_zeros(window)
    return torch.cat([piece for part in parts for piece in (part, zeros)])


def by_request(scores: Tensor, requests: Sequence[ScoreInput]) -> list[Tensor]:
    """float32 [n] of each request."""
    return list(torch.split(scores, [one.positions.shape[0] for one in requests]))


def sentence_scores(
    requests: Sequence[ScoreInput], *, window: int, sigma: float, tau: float, ending: int
) -> Tensor:
    """float32 [tokens of all requests], the kernel of this name.

    Args:
        requests: with sentences, and with importance and redundancy from kernels.
    """
    from sgl_skipkv.kernels.sentence_scores import sentence_scores

    sentences = [one.sentences for one in requests if one.sentences is not None]
    scores: Tensor = sentence_scores(
        torch.cat([one.importance for one in requests if one.importance is not None]),
        torch.cat([one.redundancy for one in requests if one.redundancy is not None]),
        torch.cat([one.positions for one in requests]),
        [one.positions.shape[0] for one in requests],
        torch.cat([one.starts for one in sentences]),
        torch.cat([one.stops for one in sentences]),
        torch.cat([one.redundancy for one in sentences]),
        [one.starts.shape[0] for one in sentences],
        window=window,
        sigma=sigma,
        tau=tau,
        ending=ending,
    )
    return scores
