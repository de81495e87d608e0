"""The books of a ``DecodeWorld``: rows that arrive and come back, and how requests end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pool_books import Books
from pool_content import POOL, full_tags
from pool_turns import Conversation, Entry, separated

from sgl_skipkv.patches.engine.future_kv import growth_tokens
from sgl_skipkv.patches.engine.output import summary_of
from sgl_skipkv.request.pages import page_ceil

#: of what a request may still generate, how much SGLang counts before it begins
CLIPPED = 8


class DecodeBooks(Books):
    """In front of ``World``.

    Attributes:
        started, begun: requests that run, and that ever did, by id.
        ends: request id -> how often its client was told that it has ended.
        closes: request id -> how often it was closed.
        copies: request id -> how often its row was copied to our host memory.
        tokens: request id -> how many tokens it has generated.
        needed: request id -> slots that had to be free for its row to come back.
        only_budgets: whether every request that ever had a row had a budget.
    """

    def __init__(self, **how: Any) -> None:
        self.started, self.begun = set[str](), set[str]()
        self.ends, self.closes = Counter[str](), Counter[str]()
        self.copies, self.tokens = Counter[str](), Counter[str]()
        self.only_budgets = True
        self.needed: dict[str, int] = {}
        super().__init__(**how)

    def _count_calls(self) -> None:
        """Count what is called for each request."""

        def counted(original: Any, calls: Counter[str]) -> Any:
            def call(state: Any, *arguments: Any) -> Any:
                calls[state.rid] += 1
                return original(state, *arguments)

            return call

        self.runtime.close = counted(self.runtime.close, self.closes)
        self.runtime.back_up = counted(self.runtime.back_up, self.copies)

    # -- ends

    def send_abort_output(self, abort: Any, req: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler

        Scheduler.send_abort_output(self, abort, req)

    def _send_abort(self, abort: Any, req: Any) -> None:
        """A request ends outside of the output stream."""
        self.count["refused"] += 1
        self.aborted.append(req)
        reason = abort.finished_reason or {}
        self._end(req, with_summary=reason.get("skipkv", "null") != "null")

    def _stream(self, reqs: Any, return_logprob: bool = False) -> None:
        """``SchedulerOutputStreamer.stream_output``: of requests that have ended."""
        for req in reqs:
            if req.finished() and not req.finished_output:
                req.finished_output = True
                self._end(req, with_summary=summary_of(req) is not None)

    def _end(self, req: Any, *, with_summary: bool) -> None:
        state = getattr(req, "skipkv", None)
        self.ends[req.rid] += 1
        assert self.ends[req.rid] == 1, "a client is told twice"
        self.backed_up.pop(req.rid, None)
        if state is None:
            return
        assert with_summary, "a client is told no summary"
        if req.rid in self.begun and state.settings.changes_kv:
            assert len(req.output_ids) == self.tokens[req.rid], "a token is lost, or there twice"

    # -- books

    def _book_rows(self) -> None:
        """SGLang has given rows to requests, and taken some back."""
        self._drop_rows()
        for req in self.waiting():
            if req.kv.holds_kv and req.rid not in self.rows:
                came_back = req.rid in self.backed_up
                self.rows[req.rid] = self._came_back(req) if came_back else self._received(req)

    def _drop_rows(self) -> None:
        holds = {req.rid for req in self.arrived if req.kv.holds_kv}
        for rid in [rid for rid in self.rows if rid not in holds]:
            del self.rows[rid]
            self.started.discard(rid)

    def _received(self, req: Any) -> list[Entry]:
        """What its row will hold when it has arrived; the tree has the beginning of it."""
        prompt = req.origin_input_ids
        self.talks[req.rid] = Conversation(prompt, len(prompt), len(prompt), 0, len(prompt))
        self.talks[req.rid].prefilled_tokens = len(prompt)
        state = getattr(req, "skipkv", None)
        self.only_budgets &= state is not None and state.settings.evicts
        slots, shared = self._row(req), req.kv.cache_protected_len
        tags = full_tags([*prompt, *req.output_ids][: len(slots)], separated(req))
        assert len(slots) == len(tags)
        known = [self.content[slot] for slot in slots[:shared]]
        assert known == tags[:shared], "foreign KV under this text's key"
        self.content.update(zip(slots, tags, strict=True))
        self.computed[req.rid] = dict(enumerate(tags))
        self.count["prefix hits"] += shared > 0
        self.count["received"] += 1
        return [Entry(at, tag) for at, tag in enumerate(tags)]

    def _came_back(self, req: Any) -> list[Entry]:
        """A row is restored: the same KV in other slots."""
        held, slots = self.backed_up.pop(req.rid), self._row(req)
        state = getattr(req, "skipkv", None)
        if state is not None and state.settings.evicts:
            own = page_ceil(len(held), self.page_size)
            assert self.needed[req.rid] >= own + growth_tokens(state, req), "no room to grow"
        tags = [entry.tag for entry in held]
        self._check_stored(slots, tags)
        self.content.update(zip(slots, tags, strict=True))
        self.count["restored"] += 1
        return held

    def _check_open_sentence(self, req: Any) -> None:
        state, last = req.skipkv, self.rows[req.rid][-1]
        if state.held.is_silent and last.position + 1 < state.kv.recorded_tokens:
            return  # its step has not been launched, which computes what is recorded already
        super()._check_open_sentence(req)

    def _lose_row(self, req: Any) -> None:
        """A retraction. Without a budget SGLang has a copy."""
        state, row = getattr(req, "skipkv", None), self.rows[req.rid]
        super()._lose_row(req)
        assert self.copies[req.rid] <= req.retraction_count, "a row is copied twice"
        if state is None or not state.settings.evicts:
            self.backed_up[req.rid] = row[: len(req.origin_input_ids) + len(req.output_ids) - 1]
            self.count["copies of SGLang"] += 1

    # -- invariants

    def check(self) -> None:
        super().check()
        if self.only_budgets:
            assert not self.count["retractions, pool full"], "more is admitted than can grow"
        if self.only_budgets and not any(req.finished() for req in self.running_batch.reqs):
            growth = sum(growth_tokens(req.skipkv, req) for req in self.owners())
            reserved = self.disagg_decode_prealloc_queue._active_reserved_tokens()
            assert reserved == growth, "what rows may grow is reserved, and no more"
        for req in self.running_batch.reqs:
            text, filled = [*req.origin_input_ids, *req.output_ids], req.full_untruncated_fill_ids
            assert [*filled] == text[: len(filled)], "SGLang appends to another input"
        self._check_needed()

    def _check_needed(self) -> None:
        """What SGLang keeps for the longest request is what all others cannot give back."""
        running = self.running_batch.reqs
        if any(req.rid not in self.rows for req in running) or not running:
            return
        most, held, logical = [], 0, 0
        for req in running:
            state, left = getattr(req, "skipkv", None), req.sampling_params.max_new_tokens
            if state is not None and state.settings.evicts:
                left = growth_tokens(state, req)
            row = self.rows[req.rid]
            most.append(min(left, CLIPPED) + len(req.origin_input_ids))
            tokens = len(req.origin_input_ids) + len(req.output_ids)
            logical, held = logical + tokens, held + tokens - (row[-1].position + 1 - len(row))
        queue = self.disagg_decode_prealloc_queue
        needed = queue._need_space_for_single_req(logical)
        assert needed == max(most) - held, "rows hold less than their texts"
        for req in (one.req for one in queue.queue):
            if getattr(req, "skipkv", None) is None:
                own = queue._rebootstrap_prefill_len(req)
                own += min(req.sampling_params.max_new_tokens, CLIPPED)
                needed = queue._required_admission_tokens(req, -POOL, 0, logical)
                assert needed == max(own - held, queue.num_reserved_decode_tokens - POOL)

    def _check_tables(self, owners: list[Any]) -> None:
        super()._check_tables([req for req in owners if req.rid in self.started])
        for req in self.arrived:
            if getattr(req, "skipkv", None) is None:
                continue
            closes, ends = self.closes[req.rid], self.ends[req.rid]
            assert closes == ends, f"{req.rid} is closed {closes} times, and has ended {ends} times"


def computed_again(req: Any) -> bool:
    """Whether a pause has sent the request back to the prefill server."""
    return bool(getattr(req, "pd_rebootstrap_in_progress", False))
