"""One request with a KV budget or steering: its parts, and what follows from them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from sgl_skipkv.request.demand import AHEAD_TOKENS, Demand
from sgl_skipkv.request.parts import (
    Held,
    KVState,
    Offloaded,
    Prompt,
    Report,
    Reuse,
    SentenceState,
)
from sgl_skipkv.request.settings import RequestSettings
from sgl_skipkv.steering.steerer import Schedule


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

    def input_sentences(self) -> frozenset[int]:
        """Numbers, among the live ones, of sentences that users and tools wrote in later turns."""
        edges, live = [*chain(*self.reuse.input_spans)], enumerate(self.sentences.live)
        return frozenset(i for i, one in live if bisect_right(edges, self.span(one)[0]) % 2)

    @property
    def needs_track(self) -> bool:
        """Whether its policy uses recorded queries or sentences."""
        return self.settings.evicts and self.settings.policy.needs_track

    @property
    def compactions(self) -> int:
        """How many compactions the tokens have had that count as generated."""
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
        if continued is None or continued.copies:
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
        settings, policy = self.settings, self.settings.policy
        first, window = self.kv.followed_tokens, policy.params.window
        reads_queries = policy.needs_queries or not policy.needs_attention
        if reads_queries:
            longest = settings.prompt_on_top(self.prompt_row_tokens)
            longest += settings.peak_budgeted_tokens()
            due = bisect_left(range(longest), True, key=self.is_due) + self.kv.evicted_tokens
            scored = max(self.kv.not_before, due) - window
            first = min(first, scored) if policy.needs_attention else scored
        if policy.params.coverage < 1:
            first = min(first, max(self.kv.not_before, self._measured_from) - window)
        elif not reads_queries:
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
