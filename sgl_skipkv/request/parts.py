"""What is known of one request with a KV budget or steering, part by part."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.offload.host_memory import HostCopy
from sgl_skipkv.recording.sentences import SentenceTracker
from sgl_skipkv.request.demand import Demand
from sgl_skipkv.request.last_compaction import LastCompaction


@dataclass
class Prompt:
    """The request's prompt.

    Attributes:
        sent_tokens: its length as it came.
        tokens: its logical length: with the thoughts that were dropped from the history that the
            request continues.
        uncounted_tokens: of these, how many do not count as generated: all, or with ``kv_reuse:
            "budget"`` the prompt of the conversation's first request.
        earlier_compactions: of the history that counts as generated.
        seed: its checksum, used as a random seed.
    """

    sent_tokens: int
    tokens: int
    uncounted_tokens: int
    seed: int
    earlier_compactions: int = 0

    @classmethod
    def of(cls, ids: Sequence[int]) -> Prompt:
        """Of a request that continues nothing."""
        return cls(len(ids), len(ids), len(ids), zlib.crc32(array("q", ids).tobytes()))


@dataclass
class Held:
    """What the request holds while it runs.

    Attributes:
        row: of the page table; None while the request waits.
        track_id: its place in the recording buffers; 0 for none.
        started: whether its first forward pass since its admission was launched.
        is_silent: whether its step computes a token that is recorded already (decode server).
    """

    row: int | None = None
    track_id: int = 0
    started: bool = False
    is_silent: bool = False


@dataclass
class KVState:
    """Eviction state of the row. A recomputation begins with a new one.

    Attributes:
        evicted_tokens: evicted since the last prefill; row length + evicted = logical length.
        last: the last compaction since the last prefill.
        last_is_read: whether it was read back to the CPU.
        demand: last measurement of ``coverage``.
        statistics: of the policy, name -> one value per row entry that has a statistic.
        followed_tokens: logical tokens whose queries are included in the statistics.
        lost: whether this rank's part of the statistics is missing.
        recorded_tokens: logical tokens that were recorded before the row was restored.
        not_before: logical length of the first decode step; no compaction comes before it.
        windows_from: first row entry of its own from which on the window pool has the KV, where it
            has slots without that in front (pages of several tokens).
        running_steps: with speculative decoding, those whose result is not known yet.
        step_tokens: that the last step with a known result added.
    """

    followed_tokens: int
    evicted_tokens: int = 0
    last: LastCompaction | None = None
    last_is_read: bool = False
    demand: Demand | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    lost: bool = False
    recorded_tokens: int = 0
    not_before: int = 0
    windows_from: int = 0
    running_steps: int = 0
    step_tokens: int = 0

    def forget_running_step(self, logical_tokens: int) -> None:
        """The request is retracted with a backup of this length: what the running step adds is
        dropped, so nothing has seen what a compaction evicted that came beside it."""
        self.running_steps = self.step_tokens = 0
        if self.last is not None and self.last.logical_tokens == logical_tokens:
            self.last = self.last.beside_no_step()


class Compared(NamedTuple):
    """What a compaction compared, where there is a trace.

    Attributes:
        entries: sentence index of each entry of the device's table.
        best: float64 [2, entries], host copy: cosine and index of the entry that is most similar
            among those behind it.
        copied: event recorded after the copy; None on a CPU.
    """

    entries: list[int]
    best: Tensor
    copied: Any


class Redundancy(NamedTuple):
    """What the last compaction found of the sentences that it scored. A full table forgets the
    oldest sentences; a flag stays for the life of the request.

    Attributes:
        sentences: their indices.
        values: float32 [sentences], as in ``Sentences``, on the device.
    """

    sentences: Sequence[int]
    values: Tensor

    def up_to(self, closed: int) -> Redundancy:
        """Of the first so many sentences."""
        known = bisect_left(self.sentences, closed)
        return Redundancy(self.sentences[:known], self.values[:known])

    def with_own_memory(self) -> Redundancy:
        """The same: until then it has a part of what is of all requests compacted together."""
        return self._replace(values=self.values.clone())


@dataclass
class SentenceState:
    """The request's sentences, and their entries in the device's sentence table. A recomputation
    begins with a new one.

    Attributes:
        live: indices into ``tracker.closed`` of sentences that are not known to be evicted.
        table: sentence index of each entry of the device's table, when ``table_closed`` sentences
            were closed.
        redundancy: None before the first compaction.
        compared: of the last compaction, until it is read back.
        similar: sentence index -> the most similar later one in any compaction, and their cosine.
    """

    tracker: SentenceTracker
    live: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    table_closed: int = 0
    redundancy: Redundancy | None = None
    compared: Compared | None = None
    similar: dict[int, tuple[int, float]] = field(default_factory=dict)

    def feed(self, generated: Sequence[int]) -> None:
        """Find the sentences of these tokens, which begin with those that were fed before."""
        known = len(self.tracker.closed)
        self.tracker.feed(generated[self.tracker.seen_tokens :])
        self.live.extend(range(known, len(self.tracker.closed)))

    def read_similar(self) -> None:
        """Take over what the last compaction compared; the copy has usually finished."""
        compared, self.compared = self.compared, None
        if compared is None:
            return
        if compared.copied is not None:
            compared.copied.synchronize()
        cosines, partners = compared.best.tolist()
        # The last entry has none behind it.
        for sentence, cosine, partner in zip(
            compared.entries[:-1], cosines[:-1], partners[:-1], strict=True
        ):
            if cosine > self.similar.get(sentence, (0, -1.0))[1]:
                self.similar[sentence] = compared.entries[int(partner)], cosine

    def entries(self, capacity: int) -> list[int]:
        """Sentence index of each entry in use of the device's table, whose size is ``capacity``."""
        known = [*self.table, *range(self.table_closed, len(self.tracker.closed))]
        if len(known) > capacity:  # a full table kept overwriting its last entry
            known = [*known[: capacity - 1], known[-1]]
        return known


@dataclass
class Continued:
    """The history that the request continues.

    Attributes:
        rid: of the request that left it.
        key: the radix tree's key of each row entry of the history.
        rest_of_page: keys of the slots behind them in their last page.
        tokens: of the history; those before ``cut`` are the request's.
        cut: logical tokens of the history.
        unsent_tokens: of these, dropped thoughts, which the prompt does not contain.
        recorded_tokens: logical tokens whose queries may be among the recordings, those included
            that the prompt leaves out.
        recorded: recordings in host memory, until they are restored.
        copies: whether the request may evict from the history, so it gets a copy of the row.
        shared_tokens: row entries that stay the tree's; those behind them are copied: what may be
            evicted, and what has a page together with the tokens that follow.
        copied_tokens: KV tokens that were copied.
    """

    rid: str
    key: array[int]
    rest_of_page: array[int]
    tokens: array[int]
    cut: int
    unsent_tokens: int
    recorded_tokens: int
    recorded: Mapping[str, HostCopy] | None = None
    copies: bool = False
    shared_tokens: int = 0
    copied_tokens: int = 0

    @property
    def row_tokens(self) -> int:
        return len(self.key)

    @property
    def evicted_tokens(self) -> int:
        return self.cut - len(self.key)

    @property
    def sent_tokens(self) -> int:
        """Tokens of the prompt that the history stands for."""
        return self.cut - self.unsent_tokens


class FirstPrompt(NamedTuple):
    """Where the prompt of a conversation's first request ends in the prompt of a later one, which
    computes all of it.

    Attributes:
        tokens: its length.
        compactions: that the conversation has had, as far as it is known.
        input_spans: of what users and tools wrote behind it.
    """

    tokens: int
    compactions: int
    input_spans: Sequence[tuple[int, int]]


@dataclass
class Reuse:
    """What the request reuses and leaves (``kv_reuse``).

    Attributes:
        continued: None: it computes its whole prompt, as far as the radix tree has not got it.
        first_prompt: of a conversation that counts as generated and could not be continued; None:
            nothing in front of the request's own output counts.
        input_spans: of what users and tools wrote behind the prompt of the conversation's first
            request, this one's included; none unless that counts as generated.
        miss: why a history was not reused, or not all of it.
        row_key: the radix tree's keys of the row that a finished request leaves.
        loads: whether it continues a history that HiCache has in host memory; False: that could not
            be loaded, though nobody ran beside it.
        runs_to_context_end: whether it may generate until the model's context is full.
    """

    continued: Continued | None = None
    first_prompt: FirstPrompt | None = None
    input_spans: Sequence[tuple[int, int]] = ()
    miss: str = "none"
    runs_to_context_end: bool = False
    loads: bool = True
    row_key: array[int] | None = None


@dataclass
class Offloaded:
    """A retracted request.

    Attributes:
        backup: KV and recordings in host memory, until the row is restored.
        waiting_with: generated tokens of a retracted request that waits; None: it does not wait.
    """

    backup: Backup | None = None
    waiting_with: int | None = None


@dataclass
class Report:
    """Counts over the life of the request, updated at each decode step and compaction.

    Attributes:
        recomputations: how often its tokens were prefilled again after a retraction.
        observed_tokens: logical tokens at the last decode step.
        budgeted_token_steps: sum of budgeted tokens over the ``observed_steps``.
        summary: of ``meta_info``; None until the request has finished.
    """

    compactions: int = 0
    evicted_tokens: int = 0
    evicted_sentences: int = 0
    recomputations: int = 0
    peak_budgeted_tokens: int = 0
    observed_tokens: int = 0
    budgeted_token_steps: int = 0
    observed_steps: int = 0
    summary: dict[str, Any] | None = None
