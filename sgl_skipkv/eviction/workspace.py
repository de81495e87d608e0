"""Device memory that compactions take beside KV pool and tables: a limit, and room that is kept.

A compaction works on temporary tensors, and requests that are due in the same step share theirs.
How
many are due is for the traffic to say, so it must not decide how much memory is taken at once: due
requests are compacted in parts. What a part takes, and what requests carry from one compaction to
the next, is held while SGLang sizes its KV pool and free after that, so both find room.
"""

from __future__ import annotations

from collections.abc import Sequence

#: per cached token: positions, scores, sort keys and the two halves of the selection
_SELECTION_BYTES = 128
#: per cached token, layer and KV head, while redundancy is found: 12 in its sums, 4 each for what
#: is found, what was known, and the rows to search again
_HEAD_BYTES = 24
#: per cached token and replayed step: attention, position of the step, what a policy makes of both
_STEP_BYTES = 48
#: per kept token, layer and KV head: the column that a key spares
_CARRIED_BYTES = 4


def split_to_fit(
    row_tokens: Sequence[int], heads: int, work_bytes: int, *, steps: int = 0
) -> list[list[int]]:
    """Which requests to compact together, so that each part stays within a limit.

    Args:
        row_tokens: of each due request.
        heads: KV heads of all layers that kernels score; 0 where none do.
        work_bytes: the limit; a request that takes more by itself is a part of its own.
        steps: decode steps whose attention is replayed, of each request at most.

    Returns:
        indices of the requests, each once. Shorter rows come first: in a part all are as long as
        the longest, because selection lays them side by side.
    """
    most_tokens = work_bytes // (heads * _HEAD_BYTES + steps * _STEP_BYTES + _SELECTION_BYTES)
    parts: list[list[int]] = []
    for i in sorted(range(len(row_tokens)), key=row_tokens.__getitem__):
        if not parts or (len(parts[-1]) + 1) * row_tokens[i] > most_tokens:
            parts.append([])
        parts[-1].append(i)
    return parts


def reserved_bytes(pool_bytes: int, work_bytes: int, *, head_dim: int, value_bytes: int) -> int:
    """Room to hold while the KV pool is sized: one part's work, and what all its tokens carry,
    ``work_bytes + pool_bytes * 4 / (2 d value_bytes)``.

    Args:
        pool_bytes: of the pool, if nothing were held. work_bytes: of a part.
        head_dim, value_bytes: d and bytes of one cached number; a token of one layer and KV head
            has 2 d of them.
    """
    return work_bytes + pool_bytes * _CARRIED_BYTES // (2 * head_dim * value_bytes)
