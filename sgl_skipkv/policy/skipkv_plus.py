"""SkipKV+ (ours): SkipKV, but how a sentence ends goes last.

``Z - lambda_s + e``, where ``Z - lambda_s`` is the score of ``skipkv`` and ``e = 1`` for the last
``ending`` tokens of every closed sentence, else 0. Since ``|Z| << 0.1`` and ``tau < lambda_s <= 1``
the order of eviction is: bodies of redundant sentences, bodies of the others, endings of redundant
sentences, endings of the others.

Why: a reasoning step states what it found at its end ("..., so Ann = 7."), and what later steps
look up is that, not how it was found. SkipKV goes on to ``Z`` once the redundant sentences are
gone, and ``Z`` looks at the last few queries: it cannot know what a step hundreds of tokens later
needs. docs/results.md has the traces. That a segment's last tokens carry what the rest of the model
needs of it is also what SepLLM (arXiv 2412.12094) builds on, for separators alone.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.policy.base import PolicyParams, ScoreInput, Sentences
from sgl_skipkv.policy.skipkv import SkipKV, SkipKVParams


class SkipKVPlusParams(SkipKVParams):
    ending: int = Field(
        4, ge=0, le=64, description="last tokens of a sentence that outlive its body"
    )


class SkipKVPlus(SkipKV):
    name = "skipkv+"
    Params: ClassVar[type[PolicyParams]] = SkipKVPlusParams
    params: SkipKVPlusParams

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``Z - lambda_s + e`` of every cached token."""
        assert inputs.sentences is not None
        return super().scores(inputs) + is_ending(
            inputs.positions, inputs.sentences, self.params.ending
        )


def is_ending(positions: Tensor, sentences: Sentences, ending: int) -> Tensor:
    """1 for the last ``ending`` tokens of each closed sentence, delimiters included, else 0.

    Args:
        positions: int64 [n], logical positions, ascending.
        sentences: closed sentences with cached tokens.
        ending: tokens.

    Returns:
        float32 [n].
    """
    if sentences.starts.shape[0] == 0:
        return torch.zeros(positions.shape[0], device=positions.device)
    owner = (torch.searchsorted(sentences.starts, positions, right=True) - 1).clamp_min(0)
    inside = (positions >= sentences.starts[owner]) & (positions < sentences.stops[owner])
    return (inside & (positions >= sentences.stops[owner] - ending)).float()
