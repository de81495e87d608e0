"""StreamingLLM (arXiv 2309.17453, section 3.2): the first tokens and the most recent ones.

The score is the position, so the most recent tokens win. Deviation: positions are not re-indexed
after an eviction, because SGLang caches rotated keys.
"""

from __future__ import annotations

from torch import Tensor

from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.score_input import ScoreInput


class Streaming(Policy):
    name = "streaming"
    keeps = "the first tokens and the most recent"
    source = "StreamingLLM, arXiv 2309.17453"
    over_ranks = None

    def scores(self, inputs: ScoreInput) -> Tensor:
        """The logical position (exact in float32 up to 2**24 tokens)."""
        return inputs.positions.float()
