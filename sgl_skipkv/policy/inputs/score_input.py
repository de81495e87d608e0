"""All that a policy may look at: one request at one compaction, and decode steps of several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.policy.inputs.paged_cache import KeyLocation
from sgl_skipkv.policy.inputs.query_centres import QueryCentres
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.ranks import ONE_RANK, Ranks

Statistics = Mapping[str, Tensor]


@dataclass(frozen=True)
class ScoreInput:
    """Everything a policy may look at: one request, at one compaction.

    With MLA there is one KV head, ``Hkv = 1``. A key is what is cached: the latent of r numbers and
    the rotary key behind it. A query is absorbed, ``W_UK q``, and its rotary part behind it, so
    their product is that of the ordinary query and key. A value is the latent. What compares keys
    compares latents with their rotary keys, what measures values measures latents. Every rank has
    all latents, and its own query heads.

    Attributes:
        positions: int64 [n], logical position of each cached token, ascending, prompt included.
        prompt_tokens: how many of the cached tokens are of the prompt.
        keep_tokens: how many of the cached tokens will stay.
        layers: number of attention layers.
        keys: layer -> float [n, Hkv, d], the cached rotated keys of that layer.
        queries: () -> float [layers, W, Hq, d], rotated queries of the last W tokens, newest
            first, as they are recorded when it is called; for policies with ``needs_queries``.
        values: layer -> float [n, Hkv, d], the cached values of that layer.
        reach: float32 [layers, Hkv of all ranks], how far the model's heads look
            (``head_reach.py``).
        scale: the model's factor on attention logits.
        sentences: None for policies that asked neither for them nor for their spans.
        input_sentences: numbers of those that users and tools wrote in later turns; none for
            policies that did not ask for spans.
        seed: the same for the same prompt and the same compaction, whatever the batch.
        logical_tokens: cached and evicted, so the position of the next query.
        centres: of the model's queries, and their rotation; None for policies that ask for neither.
        statistics: name -> [n], what the policy's ``follow`` made of every decode step so far.
        location: where keys and queries lie; None where kernels cannot read them in place.
        ranks: all heads but this rank's are on the others.
    """

    positions: Tensor
    prompt_tokens: int
    keep_tokens: int
    layers: int
    keys: Callable[[int], Tensor]
    queries: Callable[[], Tensor]
    values: Callable[[int], Tensor]
    reach: Tensor
    scale: float
    sentences: Sentences | None
    seed: int
    logical_tokens: int
    input_sentences: Collection[int] = ()
    centres: QueryCentres | None = None
    statistics: Statistics = field(default_factory=dict)
    location: KeyLocation | None = None
    ranks: Ranks = ONE_RANK

    def mean_over_layers(self, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """float32, of what ``score`` makes of each layer's (queries, keys)."""
        queries = self.queries()
        parts = (score(queries[layer], self.keys(layer)) for layer in range(self.layers))
        return functools.reduce(torch.add, parts) / self.layers


class Steps(NamedTuple):
    """A few decode steps of one or several requests, whose n tokens follow each other.

    Attributes:
        attention: float32 [T, n], as ``attention_over`` says, 0 for tokens of later steps.
        steps: int64 [T, n], logical position of the query of each step of the token's request,
            ascending. Requests with fewer steps than T have -1 in the last rows, and attention is 0
            there.
        lengths: tokens of each request.
    """

    attention: Tensor
    steps: Tensor
    lengths: Sequence[int]
