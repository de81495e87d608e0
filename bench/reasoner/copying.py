"""Heads that start by copying: a token is found by those that stand one to four places before it.

A trace copies lines of its prompt (`7. p plus q`). After the number, the line is found by the
number alone, one token back; `plus` and `q` need it two and three tokens back, and a small model
finds that out late. So the four heads of the first layer start by reading one to four tokens back,
and those of the second by matching what was read last with what stands before every token:

| head | matches | finds |
|---|---|---|
| 0 | one token back with two | the value of a name, in any words |
| 1 | the last token with one back, and one back with two | what follows the same two tokens |
| 2 | two tokens back with three | what a line says first |
| 3 | three tokens back with four | what it says next |

A start, not a constraint, as in `model.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.reasoner.model import Block, Reasoner

OFFSETS = (1, 2, 3, 4)
MATCHES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 2),),
    ((0, 1), (1, 2)),
    ((2, 3),),
    ((3, 4),),
)
"""For each head of the second layer: tokens back from the query, tokens back from the key."""
EMBEDDING = 0.02
"""Standard deviation of the embedding at the start (`Reasoner`)."""
WRITE = 0.04
READ = 1.5
COPY = 0.06


@torch.no_grad()
def start_copying(model: Reasoner) -> None:
    """Set the heads of the first two layers of an untrained model; the others stay as they are."""
    first, second = model.blocks[0], model.blocks[1]
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    shape = first.shape
    size, groups = shape.head_dim, shape.query_heads // shape.kv_heads
    # Orthogonal parts of the residual stream: where a token itself is read, and what stands
    # one to four places before it.
    width = shape.hidden // (len(OFFSETS) + 2)
    basis = torch.linalg.qr(torch.randn(shape.hidden, shape.hidden)).Q
    part = basis.split(width, dim=1)
    first.look_back(OFFSETS)
    for head, offset in enumerate(OFFSETS):
        _set_value(first, head // groups, part[0])
        _set_out(first, head, part[offset] * WRITE)
    slow = torch.arange(size // 4, size // 2)
    slow = torch.cat((slow, slow + size // 2))
    # Several parts share the dimensions of a head; each is turned in its own way.
    turn = [torch.linalg.qr(torch.randn(width, width)).Q * READ for _ in range(len(OFFSETS) + 1)]
    query, key, _ = second.qkv.weight.split((second.q_size, second.kv_size, second.kv_size))
    copied = torch.cat((part[0], part[-1]), dim=1)
    for head, matches in enumerate(MATCHES):
        group = head // groups
        asked = torch.zeros(width, shape.hidden)
        found = torch.zeros(width, shape.hidden)
        for back, before in matches:
            # What a token is itself stands there with less weight than what was brought back.
            own = WRITE / EMBEDDING if back == 0 else 1.0
            asked += own * turn[before] @ part[back].T
        together = MATCHES[group * groups : (group + 1) * groups]
        for before in sorted({before for pairs in together for _, before in pairs}):
            found += turn[before] @ part[before].T
        query[head * size : (head + 1) * size] = 0.0
        key[group * size : (group + 1) * size] = 0.0
        query[slow + head * size] = asked
        key[slow + group * size] = found
        _set_value(second, group, copied)
        _set_out(second, head, copied * COPY)


def _set_value(block: Block, group: int, directions: Tensor) -> None:
    """Let the values of a group be these directions [D, n] of what the layer reads."""
    size = block.shape.head_dim
    value = block.qkv.weight[block.q_size + block.kv_size :][group * size : (group + 1) * size]
    value.zero_()
    value[: directions.shape[1]] = directions.T


def _set_out(block: Block, head: int, directions: Tensor) -> None:
    """Let a head write its values in these directions [D, n]."""
    size = block.shape.head_dim
    out = block.out.weight[:, head * size : (head + 1) * size]
    out.zero_()
    out[:, : directions.shape[1]] = directions
