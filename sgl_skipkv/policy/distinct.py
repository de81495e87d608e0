"""Distinct (ours): tokens stay whose values are large and unlike every later token's.

``score = distance * size^power * (1 + e / ending)``. ``size`` is a value's length over the mean
length of its layer and KV head, the mean over these, each weighted by how far the head looks
(``head_reach.py``). ``distance`` is how far a value lies from the nearest of a later token, in the
same unit, all KV heads of the middle half of the layers taken as one vector. ``e = ending - r`` for
the token with ``r`` further tokens between it and the delimiter that closes its sentence, 0 where
that is negative, for the delimiter itself (the last of several in a row) and in the open sentence.
The first ``beginning`` tokens of an old sentence that the model wrote count a millionth, so they
are evicted before all others but exact repetitions; it is old once one newer sentence follows for
every eight tokens of the budget, or 24 do. The mean lengths are of the tokens
that may be evicted and those behind them. The most recent ``recent`` tokens stay as well, as far as
that is no more than three fifths of the budget; unless given, a third of it and at least 64.

Why: what a token can still contribute is its value. Whoever looks it up adds it to a sum, so a
small value is nearly nothing. Only heads that look far will look it up: a head that reads the last
token or two has large values where those matter, and nobody asks for them later. And what is
written again, the result that a step repeats or the check of an earlier one, can be looked up
there. In the middle layers a value is of the token and of what it is about; in the first it is of
the token alone, so the same number of another name looks like a repetition; in the last ones it is
of the whole context and never repeats. A sentence's beginning (a line's number, its first words)
says what comes next while it is new; a few old ones that happen to stay mislead. Attention to a
token is not asked: what is looked up for the first time hundreds of tokens later has not been
looked at before. What comes next in prose or code hangs mostly on what was just written, so a third
of the budget is for that. docs/distinct.md has the measurements and what was tried instead.

Sources of the parts: values beside attention, VATP (arXiv 2406.12335) and VaSE (arXiv 2606.03928);
the later of two alike tokens stays, R-KV (arXiv 2505.24133); some heads retrieve and the others do
not, DuoAttention (arXiv 2410.10819); recent tokens and endings, ``skipkv+``.

Values are read where they lie at each compaction, and nothing is recorded or carried.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.policy.base import JointPolicy, PolicyParams
from sgl_skipkv.policy.inputs.batched_scores import paged_values
from sgl_skipkv.policy.inputs.joined_requests import by_request, joined_sentences
from sgl_skipkv.policy.inputs.score_input import ScoreInput
from sgl_skipkv.policy.inputs.sentences import Places
from sgl_skipkv.policy.inputs.values_of_ranks import BLOCK_TOKENS, numbers_of_ranks, values_of_ranks
from sgl_skipkv.ranks import Ranks

#: tokens of the budget for each sentence that is not old
_TOKENS_PER_NEWER = 8
_LEAST_RECENT = 64
#: what an old beginning counts
_LAST = 2.0**-20


class DistinctParams(PolicyParams):
    power: float = Field(4.0, ge=0.0, le=8.0, description="of a value's size in its score")
    ending: int = Field(
        3, ge=1, le=64, description="tokens before a sentence's delimiter that count up to twice"
    )
    beginning: int = Field(
        3,
        ge=0,
        le=64,
        description="first tokens of the model's old sentences, which are evicted before others",
    )
    recent: int | None = Field(
        None,
        ge=0,
        le=65536,
        description="last tokens, always kept, up to three fifths of the budget; "
        "null: a third of the budget, at least 64",
    )


class Distinct(JointPolicy):
    name = "distinct"
    keeps = "large values that no later token repeats"
    source = "ours, [docs/distinct.md](docs/distinct.md)"
    Params: ClassVar[type[PolicyParams]] = DistinctParams
    needs_spans = True
    block_tokens = BLOCK_TOKENS
    over_ranks = "max"  # equal: sizes and squared distances are summed before
    #: sentences that may be newer than one that is not old
    most_newer: ClassVar[int] = 24
    params: DistinctParams

    def protected_tail(self, kv_budget: int) -> int:
        """``recent`` tokens, at most three fifths of the budget, at least the window."""
        given = self.params.recent
        recent = max(_LEAST_RECENT, kv_budget // 3) if given is None else given
        return max(self.params.window, min(recent, 3 * kv_budget // 5))

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """From two launches, where one rank has all heads and kernels know how the values lie."""
        locations = [request.location for request in requests]
        plain = any(one is None or one.cache.v_ptrs is None for one in locations)
        if plain or requests[0].ranks.size > 1:
            return self._scores_in_torch(requests)
        from sgl_skipkv.kernels.distinct_values import distinct_values as from_pages

        first_entries = [self.candidates(request)[0] for request in requests]
        values, firsts = paged_values(requests, first_entries)
        lengths = zip(values.row_tokens, first_entries, strict=True)
        most = max(row_tokens - first for row_tokens, first in lengths)
        weights, compared = _of_model(requests[0])
        measures = from_pages(
            values, firsts, most_compared=most, weights=weights, compared=compared
        )
        joined, positions, _ = joined_sentences(requests)
        old = [is_old for request in requests for is_old in self._old(request)]
        place = self._by_place(joined.places(positions), old)
        return by_request(self._score(*measures, place), requests)

    def _scores_in_torch(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """On every device, over all ranks. Tokens of a protected prompt score 0."""
        firsts = [self.candidates(request)[0] for request in requests]
        weights, compared = _of_model(requests[0])
        distances, sizes = values_of_ranks(requests, firsts, weights=weights, compared=compared)
        scores = []
        for request, first, distance, size in zip(requests, firsts, distances, sizes, strict=True):
            assert request.sentences is not None
            place = self._by_place(
                request.sentences.places(request.positions[first:]), self._old(request)
            )
            scores.append(F.pad(self._score(distance, size, place), (first, 0)))
        return scores

    def gathers(self, prompt_tokens: Sequence[int], row_tokens: Sequence[int]) -> list[int]:
        rows = zip(prompt_tokens, row_tokens, strict=True)
        return numbers_of_ranks([tokens - self.span(prompt, tokens)[0] for prompt, tokens in rows])

    def _score(self, distance: Tensor, size: Tensor, place: Tensor) -> Tensor:
        """float32 [n]. place: of ``_by_place``."""
        return distance * size**self.params.power * place

    def _old(self, request: ScoreInput) -> list[bool]:
        """Of each of a request's sentences, whether it is old and the model wrote it."""
        assert request.sentences is not None
        params, budget = self.params, request.keep_tokens
        if params.protect_prompt or not params.count_prompt:  # the prompt is kept, or on top
            budget -= request.prompt_tokens
        newer = max(1, min(self.most_newer, budget // _TOKENS_PER_NEWER))
        closed = request.sentences.starts.shape[0]
        return [i < closed - newer and i not in request.input_sentences for i in range(closed)]

    def _by_place(self, places: Places, old: Sequence[bool]) -> Tensor:
        """float32 [n]: 1 to 2 by how near a sentence ends; next to nothing where an old one begins.

        Args:
            old: of each sentence that ``places`` knows.
        """
        place = 1.0 + places.ending_bonus(self.params.ending) / self.params.ending
        if self.params.beginning:
            # The last entry is for tokens in front of all sentences, or where there are none.
            is_old = device_tensor([*old, False], place.device, torch.bool)
            opens_old = places.begins(self.params.beginning) & is_old[places.sentence]
            place = place.masked_fill(opens_old, _LAST)
        return place


def _of_model(inputs: ScoreInput) -> tuple[Tensor, range]:
    """The weights of its heads, and the layers that are compared."""
    return _weights(inputs.reach, inputs.ranks), middle_layers(inputs.layers)


@functools.lru_cache(maxsize=1)
def _weights(reach: Tensor, ranks: Ranks) -> Tensor:
    """float32 [layers, Hkv], of sum 1 over all ranks."""
    return ranks.own(reach / reach.sum())


def middle_layers(layers: int) -> range:
    """The middle half, at least one."""
    first = layers // 4
    return range(first, max(first + 1, layers - first))
