"""What the runtime knows of one call with a KV budget or steering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sgl_skipkv.call import CallSettings
from sgl_skipkv.compaction import Snapshot
from sgl_skipkv.sentences import SentenceTracker
from sgl_skipkv.steering import Schedule


@dataclass(eq=False)
class CallState:
    """One call. Counts are tokens; spans and positions are logical.

    Attributes:
        runtime: the ``Runtime`` that opened it.
        evicted_tokens: gone from the row since the last prefill; row + evicted = logical length.
        last: the last compaction since the last prefill.
        ring: the ring of recent queries that it may write to in its ``ring_steps``, 0 for none.
        first_due: logical length at which the first compaction since the last prefill comes.
        length_less_steps: logical length minus decode steps launched, the same all the while.
        phase: tokens by which the first compaction comes early, so that calls that began together
            do not compact together.
        schedule: the strength before the first generated token; None where nothing is steered.
        recomputes: generated tokens that the coming prefill computes again, after a retraction.
        alive: indices into ``tracker.closed`` of sentences not known to be evicted.
        statistics: what the policy tracks, name -> one value per row entry with a statistic.
        known_spared: what the last compaction found out about the rows that stayed.
        tracked_tokens: logical tokens whose queries those have seen.
        table: sentence index of each entry of the device's sentence table, as of ``table_closed``
            closed sentences.
    """

    runtime: Any
    rid: str
    settings: CallSettings
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
    recomputes: int | None = None
    evicted_tokens: int = 0
    last: Snapshot | None = None
    alive: list[int] = field(default_factory=list)
    alive_closed: int = 0
    statistics: dict[str, Tensor] = field(default_factory=dict)
    known_spared: Tensor | None = None
    tracked_tokens: int = 0
    table: list[int] = field(default_factory=list)
    table_closed: int = 0
    compactions: int = 0
    total_evicted_tokens: int = 0
    evicted_sentences: int = 0
    peak_own_tokens: int = 0
    own_token_steps: int = 0
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
        """First position whose query the first compaction since the last prefill asks for."""
        return self.first_due - self.settings.policy.params.window

    def due_length(self, prefill_tokens: int) -> int:
        """Logical length at which the first compaction after a prefill of so many tokens comes.

        Not before the first decode step: until then the prefill may still be running.
        """
        prompt = self.settings.prompt_on_top(self.prompt_tokens)
        return max(prefill_tokens + 1, self.due_tokens + prompt)

    @property
    def keeps_prompt_private(self) -> bool:
        """An evictable prompt must not be shared: the tree would own what we want to free."""
        return self.settings.evicts and not self.settings.policy.params.protect_prompt

    def own_tokens(self, row_tokens: int) -> int:
        return self.settings.own_tokens(row_tokens, self.prompt_tokens)

    def future_tokens(self, row_tokens: int, tokens_left: int) -> int:
        """KV tokens the call may still need beyond a row of this length; admission's reserve."""
        if not self.settings.evicts:
            return tokens_left
        room = self.settings.peak_own_tokens() - self.own_tokens(row_tokens)
        return min(tokens_left, max(room, 1))
