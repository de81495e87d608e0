"""How many tokens of a row the last queries need, copied to the CPU asynchronously."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from torch import Tensor

#: tokens between a measurement and the compaction that follows it: the copy has arrived. With
#: speculative decoding they may be those of one step, and the CPU may wait; the next step is queued
AHEAD_TOKENS: Final = 4
#: count of a measurement in which a rank failed
UNKNOWN: Final = -1


@dataclass(frozen=True, eq=False)
class Demand:
    """Read ``AHEAD_TOKENS`` tokens after it was measured.

    Attributes:
        logical_tokens: of the request when it was measured.
        count: int64 [], host copy of how many entries of the row are needed, a pinned prompt
            included.
        copied: event recorded after that copy; None on a CPU.
    """

    logical_tokens: int
    count: Tensor
    copied: Any

    @cached_property
    def measured_row_tokens(self) -> int:
        """Entries of the row that are needed; the copy has usually finished."""
        if self.copied is not None:
            self.copied.synchronize()
        return int(self.count)

    def row_tokens(self, logical_tokens: int) -> int:
        """Row entries needed at this length: those that were measured, and all newer tokens."""
        return self.measured_row_tokens + logical_tokens - self.logical_tokens
