"""DP attention: the ranks of a tensor parallel group form attention groups. Each has requests and a
KV pool of its own, and the ranks of all groups run every step together.

So no rank may run a forward pass that the others do not expect, and all of them replay a CUDA graph
or none does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sgl_skipkv.patches.engine.binding import state_of


def has_dp_attention() -> bool:
    """Whether there are several attention groups."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_dp_enabled)


def all_ranks() -> Any:
    """SGLang's group of the ranks of all attention groups."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()


def any_rank(*holds: bool) -> list[bool]:
    """Of each statement whether it holds on any rank. All ranks ask between the same two steps."""
    votes = torch.tensor(holds, dtype=torch.uint8)
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=all_ranks().cpu_group)
    return [bool(vote) for vote in votes]


def vote_against_prefill_graph(original: Callable[..., bool], **asked: Any) -> bool:
    """AROUND ``_local_prefill_cuda_graph_vote``: no rank replays the graph of a prefill in a step
    with a budgeted request. Graphs of decode steps have another vote.

    SGLang would pad the batches of all ranks for a graph that a recorded prefill cannot replay, and
    make a prefill of a decode batch, whose positions come from row lengths.
    """
    batch = asked["local_batch"]
    if batch is not None and any(state_of(req) is not None for req in batch.reqs):
        return False
    return bool(original(**asked))
