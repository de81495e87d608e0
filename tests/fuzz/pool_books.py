"""What the pools must hold: rows as plain lists, and every invariant."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from budgets import budget_at, least_budget
from pool_content import (
    DELIMITER,
    HEAD_DIM,
    POOL,
    ROWS,
    TRACKED,
    full_tags,
    hidden_of,
    keys_of,
    queries_of,
    tags_of,
    values_of,
)
from pool_turn_books import TurnBooks
from pool_turns import Apart, Conversation, Entry, Left, closed_sentences, separated

from sgl_skipkv.request.demand import AHEAD_TOKENS
from sgl_skipkv.request.pages import page_ceil


class Books(TurnBooks):
    """The books of a ``World``, which adds SGLang's objects and the scheduler's loop.

    Attributes:
        rows: request id -> its row; content: slot -> hash of what was last written there.
        backed_up: request id -> the row that it had, of retracted requests that keep theirs.
        recomputed: requests whose row may be longer than their bound until they compact.
        first_prompts: of conversations that left something, by namespace, and how often they had
            been compacted.
        generated: request id -> its generated tokens that were ever fed; computed: what came of
            each position, evicted or not, when that was last computed.
        talks: request id -> what its row has been through; left: what finished requests left, by
            the history that the runtime keeps of it; turns: the requests that left something, also
            if that is lost.
        ample: whether the runtime has room for all histories, so that it loses none.
        head_dim: numbers of a key, a multiple of ``HEAD_DIM``; kernels read 16 and more.
        count: what happened, so that a test can tell an empty run.
    """

    #: how far a row may grow past the length at which it is due
    beyond_due_tokens = 1

    def __init__(self) -> None:
        self.rows: dict[str, list[Entry]] = {}
        self.content: dict[int, int] = {}
        self.backed_up: dict[str, list[Entry]] = {}
        self.recomputed: set[str] = set()
        self.first_prompts: defaultdict[Any, set[tuple[tuple[int, ...], int]]] = defaultdict(set)
        self.generated: dict[str, list[int]] = {}
        self.computed: dict[str, dict[int, int]] = {}
        self.talks: dict[str, Conversation] = {}
        self.left: dict[Any, Left] = {}
        self.turns: list[Any] = []
        self.ample = True
        self.count = Counter[str]()
        self.head_dim, self.device = HEAD_DIM, torch.device("cpu")

    def widened(self, content: torch.Tensor) -> torch.Tensor:
        """Keys, values or queries of ``HEAD_DIM`` numbers in as many as a head has here."""
        return content.repeat(1, 1, self.head_dim // HEAD_DIM)

    def owners(self) -> list[Any]:
        """Every request that holds a row, once."""
        batches = [self.last_batch, self.running_batch]
        found = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
        if self.chunked_req is not None:
            found[id(self.chunked_req)] = self.chunked_req
        return [req for req in found.values() if req.kv.holds_kv]

    # -- rows

    def _matched(self, req: Any) -> list[Entry]:
        """A prefix hit is the text's own content, whoever computed it; of a request that continues
        a history, the history's row and the content of the text behind it."""
        slots = self._row(req)[: req.prefix_len]
        before = self._continued(req, slots)
        text = [*self.prompt_of(req), *req.output_ids]
        talk = self.talks[req.rid]
        talk.prefilled_tokens = len(text)
        logical_tokens = talk.cut + len(slots) - len(before)
        tags = full_tags(text[:logical_tokens], separated(req), before)
        own = slots[req.kv.cache_protected_len :]
        if req.host_loaded_length:
            self.loads.wait()
            self._check_stored(slots, tags)
            self.count["loaded"] += 1
        if own:  # copied, as what it is in the tree
            self._check_stored(slots, tags)
            self.content.update(zip(slots, tags, strict=True))
            self.count["copied"] += 1
        assert [self.content[slot] for slot in slots] == tags, "foreign KV under this text's key"
        behind = [Entry(at, tag) for at, tag in enumerate(tags[len(before) :], start=talk.cut)]
        return [*before, *behind]

    def book_loaded(self, slots: list[int]) -> None:
        """What HiCache has loaded into these slots is what it is."""
        values = self.token_to_kv_pool_allocator.get_kvcache().get_value_buffer(0)[slots]
        tags = tags_of(values[..., :HEAD_DIM])
        self.content.update(zip(slots, tags, strict=True))

    def _check_stored(self, slots: list[int], tags: Sequence[int]) -> None:
        """What the device holds is what the books say."""
        kv_pool = self.token_to_kv_pool_allocator.get_kvcache()
        keys, values = (
            buffer[slots].cpu()
            for buffer in (kv_pool.get_key_buffer(0), kv_pool.get_value_buffer(0))
        )
        assert torch.equal(keys, self.widened(keys_of(tags)))
        assert torch.equal(values, self.widened(values_of(tags)))

    # -- retractions

    def _lose_row(self, req: Any) -> None:
        """A retraction; what a backup has is what the row had."""
        row, state = self.rows.pop(req.rid), getattr(req, "skipkv", None)
        self.count["retractions"] += 1
        if state is None or state.offloaded.backup is None:
            return
        held = row[: state.offloaded.backup.row_tokens]
        assert held[-1].position == len(self.prompt_of(req)) + len(req.output_ids) - 2
        self.backed_up[req.rid] = held
        self.count["backups"] += 1

    def _restored(self, req: Any) -> list[Entry]:
        """A row comes back: the same KV in other slots, and of the prompt what the tree has."""
        held = self.backed_up.pop(req.rid)
        slots, shared = self._row(req)[: req.prefix_len], req.kv.cache_protected_len
        assert len(held) == len(slots)
        assert [self.content[slot] for slot in slots[:shared]] == [e.tag for e in held[:shared]]
        self._check_stored(slots, [entry.tag for entry in held])
        self.content.update(zip(slots, (entry.tag for entry in held), strict=True))
        self.count["restored"] += 1
        return held

    def probe(self, tokens: Sequence[int], apart: Apart = (None, None)) -> int:
        """How much of a text the tree has; what it gives out must be that text's own content."""
        found = self._in_tree(tokens, apart)
        expected = full_tags(tokens[: len(found)], apart)
        assert found == expected, "foreign KV under this text's key"
        return len(found)

    def probe_histories(self) -> None:
        """What the tree has of a history is that history's row."""
        for history in filter(attrgetter("has_kv"), self.runtime.histories._by_use):
            left = self.left[history]
            found = self._in_tree(history.key + history.padding, left.apart)[: len(left.row)]
            expected = [entry.tag for entry in left.row]
            assert found == expected[: len(found)], "foreign KV under a history's key"

    def _match(self, key: Sequence[int], apart: Apart) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        extra_key, cache_salt = apart
        wanted = RadixKey(token_ids=array("q", key), extra_key=extra_key, cache_salt=cache_salt)
        return self.tree_cache.match_prefix(MatchPrefixParams(key=wanted))

    def _has_all(self, key: Sequence[int], apart: Apart, tokens: int) -> bool:
        """Whether the tree has so many tokens of this key, on the device or in host memory."""
        match = self._match(key, apart)
        return bool(match.device_prefix_len + match.host_hit_length >= tokens)

    def _in_tree(self, key: Sequence[int], apart: Apart) -> list[int]:
        """The content of as much of this key as the tree has on the device."""
        match = self._match(key, apart)
        slots = self.tree_cache.path_device_indices(match.last_device_node).tolist()
        # Nothing is ever written to what fills up a history's last page.
        return [self.content.get(slot, 0) for slot in slots[: match.device_prefix_len]]

    # -- the books of a compaction

    def _row(self, req: Any) -> list[int]:
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        return row[: req.kv.kv_allocated_len].tolist()

    @staticmethod
    def _compactions(req: Any) -> int:
        state = getattr(req, "skipkv", None)
        return 0 if state is None else state.report.compactions

    def _book_compaction(self, req: Any, before: list[int]) -> None:
        """Kept + freed = old, the pinned entries among the kept, in order, and behind them what no
        finished step has written."""
        state, old, talk = req.skipkv, self._evictable(req), self.talks[req.rid]
        coming, tail = self.rows[req.rid][len(old) :], before[len(old) :]
        before = before[: len(old)]
        assert [self.content[slot] for slot in before] == [entry.tag for entry in old]
        shared = req.kv.cache_protected_len
        assert shared <= talk.prompt_row_tokens, "others read what it evicts from"
        kept = set(state.kv.last.positions.tolist())
        stays = [entry.position in kept for entry in old]
        settings, params = state.settings, state.settings.policy.params
        pinned = {entry.position for entry in old[-params.window :]}
        pinned |= {entry.position for entry in old if entry.position < params.sink}
        if params.protect_prompt:
            pinned |= {entry.position for entry in old if entry.position < talk.prompt_tokens}
        assert pinned <= kept and len(kept) == sum(stays)
        compactions = talk.compactions + state.report.compactions
        generated = old[-1].position + 1 - talk.prompt_tokens
        budget = budget_at(
            settings.policy, settings.kv_budget, compactions, generated, talk.prompt_tokens
        )
        budget = min(budget, self._covering(req, old, budget))
        assert len(kept) == budget + settings.prompt_on_top(talk.prompt_row_tokens)
        if state.held.track_id:
            newest = old[-params.window :]
            if settings.policy.needs_attention and not settings.policy.needs_queries:
                # of decode steps only
                newest = [entry for entry in newest if entry.position >= talk.prefilled_tokens]
            last, count = newest[-1].position, len(newest)
            ring = self.recorder.queries.read(state.held.track_id, last, count)
            # By position: those of dropped thoughts are among them.
            tags = [self.computed[req.rid][at] for at in range(last - count + 1, last + 1)]
            own = queries_of(tags)
            assert torch.equal(ring[0].flip(0).cpu(), self.widened(own)), "somebody else's queries"
        after = self._row(req)
        left = [entry for entry, stay in zip(old, stays, strict=True) if stay]
        if self.page_size == 1:
            kept_slots = [slot for slot, stay in zip(before, stays, strict=True) if stay]
            assert after == kept_slots + tail, "the tail follows what is kept"
            freed = {slot for slot, stay in zip(before, stays, strict=True) if not stay}
        else:  # KV moves, and slots stay
            slots = before + tail
            assert after == slots[: len(left) + len(tail)]
            tags = [entry.tag for entry in left] + [self.content.get(slot, 0) for slot in tail]
            self.content.update(zip(after[shared:], tags[shared:], strict=True))
            written = len(left) + len(coming)
            self._check_stored(after[:written], tags[:written])
            freed = set(slots[page_ceil(len(after), self.page_size) :])
        assert freed <= set(self._free_slots()) and not freed & set(after)
        self.rows[req.rid] = left + coming
        talk.compacted_at = old[-1].position + 1
        if settings.policy.needs_sentences:
            self._check_closed_sentences(req, talk)
        self.recomputed.discard(req.rid)
        self.count["compactions"] += 1
        self.count["evicted"] += len(old) - len(left)
        self.count["compactions in pages"] += self.page_size > 1

    def _covering(self, req: Any, old: Sequence[Entry], budget: int) -> int:
        """The budget that the row's last queries asked for a few steps before a compaction."""
        settings, talk, demand = req.skipkv.settings, self.talks[req.rid], req.skipkv.kv.demand
        params, now = settings.policy.params, old[-1].position + 1
        row_tokens = settings.budgeted_tokens(len(old), talk.prompt_row_tokens)
        measured = 0 if demand is None else demand.logical_tokens
        if params.coverage == 1 or not talk.compacted_at < measured <= now - AHEAD_TOKENS:
            assert row_tokens >= budget, "evicted for no reason"
            return budget
        entries = [entry for entry in old if entry.position < measured]
        tags = [self.computed[req.rid][at] for at in range(measured - params.window, measured)]
        queries = self.widened(queries_of(tags)).double()
        keys = self.widened(keys_of([entry.tag for entry in entries])).double()
        logits = torch.einsum("qhd,kd->qhk", queries, keys[:, 0]) / self.head_dim**0.5
        last_seen = torch.arange(len(entries) - params.window, len(entries))
        hidden = torch.arange(len(entries)) > last_seen[:, None]
        attention = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=2)
        pinned = talk.prompt_row_tokens if params.protect_prompt else 0
        received = attention.mean(dim=1).sum(dim=0)[pinned:].sort(descending=True).values
        reached = torch.cat([received.new_zeros(1), received.cumsum(dim=0)])
        wanted, count = params.coverage * float(reached[-1]), demand.measured_row_tokens - pinned
        assert reached[count - 1] - 1e-5 < wanted < reached[count] + 1e-5, "another demand"
        self.count["demands"] += 1
        needed = demand.measured_row_tokens + now - measured
        needed -= settings.prompt_on_top(talk.prompt_row_tokens)
        return max(needed, least_budget(settings.policy, talk.prompt_tokens))

    def _check_closed_sentences(self, req: Any, talk: Conversation) -> None:
        """After a compaction the table has the mean of every sentence that it still names."""
        state, tags = req.skipkv, {**self.computed[req.rid], **talk.in_sentences}
        text = self._text_of(req)[: talk.compacted_at]
        own = closed_sentences(text, talk.sentences_from, DELIMITER)
        closed = [state.span(i) for i in range(len(state.sentences.tracker.closed))]
        assert closed == [*talk.closed, *own], "sentences begin and end elsewhere"
        vectors = self.recorder.sentences.vectors[state.held.track_id].cpu()
        for vector, sentence in zip(vectors, state.sentences.table, strict=False):
            hidden = hidden_of([tags[at] for at in range(*closed[sentence])])
            unit = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0)
            torch.testing.assert_close(vector, unit)

    def _check_open_sentence(self, req: Any) -> None:
        """Its running sum has every token once: a delimiter ends it, and the token after begins.

        Of a request that no launched step has yet to record for.
        """
        first, table = self.talks[req.rid].sentences_from, self.recorder.sentences
        fed = self._in_sentences(req)[-1].position + 1 - first  # of a prefill in chunks, so far
        if fed <= 0:
            return
        text, tags = self._text_of(req), self.computed[req.rid]
        tokens = text[first : first + fed]
        begins = len(tokens) - 1
        while begins and not (tokens[begins - 1] == DELIMITER != tokens[begins]):
            begins -= 1
        own = hidden_of([tags[first + i] for i in range(begins, len(tokens))])
        track_id = req.skipkv.held.track_id
        assert int(table.length[track_id]) == len(own), "a token is missing, or there twice"
        torch.testing.assert_close(table.total[track_id].cpu(), own.sum(dim=0))

    def _text_of(self, req: Any) -> list[int]:
        """Its prompt and its generated tokens that were ever fed."""
        return [*self.prompt_of(req), *self.generated.get(req.rid, ())]

    def _free_slots(self) -> list[int]:
        pages = self.token_to_kv_pool_allocator.get_all_free_pages().tolist()
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]

    # -- invariants

    def check(self) -> None:
        """SGLang's accounting, slot ownership, row contents, lengths, bounds, and our tables."""
        owners, free = self.owners(), self._free_slots()
        in_tree: list[int] = self.tree_cache.all_values_flatten().tolist()
        private: list[int] = []
        if self.tree_cache.cache_controller is not None:
            self.tree_cache.check_hicache_events()  # what has been copied is unlocked
        self._check_histories()
        assert set(self.rows) == {req.rid for req in owners}
        for req in owners:
            private += self._check_request(req, set(in_tree))
        evictable, locked = self.tree_cache.evictable_size(), self.tree_cache.protected_size()
        assert evictable + locked == len(in_tree)
        shared = {slot for req in owners for slot in self._shared_slots(req)}
        assert locked == len(shared), "a lock of nobody"
        assert len(free) + evictable + locked + len(private) == POOL, "pool accounting"
        everywhere = free + in_tree + private
        assert len(set(everywhere)) == POOL, "a slot has two owners"
        slots = range(self.page_size, POOL + self.page_size)
        assert set(everywhere) == set(slots), "page 0 is nobody's"
        self._check_tables(owners)
        batch = self.running_batch
        if not batch.is_empty() and batch.seq_lens_cpu is not None:
            assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist()

    def check_empty(self) -> None:
        """Nobody holds a slot any more, and the tree is empty."""
        assert len(self._free_slots()) == POOL

    def _check_request(self, req: Any, in_tree: set[int]) -> list[int]:
        """One request against the books; its private slots."""
        kv, row, slots = req.kv, self._committed(req), self._row(req)
        self._check_slots(req, slots)
        page, shared = self.page_size, kv.cache_protected_len
        assert [slot % page for slot in slots] == [i % page for i in range(len(slots))], req.rid
        firsts = slots[shared::page]
        private = [first + i for first in firsts for i in range(page)]  # whole pages
        assert shared % page == 0 and private[: len(slots) - shared] == slots[shared:]
        assert set(self._shared_slots(req)) <= in_tree
        state = getattr(req, "skipkv", None)
        if state is None or not state.settings.evicts:
            return private
        assert state.kv.evicted_tokens == row[-1].position + 1 - len(row)
        own_text = sum(entry.position < len(self.prompt_of(req)) for entry in row)
        assert kv.cache_protected_len <= (0 if state.keeps_prompt_private else own_text)
        settings, prompt = state.settings, self.talks[req.rid].prompt_row_tokens
        if req.rid not in self.recomputed and not settings.policy.params.count_prompt:
            talk = self.talks[req.rid]
            compactions = talk.compactions + state.report.compactions
            generated = row[-1].position + 1 - talk.prompt_tokens
            budget = budget_at(settings.policy, settings.kv_budget, compactions, generated)
            bound = budget + settings.policy.params.interval + self.beyond_due_tokens
            assert len(row) - prompt <= bound, "the bound of the contract"
        return private

    def _committed(self, req: Any) -> list[Entry]:
        """Its row, as far as SGLang knows it."""
        return self.rows[req.rid]

    def _evictable(self, req: Any) -> list[Entry]:
        """Of these, what a compaction may evict from."""
        return self._committed(req)

    def _in_sentences(self, req: Any) -> list[Entry]:
        """Its row, as far as the table of sentences has it."""
        return self.rows[req.rid]

    def _check_slots(self, req: Any, slots: list[int]) -> None:
        """Lengths of its row, and what its slots hold."""
        kv, row = req.kv, self.rows[req.rid]
        assert kv.kv_committed_len == kv.kv_allocated_len == len(row), req.rid
        assert [self.content[slot] for slot in slots] == [entry.tag for entry in row], req.rid

    def _shared_slots(self, req: Any) -> list[int]:
        return self._row(req)[: req.kv.cache_protected_len]

    def _check_tables(self, owners: list[Any]) -> None:
        """Our state belongs to rows, one slot each, and to nothing else."""
        states = [req.skipkv for req in owners if getattr(req, "skipkv", None) is not None]
        assert self.runtime.open_requests == len(states)
        assert self.runtime.host_memory.used_bytes <= self.runtime.host_memory.slab_bytes
        lent = {
            req.kv.req_pool_idx: req.skipkv.held.track_id
            for req in owners
            if hasattr(req, "skipkv")
        }
        slots = [slot for slot in lent.values() if slot]
        assert len(slots) == len(set(slots)) == TRACKED - len(self.recorder.free_tracks)
        assert all(state.failure is None for state in states)
        silent = {state.held.row for state in states if state.held.is_silent}
        held = [0 if row in silent else lent.get(row, 0) for row in range(ROWS + 1)]
        assert self.recorder.track_of_row.tolist()[: ROWS + 1] == held
