"""The books of conversations: which history a request continues, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter, eq
from typing import Any

from budgets import budget_at
from pool_content import DELIMITER, VOCAB
from pool_turns import (
    Conversation,
    Entry,
    Left,
    closed_sentences,
    namespace_of,
    opener_of,
    reuse_of,
    separated,
    thought_of,
)


class TurnBooks:
    """What ``Books`` has of turns; its attributes are explained there.

    Attributes:
        boundary_tokens: at the end of a history that whoever continues it computes again.
    """

    boundary_tokens = 0

    def _continued(self, req: Any, slots: list[int]) -> list[Entry]:
        """The row of the history that the request continues; its conversation is in the books."""
        prompt, state = req.origin_input_ids, getattr(req, "skipkv", None)
        prompt_tokens = len(prompt)
        self.talks[req.rid] = Conversation(
            prompt, prompt_tokens, prompt_tokens, sentences_from=prompt_tokens
        )
        self.computed[req.rid] = {}
        if reuse_of(req) is None:
            return []
        continued = state.reuse.continued
        cut = 0 if continued is None else continued.cut
        if continued is not None or state.reuse.miss != "evicted":
            sent = 0 if continued is None else continued.sent_tokens + self.boundary_tokens
            self._check_farthest(req, sent)
        if continued is None:
            self.count[f"no history, {state.reuse.miss}"] += 1
            self._count_conversation(req)
            return []
        known = cut + self.boundary_tokens
        rows = [
            (left, talk)
            for history, left in self.left.items()
            if left.continues(namespace_of(req), req.origin_input_ids, known)
            # Another one may have as many tokens there: other thoughts, or none and more text. Or
            # the same tokens, of which one history's have seen thoughts that the other's have not.
            and [*left.tokens[:known]] == [*continued.tokens[:known]]
            and history.key[: continued.row_tokens] == continued.key
            and (talk := self._talk_behind(req, left, known)) is not None
        ]
        assert rows, "a history that nobody left"
        left, self.talks[req.rid] = rows[-1]
        again = {at: left.computed[at] for at in range(cut, known)}
        self.talks[req.rid].cut = cut
        self.talks[req.rid].in_sentences = {**left.talk.in_sentences, **again}
        self.computed[req.rid] = {at: tag for at, tag in left.computed.items() if at < cut}
        row = left.row_before(cut)
        assert len(row) == continued.row_tokens <= len(slots), "the history's row is all there"
        # The first compaction waits for a decode step, and until the ring has no query of a token
        # that was left out.
        prompt_tokens = len(self.prompt_of(req))
        first_due = max(prompt_tokens + 1, continued.recorded_tokens)
        talk, settings = self.talks[req.rid], state.settings
        generated = first_due - talk.prompt_tokens
        budget = budget_at(settings.policy, settings.kv_budget, talk.compactions, generated)
        bound = talk.prompt_row_tokens + budget + settings.policy.params.interval + 1
        if len(row) + first_due - cut >= bound:
            self.recomputed.add(req.rid)
        self.count["continued"] += 1
        self.count["continued, evicted from"] += cut > len(row)
        self.count["continued, not to its end"] += known < len(left.tokens)
        self.count["continued behind thoughts"] += left.unsent_tokens > 0
        return row

    def _count_conversation(self, req: Any) -> None:
        """A conversation whose history is lost counts from where its first prompt ended."""
        state, prompt = req.skipkv, req.origin_input_ids
        first, is_lost = state.prompt.uncounted_tokens, state.reuse.miss == "evicted"
        if reuse_of(req) != "budget" or not (is_lost or first < len(prompt)):
            assert first == len(prompt)
            return
        own, compactions = self.first_prompts[namespace_of(req)], state.prompt.earlier_compactions
        ends = [
            text for text, at in own if text[:first] == (*prompt[:first],) and at == compactions
        ]
        assert any(len(text) - first <= opener_of(text) for text in ends), (
            "no first prompt ends there"
        )
        self.talks[req.rid] = Conversation(
            prompt, first, first, sentences_from=first, compactions=compactions
        )
        self.recomputed.add(req.rid)  # until its first compaction
        self.count["lost, counted"] += 1

    def _talk_behind(self, req: Any, left: Left, cut: int) -> Conversation | None:
        """The conversation of a request that continues this history, if that is how the runtime
        continues it: two histories may differ in no token, but in where turns ended."""
        state, talk = req.skipkv, left.talk
        prompt = [*left.tokens[:cut], *req.origin_input_ids[cut - left.unsent_tokens :]]
        if reuse_of(req) == "keep":
            prompt_tokens = len(prompt)
            row_tokens = prompt_tokens - cut + len(left.row_before(cut))
            return Conversation(
                *(prompt, prompt_tokens, row_tokens, cut, prompt_tokens, (), 0, talk.compacted_at)
            )
        closed = tuple(span for span in talk.closed if span[1] <= cut)
        expected = (talk.prompt_tokens, talk.compactions)
        if (state.prompt.uncounted_tokens, state.prompt.earlier_compactions) != expected:
            return None
        if state.settings.policy.needs_sentences and self._closed_first(req, cut) != closed:
            return None
        if cut < talk.prompt_tokens:
            return None
        first, compactions = talk.prompt_tokens, talk.compactions
        return Conversation(prompt, first, first, cut, cut, closed, compactions, talk.compacted_at)

    def prompt_of(self, req: Any) -> Sequence[int]:
        """The request's prompt, with the thoughts that its history dropped."""
        talk = self.talks.get(req.rid)
        return req.origin_input_ids if talk is None else talk.prompt

    @staticmethod
    def _closed_first(req: Any, cut: int) -> tuple[tuple[int, int], ...]:
        """The sentences that the runtime has from the history."""
        spans = map(req.skipkv.span, range(len(req.skipkv.sentences.tracker.closed)))
        return tuple(span for span in spans if span[1] <= cut)

    def next_text(self, req: Any) -> list[int]:
        """Prompt and output of a finished request, as a template has them that drops thoughts."""
        prompt, (opener, thought) = req.origin_input_ids, (0, 0)
        if req.skipkv.settings.drops_thoughts:
            opener, thought = thought_of(prompt, req.output_ids_through_stop)
        return [*prompt[: len(prompt) - opener], *req.output_ids_through_stop[thought:]]

    def _check_farthest(self, req: Any, sent: int) -> None:
        """No history that the runtime still knows has more of the prompt."""
        prompt, known = req.origin_input_ids, self.runtime.histories._by_use
        for history in filter(attrgetter("has_kv"), known):
            left = self.left[history]
            longest = len([*takewhile(bool, map(eq, left.sent, prompt[:-1]))])
            shortest = history.first_cut - left.unsent_tokens
            own = left.namespace == namespace_of(req)
            if own and longest > max(sent, shortest - 1):  # it says where the conversation begins
                cut = longest + left.unsent_tokens
                assert not self._goes_on_from(history, left, cut), "a longer history"

    def _goes_on_from(self, history: Any, left: Left, cut: int) -> bool:
        """Whether the tree lets a request continue what was left, with so many of its tokens."""
        return self._is_whole(history, left)

    def _is_whole(self, history: Any, left: Left) -> bool:
        """Whether the tree has the whole row of what the request left."""
        row_tokens = len(left.row) - self.boundary_tokens
        return self._has_all(history.key + history.padding, left.apart, row_tokens)

    def _leave(self, req: Any, row: list[Entry], slots: Sequence[int]) -> None:
        """A request has finished, whose row had these slots: what it leaves is in the books."""
        newest = next(reversed(self.runtime.histories._by_use), None)
        if newest is None or newest in self.left or not newest.has_kv:
            return
        talk, prompt = self.talks[req.rid], self.prompt_of(req)
        tokens = [*prompt, *req.output_ids_through_stop][: row[-1].position + 1]
        assert reuse_of(req) is not None, "it did not ask for that"
        talk.compactions += self._compactions(req)
        unsent, (opener, thought) = len(prompt) - len(req.origin_input_ids), (0, 0)
        if req.skipkv.settings.drops_thoughts:
            opener, thought = thought_of(req.origin_input_ids, req.output_ids_through_stop)
        if len(prompt) + thought + self.boundary_tokens >= len(tokens):  # no KV of an answer
            opener, thought = 0, 0
        if thought:
            answer_at = len(prompt) + thought
            row = [one for one in row if not len(prompt) <= one.position < answer_at]
            talk.compacted_at = max(talk.compacted_at, answer_at + 1)
            talk.compactions -= 1  # it is no step of the budget
            self.count["thoughts dropped"] += 1
            if self.page_size > 1:  # the answer has moved
                tags = [one.tag for one in row]
                self.content.update(zip(slots, tags, strict=False))
                self._check_stored([*slots[: len(row)]], tags)
        sent = [
            *req.origin_input_ids[: len(req.origin_input_ids) - opener],
            *tokens[len(prompt) + thought :],
        ]
        assert len(tokens) - len(sent) == unsent + opener + thought
        assert (tokens, sent) == ([*newest.tokens], [*newest.sent]), "another text"
        own = closed_sentences(tokens, talk.sentences_from, DELIMITER)
        talk.closed = (*talk.closed, *own)
        computed = self.computed[req.rid]
        first = (*talk.prompt[: talk.prompt_tokens],)
        self.first_prompts[namespace_of(req)].add((first, talk.compactions))
        self.left[newest] = Left(
            *(namespace_of(req), separated(req), tokens, sent, row, dict(computed), talk)
        )
        self.turns.append(req)
        self.count["histories"] += 1

    def _check_histories(self) -> None:
        """None is dropped as long as the tree has its KV, and room for what is known of it."""
        memory = self.runtime.histories.memory
        full = memory.used_bytes and not memory.fits(self.recorder.request_bytes())
        known = self.runtime.histories._by_use
        states = (getattr(req, "skipkv", None) for req in self.owners())
        rows = [one.reuse.continued.key for one in states if one and one.reuse.continued]
        for history in [one for one in self.left if one not in known]:
            left, key = self.left.pop(history), history.key + history.padding
            last = key[-1]
            self.count["histories lost"] += 1
            # Text that is computed again brings its keys back. A private one comes back with a
            # request that continues this history and was restored from host memory.
            returns = last < VOCAB or any(last in key for key in (*rows, *(h.key for h in known)))
            if self.ample and not full and not returns:
                whole = self._has_all(key, left.apart, len(left.row) - self.boundary_tokens)
                assert not whole, "a history was dropped that could be continued"
