"""The workspace: device memory that one compaction takes beside the KV pool and the tables.

Requests that are due in the same step are compacted together, on shared temporary tensors. Their
number is unbounded, so the workspace is capped: a larger batch is split. The workspace is reserved
while SGLang sizes its KV pool, and freed after that.
"""

from __future__ import annotations

from collections.abc import Sequence

#: per cached token: positions, scores, their order and the two halves of the selection
_SELECTION_BYTES = 128
#: per cached token, layer and KV head, while redundancy is computed: 12 for sums, 4 for columns
_HEAD_BYTES = 16
#: per cached token and number of one layer's keys, for policies that gather these or values: the
#: keys, their unit vectors, these in fixed point, and the mean of each token's request
_KEY_BYTES = 24
#: per cached token and replayed step: attention, position of the step, what a policy makes of both
_STEP_BYTES = 48


def split_to_fit(
    row_tokens: Sequence[int],
    work_bytes: int,
    *,
    heads: int = 0,
    steps: int = 0,
    key_numbers: int = 0,
    ranks: int = 1,
    block_tokens: int = 0,
) -> list[list[int]]:
    """Which requests to compact together, so that each part stays within a limit.

    Args:
        row_tokens: of each due request.
        work_bytes: the limit; a request that needs more alone is a separate part.
        heads: KV heads of all layers, if kernels score them; else 0.
        steps: most decode steps of one request whose attention is replayed.
        key_numbers: Hkv * d, times the layers that a policy holds at once.
        ranks, block_tokens: of how many ranks products are added up, and of how many tokens with
            every other one.

    Returns:
        indices of the requests, each once, in order.
    """
    token_bytes = heads * _HEAD_BYTES + steps * _STEP_BYTES + key_numbers * _KEY_BYTES
    # Products of this rank, of all of them, and three of what they become.
    token_bytes += (ranks + 4) * 4 * block_tokens
    most_tokens = work_bytes // (token_bytes + _SELECTION_BYTES)
    parts: list[list[int]] = []
    rest = 0
    for i, tokens in enumerate(row_tokens):
        if not parts or tokens > rest:
            parts.append([])
            rest = most_tokens
        parts[-1].append(i)
        rest -= tokens
    return parts
