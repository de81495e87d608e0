"""What a retracted call keeps in host memory, so that it comes back without a prefill of its trace.

A retraction takes a call's row away. Its KV could be computed again from all of its tokens, but the
trace of a call with a budget may be many times longer than what the call held, longer even than the
pool, and what was evicted before would be seen again. So what it held is copied out, and copied in
when there is room: the call goes on as if nothing had happened.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sgl_skipkv.recorder import Recorded


@dataclass(eq=False)
class Backup:
    """One call's KV and what was recorded of it, in host memory.

    Attributes:
        kv: float [row_tokens, Hkv, d] each: keys and values of every layer, in row order.
        recorded: what the recorder had of it; None where nothing is recorded for it.
    """

    kv: Sequence[Tensor]
    recorded: Recorded | None

    @property
    def row_tokens(self) -> int:
        return self.kv[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        recorded = 0 if self.recorded is None else self.recorded.nbytes
        return recorded + sum(tensor.nbytes for tensor in self.kv)


class HostMemory:
    """The bound on what all backups together may take.

    A backup counts as long as it exists, however its call ends.

    Args:
        limit_bytes: of all backups together; with 0 nothing is ever backed up.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._backups: weakref.WeakSet[Backup] = weakref.WeakSet()

    @property
    def used_bytes(self) -> int:
        """What the backups of all retracted calls take now."""
        return sum(backup.nbytes for backup in self._backups)

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for one more of this size."""
        return self.used_bytes + nbytes <= self.limit_bytes

    def add(self, backup: Backup) -> None:
        """Count it from now on."""
        self._backups.add(backup)
