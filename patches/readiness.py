"""The three states of a server: ready, unavailable, refused.

If eviction is enabled at start but unsupported, startup fails. If it is not enabled, the server
starts and runs as without this package, whatever its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_skipkv.config import brief

State = Literal["ready", "unavailable", "refused"]


@dataclass(frozen=True)
class Readiness:
    """Why eviction cannot run (empty if it can), and whether the operator enabled it."""

    reasons: tuple[str, ...]
    enabled: bool

    @property
    def state(self) -> State:
        if not self.reasons:
            return "ready"
        return "refused" if self.enabled else "unavailable"

    def message(self) -> str:
        """One line for the log, the error response and the exit message."""
        if not self.reasons:
            return "sgl_skipkv: ready"
        return f"sgl_skipkv: {self.state}: " + "; ".join(self.reasons)


class Unavailable(ValueError):
    """A request carries one of the plugin's keys to a server that cannot evict: HTTP 400."""

    def __init__(self, field: str, got: object, readiness: Readiness) -> None:
        super().__init__(
            f"{field}: expected nothing, because this server cannot evict "
            f"({'; '.join(readiness.reasons)}), got {brief(got)}; choices: leave it out, or "
            "start the server in a supported configuration (see `skipkv doctor`)"
        )
