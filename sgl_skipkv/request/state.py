"""The state of one request with a KV budget or steering, divided by which code writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.recording.sentences import SentenceTracker
from sgl_skipkv.request.last_compaction import LastCompaction
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.steering.steerer import Schedule


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
    """Eviction state of the row. Written by ``Compaction.apply``, ``Planner.track`` and
    ``Runtime``; a recomputation begins with a new one.

    Attributes:
        evicted_tokens: evicted since the last prefill; row length + evicted = logical length.
        last: the last compaction since the last prefill.
        last_is_read: whether it was read back to the CPU.
        statistics: of the policy, name -> one value per row entry that has a statistic.
        tracked_tokens: logical tokens whose queries are included in the statistics.
        recorded_tokens: logical tokens that were recorded before the row was restored.
        not_before: logical length of the first decode step; no compaction comes before it.
    """

    tracked_tokens: int
    evicted_tokens: int = 0
    last: LastCompaction | None = None
    last_is_read: bool = False
    statistics: dict[str, Tensor] = field(default_factory=dict)
    recorded_tokens: int = 0
    not_before: int = 0


@dataclass
class SentenceState:
    """The request's sentences, and their entries in the device's sentence table. Written by
    ``Planner`` and ``Compaction.apply``; a recomputation begins with a new one.

    Attributes:
        live: indices into ``tracker.closed`` of sentences that are not known to be evicted.
        seen: how many closed sentences ``live`` takes into account.
        table: sentence index of each entry of the device's table, when ``table_closed`` sentences
            were closed.
    """

    tracker: SentenceTracker
    live: list[int] = field(default_factory=list)
    seen: int = 0
    table: list[int] = field(default_factory=list)
    table_closed: int = 0


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
        prompt_seed: checksum of the prompt, used as a random seed.
        schedule: of steering, before the first generated token; None: not steered.
        failure: why the request must end; None: no error.
    """

    runtime: Any
    rid: str
    settings: RequestSettings
    prompt_tokens: int
    prompt_seed: int
    kv: KVState
    sentences: SentenceState
    schedule: Schedule | None = None
    held: Held = field(default_factory=Held)
    offloaded: Offloaded = field(default_factory=Offloaded)
    report: Report = field(default_factory=Report)
    failure: str | None = None

    @property
    def row(self) -> int:
        """Of the page table; only while the request runs."""
        assert self.held.row is not None
        return self.held.row

    def span(self, sentence: int) -> tuple[int, int]:
        """Logical positions of a closed sentence, half-open."""
        start, stop = self.sentences.tracker.closed[sentence]
        return start + self.prompt_tokens, stop + self.prompt_tokens

    @property
    def needs_track(self) -> bool:
        """Whether its policy uses recorded queries or sentences."""
        policy = self.settings.policy
        needs = policy.needs_queries or policy.needs_sentences or policy.needs_attention
        return self.settings.evicts and needs

    @property
    def due_tokens(self) -> int:
        """Budgeted tokens at which the next compaction is due: ``budget_after(k) + interval``."""
        interval = self.settings.policy.params.interval
        return self.settings.budget_after(self.report.compactions) + interval

    @property
    def keep_tokens(self) -> int:
        """Cached tokens after the next compaction, prompt included."""
        return self.settings.keep_tokens(self.prompt_tokens, self.report.compactions + 1)

    @property
    def records_from(self) -> int:
        """First position of a prefill whose query is used later."""
        policy = self.settings.policy
        if policy.needs_attention:
            return self.kv.tracked_tokens
        due = self.due_tokens + self.settings.prompt_on_top(self.prompt_tokens)
        return max(self.kv.not_before, due + self.kv.evicted_tokens) - policy.params.window

    @property
    def keeps_prompt_private(self) -> bool:
        """Whether the prompt may be evicted, so the radix tree must not own it."""
        return self.settings.evicts and not self.settings.policy.params.protect_prompt

    def budgeted_tokens(self, row_tokens: int) -> int:
        """Tokens of a row with this length that count against the budget."""
        return self.settings.budgeted_tokens(row_tokens, self.prompt_tokens)

    def future_tokens(self, row_tokens: int, tokens_left: int) -> int:
        """KV tokens that the request may still need beyond this row length, for admission."""
        if not self.settings.evicts:
            return tokens_left
        room = self.settings.peak_budgeted_tokens() - self.budgeted_tokens(row_tokens)
        return min(tokens_left, max(room, 1))
