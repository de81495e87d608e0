"""The three states of a server: ready, unavailable, refused.

Being installed is not being asked for. A server that nobody asked to evict starts and runs as it
would without this package, whatever its configuration; one that was asked and cannot, does not
start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_skipkv.config import brief

State = Literal["ready", "unavailable", "refused"]


@dataclass(frozen=True)
class Readiness:
    """Why eviction cannot run here (nothing if it can), and whether the operator asked for it."""

    reasons: tuple[str, ...]
    enabled: bool

    @property
    def state(self) -> State:
        if not self.reasons:
            return "ready"
        return "refused" if self.enabled else "unavailable"

    def message(self) -> str:
        """One line for the log, the error and the exit."""
        if not self.reasons:
            return "sgl_skipkv: ready"
        return f"sgl_skipkv: {self.state}: " + "; ".join(self.reasons)


class Unavailable(ValueError):
    """A request used one of our keys on a server that cannot evict. Becomes HTTP 400."""

    def __init__(self, field: str, got: object, readiness: Readiness) -> None:
        super().__init__(
            f"{field}: expected nothing, because this server cannot evict "
            f"({'; '.join(readiness.reasons)}), got {brief(got)}; choices: leave it out, or "
            "start the server in a supported configuration (see `skipkv doctor`)"
        )
