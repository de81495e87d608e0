"""What the runtime knows of one request with a KV budget or steering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sgl_skipkv.eviction.compaction import Snapshot, Undo
from sgl_skipkv.offload.backup import Backup
from sgl_skipkv.recording.sentences import SentenceTracker
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.steering.steerer import Schedule


@dataclass(eq=False)
class RequestState:
    """One request. Counts are tokens; spans and positions are logical.

    Attributes:
        runtime: the ``Runtime`` that opened it.
        evicted_tokens: gone from the row since the last prefill; row + evicted = logical length.
        last: the last compaction since the last prefill.
        undo: how it was before the compaction of this step, None after a step without one.
        ring: the ring of recent queries that it may write to in its ``ring_steps``, 0 for none.
        first_due: logical length at which the first compaction since the last prefill comes.
        length_less_steps: logical length minus decode steps launched, the same all the while.
        phase: tokens by which the first compaction comes early, so that requests that began
            together do not compact together.
        schedule: the strength before the first generated token; None where nothing is steered.
        returns: generated tokens with which it waits to come back, after a retraction.
        backup: what it held, while it waits to come back after a retraction.
        restored: its row came back from there, since its last admission.
        recorded_tokens: logical tokens that were recorded before that.
        live: indices into ``tracker.closed`` of sentences not known to be evicted.
        statistics: what the policy tracks, name -> one value per row entry with a statistic.
        known_spared: what the last compaction found out about the rows that stayed.
        tracked_tokens: logical tokens whose queries those have seen.
        table: sentence index of each entry of the device's sentence table, as of ``table_closed``
            closed sentences.
    """

    runtime: Any
    rid: str
    settings: RequestSettings
    prompt_tokens: int
    prompt_seed: int
    tracker: SentenceTracker
    phase: int = 0
    schedule: Schedule | None = None
    slot: int = 0
    ring: int = 0
    ring_steps: int = 0
    first_due: int = 0
    length_less_steps: int = 0
    row: int | None = None
    started: bool = False
    returns: int | None = None
    backup: Backup | None = None
    restored: bool = False
    recorded_tokens: int = 0
    evicted_tokens: int = 0
    last: Snapshot | None = None
    undo: Undo | None = None
    live: list[int] = field(default_factory=list)
    live_closed: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)
    known_spared: Tensor | None = None
    tracked_tokens: int = 0
    table: list[int] = field(default_factory=list)
    table_closed: int = 0
    compactions: int = 0
    total_evicted_tokens: int = 0
    evicted_sentences: int = 0
    peak_budgeted_tokens: int = 0
    budgeted_token_steps: int = 0
    observed_steps: int = 0
    failure: str | None = None
    summary: dict[str, Any] | None = None

    def span(self, sentence: int) -> tuple[int, int]:
        """Logical positions of a closed sentence: first, and one past the last."""
        start, stop = self.tracker.closed[sentence]
        return start + self.prompt_tokens, stop + self.prompt_tokens

    @property
    def needs_slot(self) -> bool:
        policy = self.settings.policy
        needs = policy.needs_queries or policy.needs_sentences or policy.needs_attention
        return self.settings.evicts and needs

    @property
    def needs_ring(self) -> bool:
        policy = self.settings.policy
        return self.settings.evicts and (policy.needs_queries or policy.needs_attention)

    @property
    def due_tokens(self) -> int:
        """Own tokens at which the next compaction comes."""
        interval = self.settings.policy.params.interval
        early = self.phase if self.compactions == 0 else 0
        return self.settings.budget_after(self.compactions) + interval - early

    @property
    def records_from(self) -> int:
        """First position whose query is asked for after the last prefill."""
        policy = self.settings.policy
        first = self.first_due - policy.params.window
        return min(first, self.tracked_tokens) if policy.needs_attention else first

    def due_length(self, prefill_tokens: int) -> int:
        """Logical length at which the first compaction after a prefill of so many tokens comes.

        Not before the first decode step: until then the prefill may still be running. A request
            that
        is restored has its prompt behind it, and compacts when it would have: its queries are
        recorded for that.
        """
        prompt = self.settings.prompt_on_top(self.prompt_tokens)
        restored = self.backup is not None
        first = max(prefill_tokens, self.first_due) if restored else prefill_tokens + 1
        return max(first, self.due_tokens + prompt + self.evicted_tokens)

    def was_recording(self, recorded_tokens: int) -> bool:
        """Whether a query that the next compaction asks for is among the recorded tokens."""
        policy, prompt = self.settings.policy, self.settings.prompt_on_top(self.prompt_tokens)
        next_due = self.due_tokens + prompt + self.evicted_tokens
        return policy.needs_attention or recorded_tokens > next_due - policy.params.window

    @property
    def keeps_prompt_private(self) -> bool:
        """An evictable prompt must not be shared: the tree would own what we want to free."""
        return self.settings.evicts and not self.settings.policy.params.protect_prompt

    def budgeted_tokens(self, row_tokens: int) -> int:
        return self.settings.budgeted_tokens(row_tokens, self.prompt_tokens)

    def future_tokens(self, row_tokens: int, tokens_left: int) -> int:
        """KV tokens the request may still need beyond a row of this length; admission's reserve."""
        if not self.settings.evicts:
            return tokens_left
        room = self.settings.peak_budgeted_tokens() - self.budgeted_tokens(row_tokens)
        return min(tokens_left, max(room, 1))
