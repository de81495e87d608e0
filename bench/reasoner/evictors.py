"""Evictors for the offline check: how much does this task punish a cache that forgets?

They are stand-ins that need no attention scores: two baselines, an oracle that knows which tokens
carry results, and one that drops repeated sentences first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from decode import Evictor, Trace
from problems import NAMES
from tokenizers import Tokenizer
from torch import Tensor
from vocabulary import token_id

SINKS = 4
RECENT = 8


def keep_best(score: Tensor, trace: Trace, budget: int) -> Tensor:
    """The `budget` alive generated tokens of highest score; ties go to the later one.

    score: fp64 [n - prompt], higher = keep.
    """
    alive = trace.alive[trace.prompt :]
    order = torch.arange(len(score), device=score.device, dtype=torch.float64)
    ranked = torch.where(alive, score.double() + order * 1e-9, -torch.inf)
    kept = torch.zeros_like(alive)
    kept[ranked.topk(budget).indices] = True
    return kept


def _protect(score: Tensor, recent: int = RECENT) -> Tensor:
    """Put the first generated tokens and the last ones above everything else."""
    score[:SINKS] += 1000.0
    score[-recent:] += 1000.0
    return score


def streaming(trace: Trace, budget: int) -> Tensor:
    """StreamingLLM: the first tokens and the most recent ones."""
    score = torch.zeros(len(trace.tokens) - trace.prompt, dtype=torch.float64)
    return keep_best(_protect(score), trace, budget)


def uniform(trace: Trace, budget: int) -> Tensor:
    """A random choice, the same for the same trace, beside the first and the last tokens."""
    generator = torch.Generator().manual_seed(int(trace.tokens.sum()) * 1000 + len(trace.tokens))
    score = torch.rand(len(trace.tokens) - trace.prompt, generator=generator, dtype=torch.float64)
    return keep_best(_protect(score), trace, budget)


class Statements:
    """An oracle: the latest `Name = value` of every name, then the most recent tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.equals = token_id(tokenizer, " =")
        self.names = torch.tensor([token_id(tokenizer, f" {name}") for name in NAMES])

    def __call__(self, trace: Trace, budget: int) -> Tensor:
        tokens = trace.tokens[trace.prompt :]
        score = torch.zeros(len(tokens), dtype=torch.float64)
        is_name = torch.isin(tokens[:-2], self.names) & (tokens[1:-1] == self.equals)
        latest = {int(tokens[place]): place for place in is_name.nonzero().flatten().tolist()}
        for place in latest.values():
            score[place : place + 3] = 1.0
        return keep_best(_protect(score), trace, budget)


class Sentences:
    """Whole sentences that a later one repeats go first, then the rest at random.

    A sentence ends with a token whose text ends in a newline; its vector is the mean hidden state
    of its tokens; it is repeated when a later one's cosine with it is above `tau`.
    """

    def __init__(self, tokenizer: Tokenizer, tau: float) -> None:
        self.tau = tau
        size = tokenizer.get_vocab_size()
        texts = (tokenizer.decode([index], skip_special_tokens=False) for index in range(size))
        self.closes = torch.tensor([text.endswith("\n") for text in texts])

    def __call__(self, trace: Trace, budget: int) -> Tensor:
        tokens = trace.tokens[trace.prompt :]
        spans = sentence_spans(self.closes[tokens])
        vectors = sentence_vectors(trace.hidden[trace.prompt :], spans)
        later = torch.triu(vectors @ vectors.T, diagonal=1)
        generator = torch.Generator().manual_seed(len(tokens))
        score = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
        for (start, stop), repeated in zip(spans, (later > self.tau).any(1), strict=True):
            score[start:stop] -= 10.0 * float(repeated)
        return keep_best(_protect(score), trace, budget)


def sentence_spans(closes: Tensor) -> list[tuple[int, int]]:
    """Half-open spans of the closed sentences: closes bool [n]."""
    ends = (closes.nonzero().flatten() + 1).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def sentence_vectors(hidden: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Unit mean vectors fp32 [S, D] of the spans of hidden [n, D]."""
    if not spans:
        return hidden.new_zeros(0, hidden.shape[-1])
    means = torch.stack([hidden[start:stop].mean(0) for start, stop in spans])
    return F.normalize(means, dim=-1)


def make_evictor(name: str, tokenizer: Tokenizer, tau: float) -> Evictor:
    """An evictor by the name that the command line gives."""
    factories: dict[str, Callable[[], Evictor]] = {
        "streaming": lambda: streaming,
        "random": lambda: uniform,
        "statements": lambda: Statements(tokenizer),
        "sentences": lambda: Sentences(tokenizer, tau),
    }
    if name not in factories:
        raise ValueError(f"unknown policy {name!r}; expected one of {', '.join(factories)}")
    return factories[name]()
