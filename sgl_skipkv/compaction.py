"""One compaction: what is decided before the row changes, and what comes back to the CPU after."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.select import Selection


class Plan(NamedTuple):
    """A compaction that is decided and not yet done."""

    selection: Selection
    positions: Tensor
    finite: Tensor
    row_tokens: int
    logical_tokens: int

    @property
    def evicted_tokens(self) -> int:
        return self.selection.evicted.shape[0]


class Snapshot:
    """What a compaction kept, on its way to the CPU."""

    def __init__(self, plan: Plan) -> None:
        self.positions = plan.positions
        self.logical_tokens = plan.logical_tokens
        self.before = plan.row_tokens
        self.settled = False
        self._kept, self._finite = _copy_to_host(plan.positions), _copy_to_host(plan.finite)
        on_cpu = plan.positions.device.type == "cpu"
        self._copied = None if on_cpu else torch.Event(plan.positions.device)
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
