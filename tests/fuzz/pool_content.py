"""What a slot of the pools holds: a hash of all that a real forward pass would have looked at.

That is the token, its position and the hashes in the row before it. So a slot holds the right
content exactly if its hash is that of the token's full prefix, and one eviction makes every later
hash different.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from pool_turns import Apart, Entry, number_of

POOL, ROWS, CONTEXT, TRACKED = 96, 4, 400, 2
KV_HEADS, QUERY_HEADS, HEAD_DIM, HIDDEN = 1, 2, 4, 4
KV_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
VOCAB, DELIMITER, STOP = 50, 1, 2

_draw = torch.Generator().manual_seed(0)
KEYS = torch.randn(61, KV_HEADS, HEAD_DIM, generator=_draw)
QUERIES = torch.randn(67, QUERY_HEADS, HEAD_DIM, generator=_draw)
HIDDENS = torch.randn(71, HIDDEN, generator=_draw)


@contextlib.contextmanager
def plugin_and_topology() -> Iterator[None]:
    """SGLang with its plugins loaded (ours among them) and a published CPU configuration."""
    from sglang.srt.plugins import load_plugins
    from sglang.test.test_utils import published_topology

    from sgl_skipkv.patches import registry

    load_plugins()
    assert registry.problems() == []
    torch.set_num_threads(1)
    with published_topology(role="scheduler", device="cpu", attention_backend="torch_native"):
        yield


def tag_after(
    tags: Sequence[int],
    position: int,
    token: int,
    apart: Apart,
    factor: float = 0.0,
) -> int:
    """The content of a token that sees this row, and is steered with that factor.

    Args:
        apart: what separates the request from others with the same text.
    """
    seen = tags or ([number_of(apart)] if any(apart) else [])
    return hash((token, position, *seen) if not factor else (token, position, factor, *seen))


def full_tags(tokens: Sequence[int], apart: Apart, known: Sequence[Entry] = ()) -> list[int]:
    """The content of every token of a text; ``known`` is the row of its beginning, which nothing
    is evicted from unless that says so."""
    tags = [entry.tag for entry in known]
    for position in range(known[-1].position + 1 if known else 0, len(tokens)):
        tags.append(tag_after(tags, position, tokens[position], apart))
    return tags


def keys_of(tags: Sequence[int]) -> torch.Tensor:
    return KEYS[[tag % len(KEYS) for tag in tags]]


def queries_of(tags: Sequence[int]) -> torch.Tensor:
    return QUERIES[[tag % len(QUERIES) for tag in tags]]


def hidden_of(tags: Sequence[int]) -> torch.Tensor:
    return HIDDENS[[tag % len(HIDDENS) for tag in tags]]


def values_of(tags: Sequence[int]) -> torch.Tensor:
    """The tag itself, in four numbers that float32 holds exactly."""
    words = [[(tag >> shift) & 0xFFFF for shift in (0, 16, 32, 48)] for tag in tags]
    return torch.tensor(words, dtype=torch.float32).view(-1, KV_HEADS, HEAD_DIM)


def tags_of(values: torch.Tensor) -> list[int]:
    """The inverse of ``values_of``."""
    words = values.flatten(1).to(torch.int64)
    tags = sum(words[:, i] << (16 * i) for i in range(4))
    return tags.tolist()
