"""What a compaction kept, on its way to the CPU behind the decode steps that follow."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class LastCompaction(NamedTuple):
    """Read back at the request's next compaction, many steps later.

    Attributes:
        positions: int64 [kept], logical positions that stayed, on the device.
        row_tokens, logical_tokens: of the request before it.
        kept, finite: host copies of the positions, and whether every score was a number.
        copied: event behind those copies; None on a CPU.
    """

    positions: Tensor
    row_tokens: int
    logical_tokens: int
    kept: Tensor
    finite: Tensor
    copied: Any

    def read(self) -> tuple[list[int], bool]:
        """Kept positions and whether all scores were finite. Long since copied when called."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.kept.tolist(), bool(self.finite)
