"""The check of agreement: whether all ranks of a tensor parallel server kept the same tokens.

Each plan's kept sets go into a checksum, which is gathered with the scores of the next plan and
compared on the device. The CPU reads the verdict when its copy has arrived. Ranks that disagree
hold KV caches that differ, so the server ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels.on_device import started_copy
from sgl_skipkv.ranks import RanksError

#: odd, so that a product modulo 2**64 loses nothing; as the signed numbers that torch has
_STEP, _TURN = 0x9E3779B97F4A7C15 - 2**64, 0xD1342543DE82EF95 - 2**64


class DisagreementError(RanksError):
    """The ranks kept different tokens."""


class Agreement:
    """The kept sets of one rank, and what the others said of theirs.

    Attributes:
        checksum: int64 [1], of all kept sets so far. It depends on their order.
    """

    def __init__(self, device: torch.device) -> None:
        self.checksum = torch.zeros(1, dtype=torch.int64, device=device)
        self._verdicts: list[tuple[Tensor, Any]] = []

    def stamp(self) -> Tensor:
        """float32 [2], to be gathered: bits, not a number."""
        return self.checksum.view(torch.float32)

    def compare(self, stamps: Tensor) -> None:
        """Compare the stamps of all ranks. stamps: float32 [ranks, NUMBERS]."""
        checksums = stamps.contiguous().view(torch.int64)
        self._verdicts.append(started_copy((checksums == checksums[0]).all()))

    def note(self, selections: Sequence[Selection]) -> None:
        """Add the kept sets of a plan."""
        kept = torch.cat([one.kept for one in selections])
        places = torch.arange(1, len(kept) + 1, device=kept.device).mul_(_STEP)
        places = places.bitwise_xor(places >> 31).mul_(_TURN)  # else swaps could cancel out
        self.checksum = (self.checksum + (kept + 1).mul_(places).sum()) * _TURN

    def check(self) -> None:
        """Raise if a verdict that has arrived says so.

        Raises:
            DisagreementError: some rank kept other tokens than another.
        """
        while self._verdicts:
            same, copied = self._verdicts[0]
            if copied is not None and not copied.query():
                return
            if not same:
                raise DisagreementError("the ranks kept different tokens: their KV caches differ")
            self._verdicts.pop(0)
