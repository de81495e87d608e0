"""What the pools must hold: content by hashes, rows as plain lists, and every invariant.

A slot's content is a hash of all that a real forward pass would have looked at: the token, its
position, and the hashes in the row before it. So a slot holds the right content exactly if its hash
is that of the token's full prefix, and one eviction makes every later hash different.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

POOL, ROWS, CONTEXT, TRACKED = 96, 4, 400, 2
KV_HEADS, QUERY_HEADS, HEAD_DIM, HIDDEN = 1, 2, 4, 4
KV_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
VOCAB, DELIMITER, STOP = 50, 1, 2

_draw = torch.Generator().manual_seed(0)
KEYS = torch.randn(61, KV_HEADS, HEAD_DIM, generator=_draw)
QUERIES = torch.randn(67, QUERY_HEADS, HEAD_DIM, generator=_draw)
HIDDENS = torch.randn(71, HIDDEN, generator=_draw)


@contextlib.contextmanager
def plugin_and_topology() -> Iterator[None]:
    """SGLang with its plugins loaded (ours among them) and a published CPU configuration."""
    from sglang.srt.plugins import load_plugins
    from sglang.test.test_utils import published_topology

    from sgl_skipkv.patches import registry

    load_plugins()
    assert registry.problems() == []
    torch.set_num_threads(1)
    with published_topology(role="scheduler", device="cpu", attention_backend="torch_native"):
        yield


class Entry(NamedTuple):
    """What the books say about one entry of a row."""

    position: int
    tag: int


def tag_after(tags: Sequence[int], position: int, token: int, factor: float = 0.0) -> int:
    """The content of a token that sees this row, and is steered with that factor."""
    return hash((token, position, *tags) if not factor else (token, position, factor, *tags))


def full_tags(tokens: Sequence[int]) -> list[int]:
    """The content of every token of a prefix that nothing was evicted from."""
    tags: list[int] = []
    for position, token in enumerate(tokens):
        tags.append(tag_after(tags, position, token))
    return tags


def keys_of(entries: Sequence[Entry]) -> torch.Tensor:
    return KEYS[[entry.tag % len(KEYS) for entry in entries]]


def values_of(entries: Sequence[Entry]) -> torch.Tensor:
    """The tag itself, in four numbers that float32 holds exactly."""
    words = [[(entry.tag >> shift) & 0xFFFF for shift in (0, 16, 32, 48)] for entry in entries]
    return torch.tensor(words, dtype=torch.float32).view(-1, KV_HEADS, HEAD_DIM)


class Books:
    """The books of a ``World``, which adds SGLang's objects and the scheduler's loop.

    Attributes:
        rows: request id -> its row; content: slot -> hash of what was last written there.
        backed_up: request id -> the row that it had, of retracted requests that keep theirs.
        recomputed: requests whose row may be longer than their bound until they compact.
        generated: request id -> its generated tokens that were ever fed; computed: what came of
            each, evicted or not, when that was last computed.
        head_dim: numbers of a key, a multiple of ``HEAD_DIM``; kernels read 16 and more.
        count: what happened, so that a test can tell an empty run.
    """

    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    tree_cache: Any
    runtime: Any
    recorder: Any
    running_batch: Any
    last_batch: Any
    chunked_req: Any

    def __init__(self) -> None:
        self.rows: dict[str, list[Entry]] = {}
        self.content: dict[int, int] = {}
        self.backed_up: dict[str, list[Entry]] = {}
        self.recomputed: set[str] = set()
        self.generated: dict[str, list[int]] = {}
        self.computed: dict[str, dict[int, int]] = {}
        self.count = Counter[str]()
        self.head_dim = HEAD_DIM

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
        """A prefix hit is the text's own content, whoever computed it."""
        slots = self._row(req)[: req.prefix_len]
        tags = full_tags(req.get_fill_ids()[: req.prefix_len])
        assert [self.content[slot] for slot in slots] == tags, "foreign KV under this text's key"
        return [Entry(position, tag) for position, tag in enumerate(tags)]

    def _lose_row(self, req: Any) -> None:
        """A retraction; what a backup has is what the row had."""
        row, state = self.rows.pop(req.rid), getattr(req, "skipkv", None)
        self.count["retractions"] += 1
        if state is None or state.offloaded.backup is None:
            return
        held = row[: state.offloaded.backup.row_tokens]
        assert held[-1].position == len(req.origin_input_ids) + len(req.output_ids) - 2
        self.backed_up[req.rid] = held
        self.count["backups"] += 1

    def _restored(self, req: Any) -> list[Entry]:
        """A row comes back: the same KV in other slots, and of the prompt what the tree has."""
        held = self.backed_up.pop(req.rid)
        slots, shared = self._row(req)[: req.prefix_len], req.kv.cache_protected_len
        assert len(held) == len(slots)
        assert [self.content[slot] for slot in slots[:shared]] == [e.tag for e in held[:shared]]
        kv_pool = self.token_to_kv_pool_allocator.get_kvcache()
        assert torch.equal(kv_pool.get_key_buffer(0)[slots], self.widened(keys_of(held)))
        assert torch.equal(kv_pool.get_value_buffer(0)[slots], self.widened(values_of(held)))
        self.content.update(zip(slots, (entry.tag for entry in held), strict=True))
        self.count["restored"] += 1
        return held

    def probe(self, tokens: Sequence[int]) -> int:
        """How much of a text the tree has; what it gives out must be that text's own content."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(token_ids=array("q", tokens), extra_key=None)
        match = self.tree_cache.match_prefix(MatchPrefixParams(key=key))
        slots = self.tree_cache.path_device_indices(match.last_device_node).tolist()
        found = [self.content[slot] for slot in slots[: match.device_prefix_len]]
        assert found == full_tags(tokens)[: len(found)], "foreign KV under this text's key"
        return len(found)

    # -- the books of a compaction

    def _row(self, req: Any) -> list[int]:
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots: list[int] = row[: req.kv.kv_allocated_len].tolist()
        return slots

    @staticmethod
    def _compactions(req: Any) -> int:
        state = getattr(req, "skipkv", None)
        return 0 if state is None else state.report.compactions

    def _book_compaction(self, req: Any, before: list[int]) -> None:
        """Kept + freed = old, the pinned entries among the kept, in order."""
        state, old = req.skipkv, self.rows[req.rid]
        assert [self.content[slot] for slot in before] == [entry.tag for entry in old]
        kept = set(state.kv.last.positions.tolist())
        stays = [entry.position in kept for entry in old]
        settings, params = state.settings, state.settings.policy.params
        prompt = len(req.origin_input_ids)
        pinned = {entry.position for entry in old[-params.window :]}
        pinned |= {entry.position for entry in old if entry.position < params.sink}
        if params.protect_prompt:
            pinned |= set(range(prompt))
        assert pinned <= kept and len(kept) == sum(stays)
        assert len(kept) == settings.keep_tokens(prompt, state.report.compactions)
        if state.held.track_id:
            newest = old[-params.window :]
            ring = self.recorder.queries.read(state.held.track_id, newest[-1].position, len(newest))
            own = QUERIES[[entry.tag % len(QUERIES) for entry in newest]]
            assert torch.equal(ring[0].flip(0), self.widened(own)), "somebody else's queries"
        after = self._row(req)
        assert after == [slot for slot, stay in zip(before, stays, strict=True) if stay]
        freed = {slot for slot, stay in zip(before, stays, strict=True) if not stay}
        assert freed <= set(self._free_slots()) and not freed & set(after)
        self.rows[req.rid] = [entry for entry, stay in zip(old, stays, strict=True) if stay]
        self.recomputed.discard(req.rid)
        self.count["compactions"] += 1
        self.count["evicted"] += len(freed)

    def _check_open_sentence(self, req: Any) -> None:
        """Its running sum has every token once: a delimiter ends it, and the token after begins.

        Of a request that no launched step has yet to record for.
        """
        prompt, table = len(req.origin_input_ids), self.recorder.sentences
        fed = self.rows[req.rid][-1].position + 1 - prompt  # of a prefill in chunks, so far
        if fed <= 0:
            return
        tokens, tags = self.generated[req.rid][:fed], self.computed[req.rid]
        begins = len(tokens) - 1
        while begins and not (tokens[begins - 1] == DELIMITER != tokens[begins]):
            begins -= 1
        own = [HIDDENS[tags[prompt + i] % len(HIDDENS)] for i in range(begins, len(tokens))]
        assert int(table.length[req.skipkv.held.track_id]) == len(own), (
            "a token is missing, or there twice"
        )
        torch.testing.assert_close(
            table.total[req.skipkv.held.track_id], torch.stack(own).sum(dim=0)
        )

    def _free_slots(self) -> list[int]:
        free: list[int] = self.token_to_kv_pool_allocator.get_all_free_pages().tolist()
        return free

    # -- invariants

    def check(self) -> None:
        """SGLang's accounting, slot ownership, row contents, lengths, bounds, and our tables."""
        owners, free = self.owners(), self._free_slots()
        in_tree: list[int] = self.tree_cache.all_values_flatten().tolist()
        private: list[int] = []
        assert set(self.rows) == {req.rid for req in owners}
        for req in owners:
            private += self._check_request(req, set(in_tree))
        evictable, locked = self.tree_cache.evictable_size(), self.tree_cache.protected_size()
        assert evictable + locked == len(in_tree)
        assert len(free) + evictable + locked + len(private) == POOL, "pool accounting"
        everywhere = free + in_tree + private
        assert len(set(everywhere)) == POOL, "a slot has two owners"
        assert set(everywhere) == set(range(1, POOL + 1)), "slot 0 is nobody's"
        self._check_tables(owners)
        batch = self.running_batch
        if not batch.is_empty() and batch.seq_lens_cpu is not None:
            assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist()

    def _check_request(self, req: Any, in_tree: set[int]) -> list[int]:
        """One request against the books; its private slots."""
        kv, row, slots = req.kv, self.rows[req.rid], self._row(req)
        assert kv.kv_committed_len == kv.kv_allocated_len == len(row), req.rid
        assert [self.content[slot] for slot in slots] == [entry.tag for entry in row], req.rid
        shared, private = slots[: kv.cache_protected_len], slots[kv.cache_protected_len :]
        assert set(shared) <= in_tree
        state = getattr(req, "skipkv", None)
        if state is None or not state.settings.evicts:
            return private
        prompt = len(req.origin_input_ids)
        assert state.kv.evicted_tokens == row[-1].position + 1 - len(row)
        assert kv.cache_protected_len <= (0 if state.keeps_prompt_private else prompt)
        settings = state.settings
        if req.rid not in self.recomputed and not settings.policy.params.count_prompt:
            assert len(row) - prompt <= settings.peak_budgeted_tokens(), "the bound of the contract"
        return private

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
        assert len(slots) == len(set(slots)) == TRACKED - self.recorder.tracks.free
        assert all(state.failure is None for state in states)
        for row in range(ROWS + 1):
            assert int(self.recorder.tracks.of_row[row]) == lent.get(row, 0), row
