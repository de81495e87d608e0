"""The first tokens of every sentence, then the most recent: a policy in a package of its own.

What a step is about stands at its beginning. The score of a token is ``b + p / t``: ``b`` is 1 for
the first ``opening`` tokens of a sentence and 0 for the others, ``p`` is its position and ``t`` the
number of tokens so far.
"""

from __future__ import annotations

import torch
from pydantic import Field

from sgl_skipkv.policy import Policy, PolicyParams, ScoreInput


class OpeningsParams(PolicyParams):
    opening: int = Field(4, ge=1, le=64, description="first tokens of a sentence that stay longest")


class Openings(Policy):
    name = "openings"
    keeps = "the first tokens of every sentence, then the most recent"
    Params = OpeningsParams
    params: OpeningsParams
    needs_spans = True
    over_ranks = None

    def scores(self, inputs: ScoreInput) -> torch.Tensor:
        """float32 [n], ``b + p / t``; of the sentence that is still open ``b`` is 0."""
        assert inputs.sentences is not None
        begins = inputs.sentences.places(inputs.positions).begins(self.params.opening)
        return begins.float() + inputs.positions / inputs.logical_tokens
