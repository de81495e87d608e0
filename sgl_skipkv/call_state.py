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

    @property
    def needs_slot(self) -> bool:
        policy = self.settings.policy
        needs = policy.needs_queries or policy.needs_sentences or policy.needs_attention
        return self.settings.evicts and needs

    @property
    def needs_prompt_queries(self) -> bool:
        """Whether a compaction may come before the window holds nothing but decoded tokens."""
        params = self.settings.policy.params
        if params.count_prompt:
            return True
        return self.settings.budget_after(0) + params.interval - self.phase < params.window

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
