"""One compaction: what is decided before the row changes, and what comes back to the CPU after."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.select import Selection


class Plan(NamedTuple):
    """A compaction that is decided and not yet done.

    Attributes:
        positions: int64 [row tokens], logical positions before it.
        finite: bool [], whether every score was a number.
        spared: as in ``ScoreInput``, for the next compaction; None where no kernel found it.
    """

    selection: Selection
    positions: Tensor
    finite: Tensor
    row_tokens: int
    logical_tokens: int
    spared: Tensor | None = None

    @property
    def evicted_tokens(self) -> int:
        return self.selection.evicted.shape[0]


class Snapshot:
    """What a compaction kept, on its way to the CPU.

    Args:
        positions: int64 [kept], logical positions that stayed.
    """

    def __init__(self, plan: Plan, positions: Tensor) -> None:
        self.positions = positions
        self.logical_tokens = plan.logical_tokens
        self.before = plan.row_tokens
        self.settled = False
        self._kept, self._finite = _copy_to_host(positions), _copy_to_host(plan.finite)
        on_cpu = positions.device.type == "cpu"
        self._copied = None if on_cpu else torch.Event(positions.device)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> tuple[list[int], bool]:
        """Kept positions and whether all scores were finite. Long since copied when called."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._kept.tolist(), bool(self._finite)


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy that does not wait; only pinned memory takes one."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
