"""The backup of a retracted request in host memory, from which its row is restored.

Recomputing its KV instead needs all of its tokens, which may be many times its budget and even
exceed the pool, and evicted tokens would be visible again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_skipkv.offload.host_memory import HostCopy


@dataclass(eq=False)
class Backup:
    """One request's KV and recordings in host memory, which is freed with this object.

    Attributes:
        kv: float [row_tokens, Hkv, d] each: keys and values of every layer, in row order. Behind
            them those of window layers with a pool of their own: of the row's last tokens.
        recorded: its recordings, by ``Recorder.save``; None for a request without a track.
    """

    kv: Sequence[HostCopy]
    recorded: Mapping[str, HostCopy] | None

    @property
    def row_tokens(self) -> int:
        return self.kv[0].shape[0]
