"""A debug mode (``poison_evicted``): the KV of evicted slots becomes NaN.

Nobody may read a slot that nobody owns. In ordinary life a wrong read there goes unnoticed, since
old KV looks like any other; with NaN whatever reads it says NaN too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FLOAT8_NAN = 0x7F  # of float8, which SGLang keeps as bytes


class Poison:
    """Slots that were freed and are not poisoned yet.

    Until the next forward pass or restored row their KV can still be asked for: a request that is
    retracted right after its compaction takes it back (``Runtime.undo``).
    """

    def __init__(self) -> None:
        self._freed: list[Tensor] = []

    def mark(self, slots: Tensor) -> None:
        """int64 [n], slots that an eviction has freed."""
        self._freed.append(slots)

    def apply(self, buffers: Sequence[Tensor]) -> None:
        """Before anything is written to slots that were handed out since.

        Args:
            buffers: keys and values of every layer, [slots, Hkv, d] each (changed in place).
        """
        if not self._freed:
            return
        if self._freed[0].is_cuda:
            for one in self._freed:  # of the schedule stream, and this may be the forward stream
                one.record_stream(torch.cuda.current_stream())
        slots, self._freed = torch.cat(self._freed), []
        for buffer in buffers:
            buffer[slots] = float("nan") if buffer.is_floating_point() else _FLOAT8_NAN
