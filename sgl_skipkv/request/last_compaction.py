"""The result of a request's last compaction, copied to the CPU asynchronously."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class LastCompaction(NamedTuple):
    """Read back a few steps later.

    Attributes:
        positions: int64 [kept], kept logical positions, on the device.
        row_tokens, logical_tokens: of the request before the compaction.
        kept, finite: host copies of the positions and of whether every score was finite.
        copied: event recorded after those copies; None on a CPU.
        written_tokens: a host copy of ``Due.written_tokens``.
    """

    positions: Tensor
    row_tokens: int
    logical_tokens: int
    kept: Tensor
    finite: Tensor
    copied: Any
    written_tokens: Tensor | None = None

    @property
    def running_tokens(self) -> int:
        """Of the step that was running: these have seen what was evicted. Once it was read."""
        written = self.written_tokens
        return 0 if written is None else int(written) - self.row_tokens

    def beside_no_step(self) -> LastCompaction:
        """This compaction as if no step had been running."""
        written = self.written_tokens
        if written is None:
            return self
        return self._replace(written_tokens=torch.full_like(written, self.row_tokens))

    def cut_back(self, logical_tokens: int) -> LastCompaction:
        """This compaction as if it had come at this length. It evicted nothing behind that."""
        behind = self.logical_tokens - logical_tokens
        kept = len(self.kept) - behind
        return self._replace(
            positions=self.positions[:kept],
            row_tokens=self.row_tokens - behind,
            logical_tokens=logical_tokens,
            kept=self.kept[:kept],
        )

    def with_own_memory(self) -> LastCompaction:
        """The same, once it was read, in memory of its own: until then it has a part of what is of
        all requests that were compacted together."""
        own = {name: getattr(self, name) for name in ("positions", "kept", "finite")}
        if self.written_tokens is not None:
            own["written_tokens"] = self.written_tokens
        return self._replace(**{name: one.clone() for name, one in own.items()}, copied=None)

    def without_tokens(self) -> LastCompaction:
        """When it came, without what it kept."""
        return self._replace(positions=self.positions[:0].clone(), kept=self.kept[:0].clone())

    def read(self) -> tuple[list[int], bool]:
        """Kept positions and whether all scores were finite; the copies have usually finished."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.kept.tolist(), bool(self.finite)
