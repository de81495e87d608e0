"""VaSE (arXiv 2606.03928): values of a large range stay, of the others those that chance draws.

Of the tokens that a compaction may choose, the share ``large`` goes to those whose values have the
largest range, ``max_j v_ij - min_j v_ij``. The rest is drawn without replacement in proportion to
attention ``a``: of the last ``window`` queries, softmax over the candidates, the mean over queries,
an average pool, the mean over query heads. As scores this is Gumbel's trick, the same law: the
highest of ``log a_i - log(-log u_i)``, ``u`` uniform, drawn anew at each compaction from the prompt
and the compaction alone, so a request keeps the same set in any batch. Candidates are the tokens
that are not protected; in a model with sliding windows ``a`` is also of those which its windows
protect.

Deviations: one set for all layers and heads. So ranges, which differ from head to head, are divided
by the mean of their layer's and KV head's candidates, the largest of them counts, and ``a`` is the
mean over layers as well. Ranges are compared in steps of 1/2048 of that mean: tokens with the same
id have the same values in the first layer, and the later one wins, not the one that was rounded up.
Compactions every ``interval`` tokens with ``window`` 8, where the paper has 64 for both (a server
with ``query_window: 64``). ``large`` is a share of what may be chosen; the paper has 256 of 1,024
tokens, sinks and window included.

A range is computed from the cached value at each compaction instead of once: to read the values of
a row once costs a part in ``2 * interval`` of what its decode steps read in between, and nothing
needs to be carried, backed up or restored. Plain torch on every device, one gather per layer for
all requests: operations grow with the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from sgl_skipkv.kernels.on_device import device_tensor, device_tensors, to_device
from sgl_skipkv.kernels.reference import selector_attention
from sgl_skipkv.policy.base import JointPolicy, PolicyParams, PoolWidth
from sgl_skipkv.policy.inputs.batched_scores import pooled_attention
from sgl_skipkv.policy.inputs.joined_requests import a_zero, joined_tokens, owners, unpadded
from sgl_skipkv.policy.inputs.score_input import ScoreInput

#: of a range in fixed point; ranges up to 2**16 of 2**17 tokens can be added
_ONE = 2.0**30
#: in which ranges are compared, of a head's mean
_STEPS = 2048
#: above every score of a drawn token: ``log a`` is at most log W, Gumbel's noise at most 37
_LARGE = 1e3
_TINY = float(torch.finfo(torch.float32).tiny)


class VaSEParams(PolicyParams):
    large: float = Field(
        0.25, ge=0.0, le=1.0, description="share of what is chosen for values of a large range"
    )
    kernel: PoolWidth = Field(5, description="width of the average pool in tokens, odd")


class VaSE(JointPolicy):
    name = "vase"
    keeps = "values of a large range, and a draw in proportion to attention"
    source = "VaSE, arXiv 2606.03928"
    Params: ClassVar[type[PolicyParams]] = VaSEParams
    needs_queries = True
    joins_layers = 1
    over_ranks = "max"  # equal: both parts are combined before they become one score
    params: VaSEParams

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        """Of candidates; protected tokens score 0. Where keys and values lie in pages, from one
        replay, and one gather of values per layer."""
        spans, window = [*map(self.candidates, requests)], self.params.window
        counts, zero = [stop - first for first, stop in spans], a_zero(requests)
        if any(request.location is None for request in requests):
            owner = owners(counts, requests[0].positions.device)
            parts = [
                self._parts(request, *span) for request, span in zip(requests, spans, strict=True)
            ]
            ranges, attended = (torch.cat(part) for part in zip(*parts, strict=True))
        else:
            tokens, owner = joined_tokens(requests, spans)
            layers = range(requests[0].layers)
            ranges = largest_range(map(tokens.values, layers), owner, counts)
            kernel, behind = self.params.kernel, self.pinned_tail_tokens - window
            columns = [(first, stop + behind) for first, stop in spans]
            pooled = pooled_attention(requests, columns, zero, window=window, kernel=kernel)
            attended = torch.cat([part[:count] for part, count in zip(pooled, counts, strict=True)])
        ranks = requests[0].ranks
        ranges, attended = ranks.maximum(ranges), ranks.mean(attended)
        scores = self._scores(requests, spans, ranges, owner, attended)
        return unpadded(torch.split(scores, counts), spans, requests, zero)

    def gathers(self, prompt_tokens: Sequence[int], row_tokens: Sequence[int]) -> list[int]:
        spans = [self.span(*lengths) for lengths in zip(prompt_tokens, row_tokens, strict=True)]
        return [sum(stop - first for first, stop in spans)] * 2

    def _parts(self, inputs: ScoreInput, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """int64 and float32 [candidates]: ranges and ``a`` of this rank's heads."""
        owner = torch.zeros_like(inputs.positions[first:stop])
        layers = (inputs.values(layer)[first:stop] for layer in range(inputs.layers))
        ranges = largest_range(layers, owner, [stop - first])
        kernel, scale = self.params.kernel, inputs.scale
        attention = partial(selector_attention, first=first, kernel=kernel, scale=scale)
        return ranges, inputs.mean_over_layers(attention)[: stop - first]

    def _scores(
        self,
        requests: Sequence[ScoreInput],
        spans: Sequence[tuple[int, int]],
        ranges: Tensor,
        owner: Tensor,
        attended: Tensor,
    ) -> Tensor:
        """float32 [candidates of all requests]."""
        counts = [stop - first for first, stop in spans]
        kept = [
            request.keep_tokens - first - self.pinned_tail_tokens
            for request, (first, _) in zip(requests, spans, strict=True)
        ]
        from_rank = [
            stop - int(self.params.large * most)
            for stop, most in zip(accumulate(counts), kept, strict=True)
        ]
        (least,) = device_tensors([from_rank], ranges.device)
        # Request by request, ascending. Of equals the later one ranks higher.
        order = torch.add(ranges, owner, alpha=1 << 32).sort(stable=True).indices
        rank = order.argsort()
        draws = to_device(_gumbel(requests, counts), ranges.device)
        scores = attended.clamp_min(_TINY).log() + draws
        return torch.where(rank >= least[owner], scores + _LARGE, scores)


def largest_range(layers: Iterable[Tensor], owner: Tensor, counts: Sequence[int]) -> Tensor:
    """int64 [n], range of each token's values in steps of its request's mean: the largest of all
    layers and KV heads.

    Args:
        layers: float [n, Hkv, d] each. A layer is gone when the next one is taken: together they
            may be many times what a compaction is allowed to take.
        owner: int64 [n], whose token each is. counts: tokens of each request.
    """
    spread = torch.cat([*map(_range, layers)], dim=1)
    # In fixed point, so that neither the order of the sum nor the batch changes a bit.
    fixed = (spread * _ONE).long()
    total = fixed.new_zeros(len(counts), fixed.shape[1]).index_add_(0, owner, fixed)
    steps = device_tensor([_STEPS * count for count in counts], fixed.device)
    step = total.div_(steps[:, None], rounding_mode="floor").clamp_min_(1)
    return fixed.div_(step[owner], rounding_mode="floor").amax(dim=1)


def _range(values: Tensor) -> Tensor:
    """float32 [n, Hkv] of float [n, Hkv, d]."""
    least, most = values.aminmax(dim=-1)
    return most.float() - least.float()


def _gumbel(requests: Sequence[ScoreInput], counts: Sequence[int]) -> Tensor:
    """float32 [candidates of all requests]. On the CPU, so that every device draws the same; in
    numpy, because a draw in torch would be one operation more per request."""
    uniform = np.concatenate(
        [
            np.random.Generator(np.random.PCG64(request.seed)).random(count)
            for request, count in zip(requests, counts, strict=True)
        ]
    )
    noise = -np.log(-np.log(np.maximum(uniform, 2.0**-54)))
    return torch.from_numpy(noise.astype(np.float32))
