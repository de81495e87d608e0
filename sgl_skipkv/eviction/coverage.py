"""How many tokens a request needs: the fewest with ``coverage`` of its last queries' attention.

The attention is that of the last ``window`` queries to the row, the mean over heads, layers and
queries. It exists for every policy, from what is recorded anyway or is recorded for this alone. A
pinned prompt stays whatever it receives, so only what the other tokens receive counts: else its
sinks would reach the share alone.

The mean, not the union of what each query or head needs: one set of tokens serves all of them, and
the mean is the share of their attention that this set keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sgl_skipkv.eviction.due import Due
from sgl_skipkv.eviction.replay import attention_of_ranks
from sgl_skipkv.kernels.on_device import device_tensor, device_tensors, started_copy
from sgl_skipkv.ranks import Ranks
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.request.demand import UNKNOWN, Demand

#: of one query's attention; whole numbers add up to the same in any order, so in any batch
_UNITS = 2**32


def measure_demand(
    requests: Sequence[Due], recorder: Recorder, *, scale: float, ranks: Ranks
) -> None:
    """Set the requests' demands, which the CPU reads a few steps later. If one of several ranks
    fails, they are ``UNKNOWN`` on all of them."""
    params = [one.state.settings.policy.params for one in requests]
    steps = [one.window for one in params]
    attention = attention_of_ranks(requests, steps, recorder, scale, "mean", ranks)
    pinned = [
        one.state.prompt_row_tokens if own.protect_prompt else 0
        for one, own in zip(requests, params, strict=True)
    ]
    row_tokens = [one.row_tokens for one in requests]
    needed = needed_tokens(attention, row_tokens, pinned, [one.coverage for one in params])
    if ranks.size > 1:
        needed = needed.masked_fill(attention.isnan().any(), UNKNOWN)
    counts, copied = started_copy(needed)
    for one, count in zip(requests, counts.unbind(), strict=True):
        one.state.kv.demand = Demand(one.logical_tokens, count, copied)


def needed_tokens(
    attention: Tensor, row_tokens: Sequence[int], pinned: Sequence[int], coverage: Sequence[float]
) -> Tensor:
    """int64 [requests], the first ``pinned`` entries and the fewest others that reach the coverage.

    Args:
        attention: float32 [steps, tokens of all requests]; 0 in the rows of steps that a request
            has not got.
    """
    device, tokens = attention.device, attention.shape[1]
    mass = (attention.double() * _UNITS).round().long().sum(dim=0)
    lengths, starts, firsts = device_tensors(
        [row_tokens, [0, *accumulate(row_tokens)][:-1], pinned], device
    )
    requests = torch.arange(len(row_tokens), device=device)
    owner = requests.repeat_interleave(lengths, output_size=tokens)
    counts = torch.arange(tokens, device=device) >= (starts + firsts)[owner]
    # Of each request the largest first, without a matrix as wide as the longest row.
    order = (mass * counts).sort(descending=True).indices
    order = order[owner[order].sort(stable=True).indices]
    sums = (mass * counts)[order].cumsum(dim=0)
    before = torch.cat([sums.new_zeros(1), sums])
    reached = sums - before[starts][owner]
    total = before[starts + lengths] - before[starts]
    wanted = (total * device_tensor(coverage, device, torch.float64)).ceil()
    short = (reached < wanted[owner]).long()
    return firsts + 1 + torch.zeros_like(total).index_add_(0, owner, short)
