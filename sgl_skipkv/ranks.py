"""What the ranks that share a request combine: each caches the KV of some of the heads.

Every rank must keep the same tokens: otherwise a request's KV cache differs from rank to rank, and
no error would say so. So what depends on heads is gathered. A gather moves bits, and every rank
combines the same bits in the order of the ranks; a reduction may add them up differently on each.

A gather waits for every rank. So a rank whose work fails still takes part: work promises its
gathers before it begins, and a rank that fails sends NaN for those that are left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_skipkv.error_boundary import FatalError

# The second is its older name, the only one in torch 2.11.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RanksError(FatalError, RuntimeError):
    """The ranks cannot act as one any more, so the server must end."""


class Ranks:
    """The ranks that share a request, as one of them sees them. Without a group it is alone, and
    what it combines is returned as it is.

    Args:
        group: for device tensors, on the current stream. Nobody else may use it, because its
            gathers must have the same order on every rank.
        votes: for the CPU.

    Attributes:
        size: how many ranks there are.
        index: of this one.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, votes: dist.ProcessGroup | None = None
    ) -> None:
        self._group, self._votes = group, votes
        self.size = 1 if group is None else group.size()
        self.index = 0 if group is None else group.rank()
        self._promised: deque[int] | None = None

    def gathered(self, part: Tensor) -> Tensor:
        """float32 [ranks, *part.shape], the same bits on every rank. part: float32, of one shape
        on all of them."""
        if self.size == 1:
            return part[None]
        if self._promised is not None:
            assert self._promised and self._promised[0] == part.numel(), (
                f"gathers as promised: {list(self._promised)}, got {part.numel()}"
            )
            self._promised.popleft()
        parts = part.new_empty(self.size, *part.shape)
        if part.numel():
            try:
                _all_gather(parts.view(-1), part.contiguous().view(-1), group=self._group)
            except RuntimeError as error:
                raise RanksError(f"a gather over {self.size} ranks failed: {error}") from error
        return parts

    def summed(self, part: Tensor) -> Tensor:
        """As ``part``, added up in the order of the ranks."""
        return part if self.size == 1 else _in_order(self.gathered(part))

    def mean(self, part: Tensor) -> Tensor:
        """As ``part``. Ranks have equally many heads, so it is the mean over all heads if each
        part is one over the rank's own."""
        return part if self.size == 1 else mean_of(self.gathered(part))

    def maximum(self, part: Tensor) -> Tensor:
        """As ``part``; a NaN of any rank stays. part: of whole numbers below 2**24 or float32."""
        if self.size == 1:
            return part
        return self.gathered(part.float()).amax(dim=0).to(part.dtype)

    def own(self, heads: Tensor) -> Tensor:
        """This rank's part of a tensor [..., KV heads of all ranks]."""
        return heads.chunk(self.size, dim=-1)[self.index]

    @contextmanager
    def promised(self, sizes: Sequence[int], device: torch.device) -> Iterator[None]:
        """Within it every rank gathers tensors of these sizes, and nothing else. If it raises, NaN
        takes the place of those that are left, so that no other rank waits for this one.

        Args:
            sizes: numbers of each gather, from counts that are the same on every rank.
        """
        if self.size == 1:
            yield
            return
        left, completed = deque(sizes), False
        self._promised = left
        try:
            yield
            completed = True
        finally:
            if not completed:
                self._send_nan(left, device)
            self._promised = None
        if left:
            raise RanksError(f"gathers as promised: {list(left)} are missing")

    def _send_nan(self, left: deque[int], device: torch.device) -> None:
        try:
            while left:
                self.gathered(torch.full((left[0],), torch.nan, device=device))
        except (RuntimeError, AssertionError) as error:
            raise RanksError(f"a rank that failed cannot tell the others: {error}") from error

    def any(self, mine: bool) -> bool:
        """Whether it is true on any rank. The CPU waits for the other ranks: not for what happens
        at every step."""
        if self.size == 1:
            return mine
        vote = torch.tensor([mine], dtype=torch.int32)
        try:
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._votes)
        except RuntimeError as error:
            raise RanksError(f"a vote of {self.size} ranks failed: {error}") from error
        return bool(vote)


def mean_of(gathered: Tensor) -> Tensor:
    """The mean over the ranks. gathered: float32 [ranks, ...]."""
    return _in_order(gathered).div_(len(gathered))


def _in_order(gathered: Tensor) -> Tensor:
    return reduce(torch.add, gathered.unbind())


#: where nobody shares a request: without tensor parallelism, and in an attention group of one
ONE_RANK: Final = Ranks()
