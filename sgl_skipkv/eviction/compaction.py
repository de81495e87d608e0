"""One compaction: what is decided before the row changes, and what comes back to the CPU after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels.on_device import copy_to_host


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


class Undo(NamedTuple):
    """What a request was before its last compaction, for as long as the freed slots hold their KV.

    That is until the next forward pass. With the overlap scheduler a step is still running while
    the row behind it is compacted; a request that is retracted right then has that step's token
    computed again, and it must see what it saw.

    Attributes:
        selection: of the entries before. freed: int64 [evicted], the slots of those that went.
        last, statistics, known_spared: of ``RequestState``, before.
    """

    selection: Selection
    freed: Tensor
    last: Snapshot | None
    statistics: dict[str, Tensor]
    known_spared: Tensor | None

    @property
    def evicted_tokens(self) -> int:
        return self.freed.shape[0]

    def slots(self, row: Tensor) -> Tensor:
        """int64 [row tokens before], the slots of the row that was; ``row`` is what it became."""
        kept, evicted = self.selection
        before = torch.empty(kept.shape[0] + evicted.shape[0], dtype=torch.int64, device=row.device)
        before[kept] = row[: kept.shape[0]].to(torch.int64)
        before[evicted] = self.freed
        return before


class Snapshot:
    """What a compaction kept, on its way to the CPU.

    Attributes:
        positions: int64 [kept], logical positions that stayed.
        read_back: whether the CPU has read them.
    """

    def __init__(
        self, plan: Plan, positions: Tensor, kept: Tensor, finite: Tensor, copied: Any
    ) -> None:
        self.positions = positions
        self.logical_tokens = plan.logical_tokens
        self.before = plan.row_tokens
        self.read_back = False
        self._kept, self._finite, self._copied = kept, finite, copied

    def read(self) -> tuple[list[int], bool]:
        """Kept positions and whether all scores were finite. Long since copied when called."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._kept.tolist(), bool(self._finite)


def take_snapshots(plans: Sequence[Plan], positions: Sequence[Tensor]) -> list[Snapshot]:
    """What requests that compacted together kept: two copies and one event for all of them.

    Args:
        positions: int64 [kept] each, logical positions that stayed.
    """
    flat = copy_to_host(torch.cat(list(positions)))
    kept = torch.split(flat, [one.shape[0] for one in positions])
    finite = copy_to_host(torch.stack([plan.finite for plan in plans])).unbind()
    device = positions[0].device
    copied = None if device.type == "cpu" else torch.Event(device)
    if copied is not None:
        copied.record()
    of_call = zip(plans, positions, kept, finite, strict=True)
    return [Snapshot(*one, copied) for one in of_call]
