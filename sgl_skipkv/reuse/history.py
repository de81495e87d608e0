"""What a request leaves at its end: where its row is in the radix tree, and what eviction knows.

The radix tree wants one key per slot. The first prompt keeps its token ids, so other requests share
it. Behind an eviction a token id would be a lie: a slot there has seen only what was kept. So each
of these slots gets a private key that no token id can equal. Text that a later turn adds is keyed
by its token ids again, below the private keys, so the branches of one conversation share it.
Where keys name the next token, too (EAGLE), tokens behind the last eviction already have their ids.

The tree has whole pages only. A row that ends within a page is filed with the rest of that page
under private keys of its own, though no token is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile

from torch import Tensor

from sgl_skipkv.offload.host_memory import HostCopy
from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.request.parts import Redundancy

#: of a history without tokens; of two Python integers in a tuple; of a place in a tuple and its
#: integer; of a character, with that of the UTF-8 copy that Python keeps once it has made one
_OBJECT_BYTES, _SPAN_BYTES, _INDEX_BYTES, _CHARACTER_BYTES = 1024, 120, 40, 8
#: how many sets of private keys there are before the first one comes again
_LINEAGES = 1 << 30
#: the first private key
_PRIVATE = 1 << 62
_lineages = count()


def private_keys(slots: int) -> array[int]:
    """New keys for the radix tree, one per slot; no token id equals one, and no key of the 2^30
    earlier sets."""
    if not slots:
        return array("q")
    first = _PRIVATE | next(_lineages) % _LINEAGES << 32
    return array("q", range(first, first + slots))


@dataclass(frozen=True)
class Recordings:
    """What planning knows about the generated tokens of a history (``kv_reuse: "budget"``).

    Attributes:
        closed: spans of its closed sentences, from its first prompt on.
        input_spans: logical spans of what users and tools wrote behind its first prompt, ascending.
        live: indices of those that are not known to be evicted.
        table: sentence index of each entry of the sentence table.
        redundancy: of its sentences at its last compaction; None: there was none.
        recorded: query ring and sentence table in host memory; None: its policy uses neither.
        recorded_tokens: logical tokens whose queries may be in the ring: those of its own history
            included that its prompt left out.
        statistics: of the policy, name -> one value per row entry that has a statistic.
        followed_tokens: logical tokens whose queries the statistics include; 0: it has none.
        compactions: of the whole conversation.
    """

    closed: Sequence[tuple[int, int]]
    input_spans: Sequence[tuple[int, int]]
    live: Sequence[int]
    table: Sequence[int]
    redundancy: Redundancy | None
    recorded: Mapping[str, HostCopy] | None
    recorded_tokens: int
    statistics: Mapping[str, Tensor]
    followed_tokens: int
    compactions: int


@dataclass(frozen=True, eq=False)
class History:
    """A row that a finished request left in the radix tree.

    Attributes:
        rid: of that request.
        namespace: of the requests that may continue it.
        tokens: the tokens of prompt and output that have KV or had it, in order.
        sent: the same as the next prompt has them, without thoughts that were dropped; ``tokens``
            itself if none were.
        key: the radix tree's key of each row entry; none once its KV is known to be gone.
        padding: keys of the slots behind the row in its last page.
        boundary_tokens: that a key names behind its entry's own.
        own_prompt_tokens: length of the prompt that the request came with.
        edge_tokens: of these, how many at its end the next prompt may have otherwise.
        prompt_tokens: length of the prompt of its conversation's first request.
        last: the last compaction; None: nothing is evicted.
        recordings: None unless the history counts against the budget of the next turn.
    """

    rid: str
    namespace: Hashable
    tokens: array[int]
    sent: array[int]
    key: array[int]
    own_prompt_tokens: int
    edge_tokens: int
    prompt_tokens: int
    last: LastCompaction | None
    recordings: Recordings | None
    padding: array[int] = field(default_factory=lambda: array("q"))
    boundary_tokens: int = 0

    @property
    def has_kv(self) -> bool:
        """Whether the radix tree may have it."""
        return bool(self.key)

    def without_kv(self) -> History | None:
        """What it says once its KV is gone: where its conversation begins, and who wrote what.
        None if that does not count."""
        if self.recordings is None:
            return None
        known = replace(
            self.recordings,
            closed=(),
            live=(),
            table=(),
            redundancy=None,
            recorded=None,
            statistics={},
        )
        last, nothing = self.last and self.last.without_tokens(), array("q")
        return replace(self, key=nothing, padding=nothing, last=last, recordings=known)

    @property
    def evicted_tokens(self) -> int:
        return len(self.tokens) - len(self.key)

    @property
    def pages(self) -> array[int]:
        """Keys of the row's pages, the last one whole."""
        return self.key + self.padding

    @property
    def sent_prompt_tokens(self) -> int:
        """How many tokens of its request's prompt every next prompt begins with."""
        return self.own_prompt_tokens - self.edge_tokens

    @property
    def unsent_tokens(self) -> int:
        """Tokens that the next prompt does not have. All are in front of ``first_cut``."""
        return len(self.tokens) - len(self.sent)

    @cached_property
    def first_cut(self) -> int:
        """Logical length from which on the row is contiguous, so that its end may be left out.
        Where that is computed again, its key must be its id."""
        compacted = self.own_prompt_tokens if self.last is None else self.last.logical_tokens
        if self.boundary_tokens and self.has_kv:
            by_id = sum(1 for _ in takewhile(_PRIVATE.__gt__, reversed(self.key)))
            if by_id < len(self.key):
                compacted = max(compacted, len(self.tokens) - by_id + self.boundary_tokens)
        if self.recordings is None:
            return compacted
        return max(compacted, self.recordings.followed_tokens, self.prompt_tokens)

    @property
    def recorded_bytes(self) -> int:
        """Host memory of its recordings."""
        recorded = None if self.recordings is None else self.recordings.recorded
        return sum(one.nbytes for one in (recorded or {}).values())

    @property
    def nbytes(self) -> int:
        """Memory that it uses beside its KV, what a client chose the length of included."""
        sent = 0 if self.sent is self.tokens else len(self.sent)
        total = self.tokens.itemsize * (len(self.tokens) + sent + len(self.key) + len(self.padding))
        total += _OBJECT_BYTES + self.recorded_bytes + _CHARACTER_BYTES * len(self.rid)
        if isinstance(self.namespace, tuple):
            names = [part for part in self.namespace if isinstance(part, str)]
            total += _CHARACTER_BYTES * sum(map(len, names))
        if self.last is not None:
            total += self.last.positions.nbytes + self.last.kept.nbytes
        if self.recordings is not None:
            known = self.recordings
            total += sum(one.nbytes for one in known.statistics.values())
            total += _SPAN_BYTES * (len(known.closed) + len(known.input_spans))
            total += _INDEX_BYTES * (len(known.live) + len(known.table))
            if known.redundancy is not None:
                total += _INDEX_BYTES * len(known.redundancy.sentences)
                total += known.redundancy.values.nbytes
        return total
