"""SkipKV+ (ours): SkipKV, but what a sentence ends with outlives how it got there.

``Z - lambda_s + e``, where ``Z - lambda_s`` is the score of ``skipkv``. ``e = ending - r`` for the
token with ``r`` further tokens between it and the delimiter that closes its sentence, 0 where that
is negative, for the delimiter itself and in the open sentence. ``|Z| << 0.1`` with the default
``sigma``, so eviction takes bodies first, then endings from their far side, and the last token
before the delimiter of a sentence is its last to go. ``lambda_s`` is nearly 1: of redundant
sentences bodies go before all others, and every ending with those that stand one token farther from
their delimiter. The most recent ``recent`` tokens stay as well, as far as that is no more than half
the budget.

Why: a reasoning step states its result where it ends ("..., so Ann = 7."), and later steps look up
the result. Once the redundant sentences are gone, SkipKV goes by ``Z``, the attention of the last
few queries: it cannot know what a step hundreds of tokens later needs, and it takes the sentence
that the model is in the middle of using. docs/distinct.md has the measurements that led here.
SepLLM (arXiv 2412.12094) keeps separators for a related reason.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from sgl_skipkv.policy.base import PolicyParams
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.skipkv import SkipKV, SkipKVParams


class SkipKVPlusParams(SkipKVParams):
    ending: int = Field(
        4, ge=0, le=64, description="tokens before a sentence's delimiter that outlive its body"
    )
    recent: int = Field(
        64, ge=0, le=65536, description="last tokens, always kept, up to half the budget"
    )


class SkipKVPlus(SkipKV):
    name = "skipkv+"
    keeps = "as `skipkv`, but sentence endings are evicted last and recent tokens are kept"
    source = "ours, [docs/distinct.md](docs/distinct.md)"
    Params: ClassVar[type[PolicyParams]] = SkipKVPlusParams
    params: SkipKVPlusParams

    @property
    def ending_tokens(self) -> int:
        return self.params.ending

    def protected_tail(self, kv_budget: int) -> int:
        """``recent`` tokens, at most half the budget, at least the window."""
        return max(self.params.window, min(self.params.recent, kv_budget // 2))

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``Z - lambda_s + e`` of every cached token."""
        assert inputs.sentences is not None
        places = inputs.sentences.places(inputs.positions)
        return super().scores(inputs) + places.ending_bonus(self.params.ending)
