"""The state of one request with a KV budget or steering, divided by which code writes it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.offload.host_memory import HostCopy
from sgl_skipkv.recording.sentences import SentenceTracker
from sgl_skipkv.request.demand import AHEAD_TOKENS, Demand
from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.steering.steerer import Schedule


@dataclass
class Prompt:
    """The request's prompt. Written by ``Runtime`` and ``reuse.continuation``.

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


@dataclass
class Held:
    """What the request holds while it runs. Written by ``Runtime.admit`` and ``Runtime.retract``.

    Attributes:
        row: of the page table; None while the request waits.
        track_id: its place in the recording buffers; 0 for none.
        started: whether its first forward pass since its admission was launched.
    """

    row: int | None = None
    track_id: int = 0
    started: bool = False


@dataclass
class KVState:
    """Eviction state of the row. Written by ``Compaction.apply`` and ``Runtime``; a recomputation
    begins with a new one.

    Attributes:
        evicted_tokens: evicted since the last prefill; row length + evicted = logical length.
        last: the last compaction since the last prefill.
        last_is_read: whether it was read back to the CPU.
        demand: last measurement of ``coverage``.
        statistics: of the policy, name -> one value per row entry that has a statistic.
        tracked_tokens: logical tokens whose queries are included in the statistics.
        lost: whether this rank's part of the statistics is missing.
        recorded_tokens: logical tokens that were recorded before the row was restored.
        not_before: logical length of the first decode step; no compaction comes before it.
    """

    tracked_tokens: int
    evicted_tokens: int = 0
    last: LastCompaction | None = None
    last_is_read: bool = False
    demand: Demand | None = None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    lost: bool = False
    recorded_tokens: int = 0
    not_before: int = 0


class Compared(NamedTuple):
    """Written by ``eviction.similar_sentences``, where there is a trace.

    Attributes:
        entries: sentence index of each entry of the device's table.
        best: float64 [2, entries], host copy: cosine and index of the entry that is most similar
            among those behind it.
        copied: event recorded after the copy; None on a CPU.
    """

    entries: list[int]
    best: Tensor
    copied: Any


@dataclass
class SentenceState:
    """The request's sentences, and their entries in the device's sentence table. Written by
    ``Planner`` and ``Compaction.apply``; a recomputation begins with a new one.

    Attributes:
        live: indices into ``tracker.closed`` of sentences that are not known to be evicted.
        seen: how many closed sentences ``live`` takes into account.
        table: sentence index of each entry of the device's table, when ``table_closed`` sentences
            were closed.
        compared: of the last compaction, until it is read back.
        similar: sentence index -> the most similar later one in any compaction, and their cosine.
    """

    tracker: SentenceTracker
    live: list[int] = field(default_factory=list)
    seen: int = 0
    table: list[int] = field(default_factory=list)
    table_closed: int = 0
    compared: Compared | None = None
    similar: dict[int, tuple[int, float]] = field(default_factory=dict)

    def feed(self, generated: Sequence[int]) -> None:
        """Find the sentences of these tokens, which begin with those that were fed before."""
        self.tracker.feed(generated[self.tracker.seen_tokens :])
        self.live.extend(range(self.seen, len(self.tracker.closed)))
        self.seen = len(self.tracker.closed)

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
    """The history that the request continues. Written by ``reuse.continuation``; ``copied_tokens``
    by ``patches.engine.reuse``.

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


@dataclass
class Reuse:
    """What the request reuses and leaves (``kv_reuse``). Written by ``patches.engine.reuse``.

    Attributes:
        continued: None: it computes its whole prompt, as far as the radix tree has not got it.
        miss: why a history was not reused, or not all of it.
        row_key: the radix tree's keys of the row that a finished request leaves.
        runs_to_context_end: whether it may generate until the model's context is full. Written by
            ``patches.engine.scheduler``.
    """

    continued: Continued | None = None
    miss: str = "none"
    runs_to_context_end: bool = False
    row_key: array[int] | None = None


@dataclass
class Offloaded:
    """A retracted request. Written by ``Runtime.back_up`` and ``Runtime.retract``, reset by
    ``Runtime.admit`` and ``Runtime.start_recording``.

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
        budgeted_token_steps: sum of budgeted tokens over the ``observed_steps``.
        summary: of ``meta_info``; None until the request has finished.
    """

    compactions: int = 0
    evicted_tokens: int = 0
    evicted_sentences: int = 0
    peak_budgeted_tokens: int = 0
    budgeted_token_steps: int = 0
    observed_steps: int = 0
    summary: dict[str, Any] | None = None


@dataclass(eq=False)
class RequestState:
    """One request. Counts are tokens; spans and positions are logical.

    Attributes:
        runtime: the ``Runtime`` that opened it.
        schedule: of steering, before the first generated token; None: not steered.
        failure: why the request must end; None: no error.
    """

    runtime: Any
    rid: str
    settings: RequestSettings
    prompt: Prompt
    kv: KVState
    sentences: SentenceState
    schedule: Schedule | None = None
    held: Held = field(default_factory=Held)
    offloaded: Offloaded = field(default_factory=Offloaded)
    reuse: Reuse = field(default_factory=Reuse)
    report: Report = field(default_factory=Report)
    failure: str | None = None

    @property
    def row(self) -> int:
        """Of the page table; only while the request runs."""
        assert self.held.row is not None
        return self.held.row

    @property
    def unsent_tokens(self) -> int:
        """Dropped thoughts in front of its output."""
        return self.prompt.tokens - self.prompt.sent_tokens

    def logical_prompt(self, prompt: array[int]) -> array[int]:
        """The prompt that it came with, and the dropped thoughts of its history."""
        continued = self.reuse.continued
        if continued is None or not continued.unsent_tokens:
            return prompt
        return continued.tokens[: continued.cut] + prompt[continued.sent_tokens :]

    def row_positions(self, row_tokens: int) -> list[int]:
        """Logical position of each entry of a row of this length. Waits for the last compaction."""
        last = self.kv.last
        kept, newer = ([], 0) if last is None else (last.read()[0], last.logical_tokens)
        return [*kept, *range(newer, row_tokens + self.kv.evicted_tokens)]

    def span(self, sentence: int) -> tuple[int, int]:
        """Logical positions of a closed sentence, half-open."""
        start, stop = self.sentences.tracker.closed[sentence]
        return start + self.prompt.uncounted_tokens, stop + self.prompt.uncounted_tokens

    @property
    def needs_track(self) -> bool:
        """Whether its policy uses recorded queries or sentences."""
        policy = self.settings.policy
        records = policy.records_queries or policy.needs_sentences or policy.needs_attention
        return self.settings.evicts and records

    @property
    def compactions(self) -> int:
        """Of what counts as generated."""
        return self.prompt.earlier_compactions + self.report.compactions

    @property
    def prompt_row_tokens(self) -> int:
        """Row entries of the uncounted tokens: fewer where they contain a history."""
        continued = self.reuse.continued
        if continued is None or self.settings.kv_reuse == "budget":
            return self.prompt.uncounted_tokens
        return self.prompt.uncounted_tokens - continued.evicted_tokens

    @property
    def prompt_evicted_tokens(self) -> int:
        """Tokens of the prompt that earlier requests evicted."""
        return self.prompt.uncounted_tokens - self.prompt_row_tokens

    @property
    def shared_row_tokens(self) -> int:
        """Row entries that the radix tree may own while the request runs."""
        continued = self.reuse.continued
        if self.keeps_prompt_private:
            return 0
        if continued is None:
            return self.prompt.tokens
        if continued.copies:
            return self.prompt.uncounted_tokens
        return self.prompt.tokens - continued.evicted_tokens

    def is_due(self, row_tokens: int) -> bool:
        """Whether a row of this length is ``interval`` tokens past the budget of the compactions so
        far, or longer than its demand. If so, the same is true of every longer row."""
        interval = self.settings.policy.params.interval
        budget = self._budget_after(self.compactions, row_tokens)
        if self.budgeted_tokens(row_tokens) >= budget + interval:
            return True
        covering = self._covering_budget(row_tokens)
        return covering is not None and covering < self.budgeted_tokens(row_tokens)

    def may_be_due_until(self, row_tokens: int) -> bool:
        """Whether a compaction may come before a row is longer than this."""
        logical_tokens = row_tokens + self.kv.evicted_tokens
        measures = self.settings.policy.params.coverage < 1
        reads_demand = measures and logical_tokens >= self._measured_from + AHEAD_TOKENS
        return reads_demand or self.is_due(row_tokens)

    def must_measure(self, row_tokens: int) -> bool:
        """Whether the demand of a row of this length is measured: ``AHEAD_TOKENS`` before
        ``interval`` tokens have been generated since the last compaction, and every ``interval``
        tokens if nothing had to be evicted then."""
        params = self.settings.policy.params
        if params.coverage == 1 or not self.settings.evicts:
            return False
        demand = self._demand
        first = self._measured_from if demand is None else demand.logical_tokens + params.interval
        return row_tokens + self.kv.evicted_tokens >= max(first, self.kv.not_before)

    @property
    def _measured_from(self) -> int:
        """Logical length at which the demand is first measured since the last compaction."""
        start = self.prompt.uncounted_tokens + self.settings.policy.min_budget_tokens
        if self.kv.last is not None:
            start = max(start, self.kv.last.logical_tokens)
        return start + self.settings.policy.params.interval - AHEAD_TOKENS

    @property
    def _demand(self) -> Demand | None:
        """Measured since the last compaction."""
        demand, last = self.kv.demand, self.kv.last
        if demand is None or last is None or demand.logical_tokens > last.logical_tokens:
            return demand
        return None

    def _covering_budget(self, row_tokens: int) -> int | None:
        """The budget that the demand asks for; None as long as its copy may be on its way."""
        demand, logical_tokens = self._demand, row_tokens + self.kv.evicted_tokens
        if demand is None or logical_tokens < demand.logical_tokens + AHEAD_TOKENS:
            return None
        needed = self.budgeted_tokens(demand.row_tokens(logical_tokens))
        return max(needed, self.settings.least_tokens(self.prompt_row_tokens))

    def next_budget(self, row_tokens: int) -> int:
        """Budget of a compaction of a row of this length."""
        budget = self._budget_after(self.compactions + 1, row_tokens)
        covering = self._covering_budget(row_tokens)
        return budget if covering is None else min(budget, covering)

    def keep_tokens(self, row_tokens: int) -> int:
        """Cached tokens that a compaction of a row of this length keeps, prompt included."""
        return self.next_budget(row_tokens) + self.settings.prompt_on_top(self.prompt_row_tokens)

    def _budget_after(self, compactions: int, row_tokens: int) -> int:
        """The policy's budget, or the share of what a row of this length stands for."""
        settings = self.settings
        assert settings.kv_budget is not None
        budget = settings.policy.budget_after(settings.kv_budget, compactions)
        if settings.policy.params.fraction == 1:
            return budget
        return min(budget, settings.share(self.full_tokens(row_tokens), self.prompt_row_tokens))

    def full_tokens(self, row_tokens: int) -> int:
        """Budgeted tokens of a row of this length, and those that this request's eviction took."""
        evicted_tokens = self.kv.evicted_tokens - self.prompt_evicted_tokens
        return self.budgeted_tokens(row_tokens) + evicted_tokens

    @property
    def records_from(self) -> int:
        """First position of a prefill whose query is used later."""
        settings, window = self.settings, self.settings.policy.params.window
        first = self.kv.tracked_tokens
        if not settings.policy.needs_attention:
            longest = settings.prompt_on_top(self.prompt_row_tokens)
            longest += settings.peak_budgeted_tokens()
            due = bisect_left(range(longest), True, key=self.is_due) + self.kv.evicted_tokens
            first = max(self.kv.not_before, due) - window
        if settings.policy.params.coverage < 1:
            first = min(first, max(self.kv.not_before, self._measured_from) - window)
        elif settings.policy.needs_attention:
            return first
        if settings.kv_reuse == "budget":  # the next turn may evict before it has as many
            first = min(first, self.prompt.tokens - window)
        return first

    @property
    def keeps_prompt_private(self) -> bool:
        """Whether the prompt may be evicted, so the radix tree must not own it."""
        return self.settings.evicts and not self.settings.policy.params.protect_prompt

    def budgeted_tokens(self, row_tokens: int) -> int:
        """Tokens of a row with this length that count against the budget."""
        return self.settings.budgeted_tokens(row_tokens, self.prompt_row_tokens)

    def future_tokens(self, row_tokens: int, tokens_left: int) -> int:
        """KV tokens that the request may still need beyond this row length, for admission."""
        if not self.settings.evicts:
            return tokens_left
        full_tokens = self.full_tokens(row_tokens + tokens_left)
        peak_tokens = self.settings.peak_until(full_tokens, self.prompt_row_tokens)
        return min(tokens_left, max(peak_tokens - self.budgeted_tokens(row_tokens), 1))
