"""The ranks of a server: what each found at start, and the communicators of those that share their
requests: all of them, or with DP attention an attention group."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from sgl_skipkv.patches.engine.dp_attention import all_ranks
from sgl_skipkv.policy import installed
from sgl_skipkv.ranks import ONE_RANK, Ranks


def _attention_group() -> Any:
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    return get_attn_tp_group()


def is_first_rank() -> bool:
    """Whether this rank writes the trace and exports metrics, for those that share its requests."""
    return bool(_attention_group().rank_in_group == 0)


def reasons_of_ranks(reasons: list[str]) -> list[str]:
    """Every rank's reasons why it cannot evict: all of them can, or none.

    Ranks with other policies, or other versions of their packages, would not refuse the same
    requests.
    """
    group = all_ranks()
    if group.world_size == 1:
        return reasons
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, (reasons, installed.described()), group=group.cpu_group)
    of_ranks, policies = zip(*found, strict=True)
    if odd := {*chain(*policies)} - set.intersection(*map(set, policies)):
        of_ranks += ([f"policies that are not the same for every rank: {', '.join(sorted(odd))}"],)
    return [*dict.fromkeys(chain(*of_ranks))]


def joins_running_server() -> bool:
    """Whether this rank joins ranks that serve already (elastic expert parallelism): they gather
    nothing with it, and were refused or are unavailable themselves."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe.ep_join_mode is not None


def open_ranks(device: torch.device) -> Ranks:
    """Communicators of our own for the ranks that share their requests. All ranks call this at the
    same time, before the first request.

    On SGLang's communicators our gathers would come between those of a forward pass, in an order
    that two streams decide.
    """
    own, group = _attention_group(), all_ranks()
    if own.world_size == 1:
        return ONE_RANK
    # gloo would let the host wait for a GPU.
    backends = "gloo" if device.type == "cpu" else "nccl", "gloo"
    found = ONE_RANK
    for first in range(0, group.world_size, own.world_size):
        ranks = group.ranks[first : first + own.world_size]
        # torch opens each group on all ranks, in the same order
        tensors, votes = (dist.new_group(ranks, backend=name) for name in backends)
        if ranks == own.ranks:
            assert isinstance(tensors, dist.ProcessGroup) and isinstance(votes, dist.ProcessGroup)
            found = Ranks(tensors, votes)
    assert found.size == own.world_size, f"{own.ranks} are no attention group of {group.ranks}"
    found.gathered(torch.zeros(1, device=device))  # NCCL connects at the first
    return found
