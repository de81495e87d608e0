"""The backup of a retracted request in host memory, from which its row is restored.

A retracted request loses its row. Recomputing its KV needs all of its tokens, which may be many
times its budget and even exceed the pool, and evicted tokens would be visible again. So its KV and
recordings are copied to host memory and copied back when the request is scheduled again. It then
continues with the same tokens as without the retraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_skipkv.offload.host_memory import HostCopy


class Recorded(NamedTuple):
    """The recordings of one request in host memory, while it has no track.

    Attributes:
        sentences: its rows of the sentence table, by name.
        queries: its ring of recent queries.
    """

    sentences: Mapping[str, HostCopy]
    queries: HostCopy


@dataclass(eq=False)
class Backup:
    """One request's KV and recordings in host memory, which is freed with this object.

    Attributes:
        kv: float [row_tokens, Hkv, d] each: keys and values of every layer, in row order.
        recorded: its recordings; None for a request without a track.
    """

    kv: Sequence[HostCopy]
    recorded: Recorded | None

    @property
    def row_tokens(self) -> int:
        return self.kv[0].shape[0]
