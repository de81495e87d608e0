"""Steering in the made-up forward pass: the real ``Steerer``, and what it has to add by definition.

The vector is a unit vector, so what a token's residual becomes is the factor that it was steered
with. The factor goes into the content of the token's slot (pool_books.py): steered KV is not what
another request would compute for the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vector_files import origin

from sgl_skipkv.recording.sentences import Delimiters
from sgl_skipkv.steering.steerer import Steerer, TokenClasses
from sgl_skipkv.steering.vector import SteeringVector

GAMMA = 0.25  # a sum of quarters is exact
WORDS = {f"k{token}": token for token in range(20, 28)}
KEYWORDS = frozenset(WORDS.values())


def make_steerer(
    delimiters: Delimiters, hidden_size: int, rows: int, device: torch.device
) -> Steerer:
    """As the start of a server makes it, without a model."""
    whence = origin(hidden_size=hidden_size, layer=0, keywords=",".join(WORDS), delimiters="paper")
    vector = SteeringVector(torch.eye(hidden_size)[0], whence)
    words = SimpleNamespace(get_vocab=WORDS.copy)
    classes = TokenClasses(words, delimiters, whence.delimiters, whence.keywords.split(","))
    steerer = Steerer(vector, classes, GAMMA, device=device)
    steerer.use_rows(rows)
    return steerer


def added(steerer: Steerer, batch: Any, tokens: Sequence[int], hidden_size: int) -> list[float]:
    """The factor of each token of a forward pass, as the hook on the vector's layer adds it."""
    rows = batch.req_pool_indices.long()
    residual = torch.zeros(len(tokens), hidden_size, device=rows.device)
    if not batch.forward_mode.is_decode():
        if steerer.factors is not None:
            steerer.prefill(residual)
    elif steerer.steered_requests:
        steerer.decode(residual, rows, torch.tensor(tokens, device=rows.device))
    return residual[:, 0].tolist()


def strength(alpha_0: float | None, generated: Sequence[int], delimiter: int) -> float:
    """Of the last of a request's generated tokens: what closed sentences with a keyword make it."""
    if alpha_0 is None or not generated or generated[-1] != delimiter:
        return 0.0
    ends = [i for i, token in enumerate(generated) if token == delimiter]
    starts = [0, *(end + 1 for end in ends)]
    sentences = [generated[start:end] for start, end in zip(starts, ends, strict=False)]
    return alpha_0 + GAMMA * sum(not KEYWORDS.isdisjoint(one) for one in sentences)
