"""What a retracted request keeps in host memory, so that it comes back without a prefill of its
trace.

A retraction takes a request's row away. Its KV could be computed again from all of its tokens, but
the trace of a request with a budget may be many times longer than what the request held, longer
even than the pool, and what was evicted before would be seen again. So what it held is copied out,
and copied in
when there is room: the request goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_skipkv.offload.host_memory import HostCopy


class Recorded(NamedTuple):
    """What was recorded of one request, in host memory, while it has no track.

    Attributes:
        sentences: its part of the sentence table, by name. queries: its ring.
    """

    sentences: Mapping[str, HostCopy]
    queries: HostCopy


@dataclass(eq=False)
class Backup:
    """One request's KV and what was recorded of it, in host memory.

    It takes that memory as long as it exists, however its request ends.

    Attributes:
        kv: float [row_tokens, Hkv, d] each: keys and values of every layer, in row order.
        recorded: what the recorder had of it; None where nothing is recorded for it.
    """

    kv: Sequence[HostCopy]
    recorded: Recorded | None

    @property
    def row_tokens(self) -> int:
        return self.kv[0].shape[0]
