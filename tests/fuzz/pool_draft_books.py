"""The books of lives with speculative decoding, see ``pool_drafts.py``."""

from __future__ import annotations

from typing import Any

from pool_books import Books
from pool_turns import Entry


class DraftBooks(Books):
    """A row is known up to the last result. Behind that it has a tail of slots for drafts: what the
    running step has written there, right or wrong, and slots that nothing was written to.

    ``rows`` has the right drafts of the running step, too.

    Attributes:
        chain_tokens: of a verify step.
        running: request id -> tokens of its row, of each step whose result is not known yet.
        rejected: request id -> hashes of the wrong drafts of its last step.
        last_step: request id -> how many tokens of its row are of the last step that was launched.
        longest: request id -> tokens of its row when it was longest.
        in_sentences: requests whose last step was added to the table of sentences before the next
            one came, by a compaction.
    """

    chain_tokens: int
    overlap: bool

    def __init__(self, **how: Any) -> None:
        self.running: dict[str, list[int]] = {}
        self.rejected: dict[str, list[int]] = {}
        self.last_step: dict[str, int] = {}
        self.longest: dict[str, int] = {}
        self.in_sentences: set[str] = set()
        super().__init__(**how)

    @property
    def beyond_due_tokens(self) -> int:
        """With overlap two steps add a chain before their tokens are compared with the budget: the
        one that is running then, and the one that is launched."""
        return self.chain_tokens * (1 + self.overlap) - 1

    def _committed(self, req: Any) -> list[Entry]:
        row = self.rows[req.rid]
        return row[: len(row) - sum(self.running.get(req.rid, ()))]

    def _evictable(self, req: Any) -> list[Entry]:
        """With overlap the last step's tokens stay, also if its result is known."""
        if not self.overlap:
            return self._committed(req)
        row = self.rows[req.rid]
        return row[: len(row) - self.last_step.get(req.rid, 0)]

    def _in_sentences(self, req: Any) -> list[Entry]:
        """All but the last step's tokens."""
        row, last = self.rows[req.rid], self.last_step.get(req.rid, 0)
        return row if req.rid in self.in_sentences else row[: len(row) - last]

    def _check_slots(self, req: Any, slots: list[int]) -> None:
        self._note_length(req)
        tail_slots = req.kv.kv_allocated_len - req.kv.kv_committed_len
        most_slots = 2 * self.chain_tokens + self.page_size - 1
        assert 0 <= tail_slots <= most_slots, "slots that are reserved for drafts"
        tags = self._written(req)
        assert [self.content[slot] for slot in slots[: len(tags)]] == tags, req.rid

    def _written(self, req: Any) -> list[int]:
        """What its row holds, and behind that the wrong drafts of its last step."""
        return [entry.tag for entry in self.rows[req.rid]] + self.rejected.get(req.rid, [])

    def _note_length(self, req: Any) -> None:
        row_tokens = req.kv.kv_committed_len
        assert row_tokens == len(self._committed(req)), "committed tokens"
        self.longest[req.rid] = max(self.longest.get(req.rid, 0), row_tokens)

    def _check_summary(self, req: Any) -> None:
        """A request that has ended reports tokens, and no slots that were reserved for drafts."""
        state = getattr(req, "skipkv", None)
        if state is not None and not state.settings.policy.params.count_prompt:
            peak = state.report.summary["peak_kv_tokens"]
            uncounted_tokens = self.talks[req.rid].prompt_row_tokens
            assert peak <= self.longest[req.rid] - uncounted_tokens, "tokens of its row"

    def _lose_row(self, req: Any) -> None:
        """What the running step has accepted is lost, too."""
        super()._lose_row(req)
        self._forget_step(req)
        if req.rid in self.backed_up and (last := req.skipkv.kv.last) is not None:
            end = self.backed_up[req.rid][-1].position + 1
            assert last.logical_tokens + last.running_tokens <= end, "seen by what is dropped"
        del self.generated[req.rid][len(req.output_ids) :]

    def _leave_running_step(self, req: Any) -> None:
        """What it adds is nobody's, nor is what was accepted behind the stop."""
        text = len(self.prompt_of(req)) + len(req.output_ids_through_stop)
        self.rows[req.rid] = [one for one in self._committed(req) if one.position < text]

    def _forget_step(self, req: Any) -> None:
        self.running.pop(req.rid, None)
        self.last_step.pop(req.rid, None)
        self.rejected.pop(req.rid, None)
        self.in_sentences.discard(req.rid)

    def _book_compaction(self, req: Any, before: list[int]) -> None:
        """It evicts from what finished steps have written, and the tail follows what is kept."""
        row_tokens = len(self._evictable(req))
        running = len(self.rows[req.rid]) - row_tokens
        if not self.overlap:  # its tokens are known
            self.in_sentences.add(req.rid)
        super()._book_compaction(req, before)
        tags = self._written(req)
        self._check_stored(self._row(req)[: len(tags)], tags)
        last = req.skipkv.kv.last
        assert (last.row_tokens, last.running_tokens) == (row_tokens, running)
        known = not self.running.get(req.rid)
        self.count["compactions behind a step"] += known and running > 0
        self.count["compactions beside a step"] += not known
        self.count["compactions with a tail"] += len(before) > row_tokens
