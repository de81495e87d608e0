"""SkipKV (arXiv 2512.07993, section 4.1): redundant sentences first, then R-KV's token score.

``Z`` as in ``rkv``; every token of a redundant sentence gets ``Z -= lambda_s``, where ``lambda_s``
is the sentence's highest cosine similarity to a sentence that closed later, if that exceeds ``tau``
(eqs 1-3 and 6). With the default ``tau`` and ``sigma`` ``lambda_s`` is far above ``|Z|``, so
redundant sentences are evicted first, and nearly whole: two of about the same ``lambda_s`` may
both lose a part in one compaction. Similarity is the cosine, as in the paper's text and code; its
eq. 1 is a dot product.

Deviations: ``I`` and ``R`` as in its code, where eqs 4 and 5 normalise in another order; the
maximum over several later partners; a sentence of one token is never penalised, but the last token
that is left of a longer one is, where its code no longer does; the open sentence stays, as far as
that is no more than half of the budget; the first ``sink`` tokens stay; the prompt is protected by
default (``protect_prompt: false, count_prompt: true, sink: 0``, and the server's ``delimiters:
"paper"``, are the paper's), and its sentences are neither compared nor counted; each request
compacts by its own generated length instead of the batch's, the first time ``interval`` tokens
behind its budget. Only the most recent sentences are compared (``max_sentences``), but what was
found of one stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sgl_skipkv.policy.base import PolicyParams
from sgl_skipkv.policy.inputs.batched_scores import token_importance, token_redundancy
from sgl_skipkv.policy.inputs.joined_requests import by_request, known
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.policy.rkv import RKV, RKVParams


class SkipKVParams(RKVParams):
    tau: float = Field(
        0.95,
        ge=0.0,
        le=1.0,
        description="cosine above which the earlier of two sentences is redundant",
    )


class SkipKV(RKV):
    name = "skipkv"
    keeps = "everything but redundant sentences, then by importance against redundancy"
    source = "SkipKV, arXiv 2512.07993"
    Params: ClassVar[type[PolicyParams]] = SkipKVParams
    needs_sentences = True
    protects_open_sentence = True
    params: SkipKVParams

    @property
    def ending_tokens(self) -> int:
        """Tokens before a sentence's delimiter that get a bonus."""
        return 0

    def scores_in_place(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """``Z - lambda_s``, and the bonus of subclasses: one launch behind ``I`` and ``R``."""
        from sgl_skipkv.kernels.sentence_scores import sentence_scores

        params, sentences = self.params, known(request.sentences for request in requests)
        importance = token_importance(requests, window=params.window, kernel=params.kernel)
        redundancy = token_redundancy(requests, threshold=params.threshold)
        scores: Tensor = sentence_scores(
            torch.cat(importance),
            torch.cat(redundancy),
            torch.cat([request.positions for request in requests]),
            [request.positions.shape[0] for request in requests],
            torch.cat([part.starts for part in sentences]),
            torch.cat([part.stops for part in sentences]),
            torch.cat([part.redundancy for part in sentences]),
            [part.starts.shape[0] for part in sentences],
            window=params.window,
            sigma=params.sigma,
            tau=params.tau,
            ending=self.ending_tokens,
        )
        return by_request(scores, requests)

    def scores(self, inputs: ScoreInput) -> Tensor:
        """``Z - lambda_s`` of every cached token."""
        assert inputs.sentences is not None
        return super().scores(inputs) - sentence_penalty(
            inputs.positions, inputs.sentences, self.params.tau
        )


def sentence_penalty(positions: Tensor, sentences: Sentences, tau: float) -> Tensor:
    """float32 [n], ``lambda_s`` of each token's sentence, 0 where it is not redundant.

    The paper keeps a start and an end per sentence in cache coordinates and moves them at every
    eviction (eqs 9-11). Each cached token keeps its logical position here, so the sentence it
    belongs to is one ``searchsorted``.

    Args:
        positions: int64 [n], logical, ascending.
        tau: strict threshold.
    """
    if sentences.starts.shape[0] == 0:
        return torch.zeros(positions.shape[0], device=positions.device)
    redundant = (sentences.redundancy > tau) & (sentences.stops - sentences.starts > 1)
    # Entry 0 is what comes before the first sentence: it ends at position 0 and costs nothing.
    penalty = F.pad(torch.where(redundant, sentences.redundancy, 0.0), (1, 0))
    stops = F.pad(sentences.stops, (1, 0))
    owner = torch.searchsorted(sentences.starts, positions, right=True)
    return torch.where(positions < stops[owner], penalty[owner], 0.0)
