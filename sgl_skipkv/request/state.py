"""One request with a KV budget or steering, in parts by who writes them."""

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
    """What the request holds while it runs. ``Runtime.admit`` and ``Runtime.retract`` write it.

    Attributes:
        row: of the page table; None while the request waits.
        track_id: its place in the recording buffers; 0 for none.
        started: whether its first forward pass since the admission was launched.
    """

    row: int | None = None
    track_id: int = 0
    started: bool = False


@dataclass
class KVState:
    """What eviction knows of the row. ``Runtime.commit`` and ``Planner.track`` write it; a
    recomputation begins with a new one.

    Attributes:
        evicted_tokens: gone from the row since the last prefill; row + evicted = logical length.
        last: the last compaction since the last prefill.
        last_is_read: whether the CPU has read what it kept.
        statistics: what the policy tracks, name -> one value per row entry with a statistic.
        tracked_tokens: logical tokens whose queries the statistics have seen.
        recorded_tokens: logical tokens that were recorded before the row came back from a backup.
        not_before: logical length before which nothing is compacted: the first decode step.
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
    """The request's sentences on the CPU, and which entries of the device's table are theirs.
    ``Planner`` writes it; a recomputation begins with a new one.

    Attributes:
        live: indices into ``tracker.closed`` of sentences not known to be evicted.
        seen: closed sentences that ``live`` knows.
        table: sentence index of each entry of the device's table, as of ``table_closed`` closed
            sentences.
    """

    tracker: SentenceTracker
    live: list[int] = field(default_factory=list)
    seen: int = 0
    table: list[int] = field(default_factory=list)
    table_closed: int = 0


@dataclass
class Offloaded:
    """What a retraction left. ``Runtime.back_up`` and ``Runtime.retract`` write it, ``admit`` ends
    the wait.

    Attributes:
        backup: KV and recordings in host memory, until the row is back.
        waiting_with: generated tokens with which the request waits to come back; None: it does not.
    """

    backup: Backup | None = None
    waiting_with: int | None = None


@dataclass
class Report:
    """Counts over the whole life. ``Runtime`` adds to them at each step and compaction.

    Attributes:
        budgeted_token_steps: sum of budgeted tokens over the ``observed_steps``.
        summary: what the request reports; None until it is over.
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
        prompt_seed: a number that only the prompt decides.
        schedule: the steering strength before the first generated token; None: not steered.
        failure: why the request has to end; None: nothing is wrong.
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

    def span(self, sentence: int) -> tuple[int, int]:
        """Logical positions of a closed sentence: first, and one past the last."""
        start, stop = self.sentences.tracker.closed[sentence]
        return start + self.prompt_tokens, stop + self.prompt_tokens

    @property
    def needs_track(self) -> bool:
        """Whether its policy looks at what decoding records."""
        policy = self.settings.policy
        needs = policy.needs_queries or policy.needs_sentences or policy.needs_attention
        return self.settings.evicts and needs

    @property
    def due_tokens(self) -> int:
        """Budgeted tokens at which the next compaction comes."""
        interval = self.settings.policy.params.interval
        return self.settings.budget_after(self.report.compactions) + interval

    @property
    def records_from(self) -> int:
        """First position of a prefill whose query is asked for later."""
        policy = self.settings.policy
        if policy.needs_attention:
            return self.kv.tracked_tokens
        due = self.due_tokens + self.settings.prompt_on_top(self.prompt_tokens)
        return max(self.kv.not_before, due + self.kv.evicted_tokens) - policy.params.window

    @property
    def keeps_prompt_private(self) -> bool:
        """An evictable prompt must not be shared: the tree would own what we want to free."""
        return self.settings.evicts and not self.settings.policy.params.protect_prompt

    def budgeted_tokens(self, row_tokens: int) -> int:
        """What counts against the budget, of a row with this many cached tokens."""
        return self.settings.budgeted_tokens(row_tokens, self.prompt_tokens)

    def future_tokens(self, row_tokens: int, tokens_left: int) -> int:
        """KV tokens the request may still need beyond a row of this length; admission's reserve."""
        if not self.settings.evicts:
            return tokens_left
        room = self.settings.peak_budgeted_tokens() - self.budgeted_tokens(row_tokens)
        return min(tokens_left, max(room, 1))
