"""A request whose compaction or whose replay is due, as planning sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from sgl_skipkv.policy.base import Policy, PolicyParams
from sgl_skipkv.policy.inputs.paged_cache import KeyLocation, PagedCache
from sgl_skipkv.request.state import RequestState


class Due(NamedTuple):
    """A request whose compaction is due.

    Attributes:
        row_tokens: entries of its row in use.
        output_ids: token ids behind the uncounted ones; at least those with KV in the row.
        keys, values: layer -> float [row_tokens, Hkv, d], what is cached, in row order.
        cache: where they lie, for kernels that read them in place; None where none run.
        tail_slots: of its row, behind ``row_tokens``: drafts are written to them (speculative
            decoding).
        written_tokens: int64 [], entries that have a token once the running step has ended; None:
            ``row_tokens``.
    """

    state: RequestState
    row_tokens: int
    output_ids: Sequence[int]
    keys: Callable[[int], Tensor]
    values: Callable[[int], Tensor]
    cache: PagedCache | None = None
    tail_slots: int = 0
    written_tokens: Tensor | None = None

    @property
    def logical_tokens(self) -> int:
        """Cached and evicted."""
        return self.row_tokens + self.state.kv.evicted_tokens

    @property
    def generated_ids(self) -> Sequence[int]:
        """Those of ``output_ids`` that have KV in the row or had it."""
        return self.output_ids[: self.logical_tokens - self.state.prompt.uncounted_tokens]

    def location(self, ring: Tensor | None) -> KeyLocation:
        """For kernels. ring: as ``KeyLocation`` has it."""
        assert self.cache is not None
        row, track_id = self.state.row, self.state.held.track_id
        return KeyLocation(self.cache, row, ring, track_id, self.logical_tokens - 1)


def by_policy(requests: Sequence[Due]) -> list[list[int]]:
    """Indices of the requests, those with the same policy and parameters together."""
    alike: defaultdict[tuple[type[Policy], PolicyParams], list[int]] = defaultdict(list)
    for i, due in enumerate(requests):
        policy = due.state.settings.policy
        alike[type(policy), policy.params].append(i)
    return list(alike.values())
