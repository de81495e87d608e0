"""What a retracted call keeps in host memory, so that it comes back without a prefill of its trace.

A retraction takes a call's row away. Its KV could be computed again from all of its tokens, but the
trace of a call with a budget may be many times longer than what the call held, longer even than the
pool, and what was evicted before would be seen again. So what it held is copied out, and copied in
when there is room: the call goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_skipkv.host_memory import HostCopy
from sgl_skipkv.recorder import Recorded


@dataclass(eq=False)
class Backup:
    """One call's KV and what was recorded of it, in host memory.

    It takes that memory as long as it exists, however its call ends.

    Attributes:
        kv: float [row_tokens, Hkv, d] each: keys and values of every layer, in row order.
        recorded: what the recorder had of it; None where nothing is recorded for it.
    """

    kv: Sequence[HostCopy]
    recorded: Recorded | None

    @property
    def row_tokens(self) -> int:
        return self.kv[0].shape[0]
