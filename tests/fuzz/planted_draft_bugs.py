"""Bugs of speculative decoding: ``planted_bugs.py`` plants them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Changes = dict[Callable[..., Any], dict[str, tuple[str, str]]]


def draft_bugs() -> Changes:
    """Our function -> name of a bug -> a piece of its source, and what stands there instead."""
    from sgl_skipkv.eviction.compaction import Plan
    from sgl_skipkv.eviction.planner import Planner
    from sgl_skipkv.patches.engine import (
        batch,
        forward,
        future_kv,
        kv_cache,
        release,
        scheduler,
        speculation,
    )
    from sgl_skipkv.recording.draft_chains import DraftChains
    from sgl_skipkv.recording.recorder import Recorder
    from sgl_skipkv.request.last_compaction import LastCompaction

    entries, queries = Plan.entries.fget, Recorder.ring_entries.fget
    running = LastCompaction.running_tokens.fget
    assert entries is not None and running is not None and queries is not None
    return {
        entries: {
            "the tail of a compacted row stays where it was": (
                "if not self.tail_slots:",
                "if True:",
            ),
            "the tail of a compacted row begins a slot too late": (
                "torch.arange(self.tail_slots, device=self.positions.device)",
                "torch.arange(1, self.tail_slots, device=self.positions.device)",
            ),
        },
        kv_cache.due_of: {
            "the last slot of the tail is left out": (
                "req.kv.kv_allocated_len - row_tokens",
                "max(req.kv.kv_allocated_len - row_tokens - 1, 0)",
            ),
        },
        kv_cache.release_evicted: {
            "the tail of a compacted row is given back": (
                "free_evicted(allocator, kv, slots, plan.evicted_tokens, first)",
                "row, first = req_to_token_pool.req_to_token[plan.state.row], plan.kept_tokens\n"
                "        tail = row[first : first + plan.tail_slots].long()\n"
                "        allocator.free(torch.cat([slots, tail]))",
            ),
            "a compaction shortens the row and not its slots": (
                "kv.kv_allocated_len -= plan.evicted_tokens",
                "pass",
            ),
            "a compaction shortens a row's slots and not the row": (
                "kv.kv_committed_len -= plan.evicted_tokens",
                "pass",
            ),
            "freed pages are looked for in front of the tail": (
                "plan.row_tokens + plan.tail_slots - slots",
                "plan.row_tokens - slots",
            ),
            "a compacted row forgets its tail": (
                "kv.kv_allocated_len -= plan.evicted_tokens",
                "kv.kv_allocated_len = kv.kv_committed_len",
            ),
        },
        batch.compact_due_requests: {
            "the length of a row has its tail in it": (
                "i, evictable_tokens(batch, req, state)",
                "i, req.kv.kv_allocated_len",
            ),
            "a compaction may evict the first token of its tail": (
                "places[state], row_tokens[state] = i, evictable_tokens(batch, req, state)",
                "places[state], row_tokens[state] = i, min("
                "req.kv.kv_committed_len + 1, req.kv.kv_allocated_len)",
            ),
            "the draft model's KV stays where it was": (
                "buffers = row_buffers(binding.scheduler)",
                "buffers = row_buffers(binding.scheduler)[:2]",
            ),
            "published lengths are shortened before the step publishes them": (
                "wait_for_forward(batch.req_to_token_pool)",
                "pass",
            ),
        },
        forward.prepare_forward: {
            "what a step verifies is not recorded": (
                "tracked and result.forward_mode.is_target_verify()",
                "False",
            ),
        },
        DraftChains.add_accepted: {
            "drafts that are wrong belong to sentences": (
                "accepted > places",
                "accepted >= places",
            ),
            "the last accepted token belongs to no sentence": (
                "accepted > places",
                "accepted > 1 + places",
            ),
            "a chain is added to its sentences twice": (
                "self.first[tracks] = positions",
                "pass",
            ),
        },
        DraftChains.reset: {
            "a track has the chain of the request before": (
                "self.first[track].fill_(_NOWHERE)",
                "pass",
            ),
        },
        Planner._add_accepted: {
            "sentences lack the last step, although its tokens are known": (
                "if self._recorder.chain_tokens:",
                "if False:",
            ),
        },
        queries: {
            "queries of drafts overwrite some that are still needed": (
                "self.query_window + 2 * self.chain_tokens",
                "self.query_window + self.chain_tokens - 1",
            ),
        },
        batch._shorten: {
            "the batch's lengths stay those of before a compaction": (
                "batch.seq_lens = batch.seq_lens - device_tensor(evicted, batch.seq_lens.device)",
                "pass",
            ),
        },
        speculation.evictable_tokens: {
            "a step whose result is known counts behind a prefill": (
                "batch.enable_overlap and not state.kv.running_steps",
                "False",
            ),
        },
        speculation.shorten_published: {
            "published lengths stay those of before a compaction": (
                "lengths.index_add_(0, at, evicted, alpha=-1)",
                "pass",
            ),
            "another row's published length is shortened": (
                "lengths.index_add_(0, at,",
                "lengths.index_add_(0, at.flip(0),",
            ),
            "who reads published lengths does not wait for a compaction": (
                "published.record()",
                "pass",
            ),
        },
        running: {
            "tokens of the running step are counted from what was kept": (
                "int(written) - self.row_tokens",
                "int(written) - len(self.kept)",
            ),
        },
        speculation.place_step: {
            "a verify step is at the positions of a compacted row": (
                "result.positions = result.positions + shift",
                "pass",
            ),
        },
        speculation.place_draft: {
            "drafts are at the positions of a compacted row": (
                "forward_batch.positions = forward_batch.positions + shift",
                "pass",
            ),
        },
        future_kv.future_tokens_of: {
            "slots that are reserved for drafts are not counted": (
                "+ behind",
                "+ 0 * behind",
            ),
        },
        release.close_request: {
            "a request reports its tail as tokens": (
                "req.kv.kv_committed_len",
                "req.kv.kv_allocated_len",
            ),
        },
        scheduler.bound_new_tokens: {
            "drafts have no slots behind the longest text": (
                "if state.runtime.reserved_tokens:",
                "if False:",
            ),
        },
    }
