"""Quotas of sentences around any token score, after AMS (arXiv 2605.23200): ``quotas: true``.

A sentence has attention mass ``M``, the sum over its tokens of ``0.7 N(e) + 0.3 N(c)``: ``e`` is
the mean attention of the last ``window`` queries, ``c`` what is carried of it from one compaction
to the next, ``c = 0.8 c + 0.2 e``, and ``N`` divides by the sum over all tokens that may be
evicted. Every sentence keeps eight tokens or all it has, and of the rest a number in proportion to
its mass. Which of its tokens these are the policy's own score says. Tokens between sentences and
those of the open one are a sentence each time.

Whole quotas come from the method of highest averages: from rank 8 on, the token of rank ``r`` in
its sentence gets ``M / (r - 8 + 1/2)``, and the best of these are the quotas with their rounding
and their caps. Tokens of the first eight ranks, from 0, stand above all others, rank by rank: where
even eight each are too many, the lowest ranks are evicted first. So quotas are a score like any
other, and selection does not know of them.

Deviations: sentences where AMS cuts at every fiftieth of the mass; highest averages where it rounds
and then evens out cyclically; no pool of attention over five tokens, which a sum over a sentence
hardly sees; ``c`` carries ``e`` and is divided at the end, where AMS carries ``N(e)``; compactions
every ``interval`` tokens with a ``window`` of 8, where it has 512 and 32; one set for all layers
and heads, so ``e`` is a mean over them; queries of a prefill, and those that an earlier compaction
has seen, do not count; a recomputation after a retraction starts ``c`` anew.

Sums are taken in fixed point, so neither their order nor the batch changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_skipkv.config import SettingError
from sgl_skipkv.kernels.on_device import device_tensors
from sgl_skipkv.policy.base import Policy
from sgl_skipkv.policy.inputs.joined_requests import by_request, joined_sentences, joined_statistics
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.ranks import Ranks

#: tokens that every sentence keeps before masses count
LEAST_TOKENS = 8
CREDIT_SHARE, CREDIT_DECAY = 0.3, 0.8
#: of a share of attention; 2**63 / 2**40 = 2**23 tokens at least can be added
_ONE = 2.0**40
_MADE: dict[type[Policy], type[Policy]] = {}


class SentenceQuotas(Policy):
    """What ``with_quotas`` puts before a policy. Its ``scores`` stay the policy's own."""

    needs_spans = needs_attention = True
    follows_compactions = True
    over_ranks = "max"  # equal: what is ranked is combined before

    def gathers(self, prompt_tokens: Sequence[int], row_tokens: Sequence[int]) -> list[int]:
        numbers = [] if super().over_ranks is None else [sum(row_tokens)]
        return [*super().gathers(prompt_tokens, row_tokens), *numbers]

    def initial_statistics(self, positions: Tensor) -> dict[str, Tensor]:
        initial = torch.zeros_like(positions, dtype=torch.float32)
        return {"recent": initial, "credit": initial.clone()}

    def follow(self, statistics: Statistics, seen: Steps) -> dict[str, Tensor]:
        # One step after the other: the order of ``sum`` depends on the shape, so on the batch.
        recent = seen.attention.cumsum(dim=0)[-1] / (seen.steps >= 0).sum(dim=0)
        credit = CREDIT_DECAY * statistics["credit"] + (1.0 - CREDIT_DECAY) * recent
        return {"recent": recent, "credit": credit}

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """``M / (r - 8 + 1/2)``, above it the first ranks; 0 for tokens that are no candidates."""
        token_scores = self._of_all_heads(
            torch.cat(super().scores_together(requests)), requests[0].ranks
        )
        sentences, positions, owner = joined_sentences(requests)
        spans = [self.candidates(request) for request in requests]
        lengths = [len(request.positions) for request in requests]
        numbers = [[0, *accumulate(lengths[:-1])], *zip(*spans, strict=True)]
        starts, firsts, stops = device_tensors(numbers, token_scores.device)
        entry = torch.arange(token_scores.shape[0], device=token_scores.device) - starts[owner]
        inside = (entry >= firsts[owner]) & (entry < stops[owner])
        segment, segments = _segments(positions, owner, sentences, len(requests))
        segment = torch.where(inside, segment, segments - 1)  # which no candidate has
        recent, credit = (
            _shares(values * inside, owner, starts)
            for values in joined_statistics(requests, "recent", "credit")
        )
        share = (1.0 - CREDIT_SHARE) * recent + CREDIT_SHARE * credit
        mass = _sums(share, segment, segments)[segment] / _ONE
        rank = _ranks(token_scores, segment, segments)
        first_ranks = 3.0 * (LEAST_TOKENS - rank) + mass  # the others are 2 at most
        of_rest = mass / (rank - LEAST_TOKENS + 0.5)
        scores = torch.where(rank < LEAST_TOKENS, first_ranks, of_rest) * inside
        return by_request(
            torch.where(token_scores.isfinite(), scores.float(), token_scores), requests
        )

    def _of_all_heads(self, scores: Tensor, ranks: Ranks) -> Tensor:
        over = super().over_ranks
        if over is None:
            return scores
        return ranks.mean(scores) if over == "mean" else ranks.maximum(scores)


def with_quotas(cls: type[Policy]) -> type[Policy]:
    """The policy with quotas for sentences, always the same class.

    Raises:
        SettingError: a policy that carries statistics of its own, or scores sentences itself, or
            keeps everything.
    """
    if cls.needs_attention or cls.needs_sentences or not cls.evicts:
        expected = (
            f"false with {cls.name}, which follows attention, scores sentences or evicts nothing"
        )
        choices = "false, or a policy that scores tokens, such as rkv, keydiff or distinct"
        raise SettingError("kv_params.quotas", expected, True, choices)
    if cls not in _MADE:
        _MADE[cls] = type(f"{cls.__name__}WithQuotas", (SentenceQuotas, cls), {})
    return _MADE[cls]


def _segments(
    positions: Tensor, owner: Tensor, sentences: Sentences, requests: int
) -> tuple[Tensor, int]:
    """int64 [n], the number of each token's sentence, or of what lies behind it; and how many
    numbers there are, the last of which no token has."""
    at = torch.searchsorted(sentences.starts, positions, right=True)
    behind = positions >= F.pad(sentences.stops, (1, 0), value=-1)[at]
    # A request's first tokens may stand behind the last sentence of the one before it.
    return 2 * (at + owner) + behind, 2 * (sentences.starts.shape[0] + requests) + 1


def _sums(shares: Tensor, segment: Tensor, count: int) -> Tensor:
    """int64 [count], in fixed point."""
    fixed = (shares * _ONE).long()
    return fixed.new_zeros(count).index_add_(0, segment, fixed)


def _shares(values: Tensor, owner: Tensor, starts: Tensor) -> Tensor:
    """float64 [n], of the sum of each request's; 0 where that is 0."""
    total = _sums(values.double(), owner, starts.shape[0])
    return values.double() * _ONE / total[owner].clamp_min_(1)


def _ranks(scores: Tensor, segment: Tensor, segments: int) -> Tensor:
    """int64 [n], how many tokens of its segment are better; of equals, the later one is."""
    last = scores.shape[0] - 1
    best = last - scores.flip(0).sort(descending=True, stable=True).indices
    grouped = segment[best].sort(stable=True)
    sizes = segment.new_zeros(segments).index_add_(0, segment, torch.ones_like(segment))
    begins = sizes.cumsum(dim=0) - sizes
    every = torch.arange(last + 1, device=scores.device)
    rank = torch.empty_like(every)
    rank[best[grouped.indices]] = every - begins[grouped.values]
    return rank
