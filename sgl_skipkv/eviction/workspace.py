"""The workspace: device memory that one compaction takes beside the KV pool and the tables.

A compaction works on temporary tensors, which requests that are due in the same step share. The
number of requests due in one step is unbounded, so the workspace is capped: a larger batch is
split. Room for one part is held while SGLang sizes its KV pool, and freed after that.
"""

from __future__ import annotations

from collections.abc import Sequence

#: per cached token: positions, scores, sort keys and the two halves of the selection
_SELECTION_BYTES = 128
#: per cached token, layer and KV head, while redundancy is computed: 12 in its sums, 4 in columns
_HEAD_BYTES = 16
#: per cached token and replayed step: attention, position of the step, what a policy makes of both
_STEP_BYTES = 48


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
