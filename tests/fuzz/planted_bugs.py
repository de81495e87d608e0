"""Bugs to plant in our code, one at a time: the state machine must find each of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import cached_property
from types import FunctionType
from typing import Any

import pytest
from planted_decode_bugs import decode_bugs
from planted_draft_bugs import draft_bugs
from planted_state_bugs import state_bugs
from planted_window_bugs import window_bugs

FREE = "allocator.free_segment(slots, start_pos=first)"
FOUND = (AssertionError, RuntimeError, ValueError, LookupError, MemoryError)


def bugs() -> list[tuple[str, Callable[..., Any], str, str]]:
    """Name, our function, a piece of its source, and what stands there instead."""
    from sgl_skipkv.eviction import compaction, in_parts, kv_move, page_table, planner, runtime
    from sgl_skipkv.patches.engine import (
        backup,
        batch,
        forward,
        future_kv,
        hicache,
        kv_cache,
        release,
        retraction,
        reuse,
        sampling,
        steering,
        window_pool,
    )
    from sgl_skipkv.request import state as request_state
    from sgl_skipkv.reuse import continuation, histories, history

    shorten, life, rewrite = batch._shorten, runtime.Runtime, page_table.RowRewrite
    table: dict[Any, dict[str, tuple[str, str]]] = {
        release.insertable_tokens: {
            "a compacted row is inserted into the tree": (
                "and state.kv.evicted_tokens:\n        return 0",
                "and state.kv.evicted_tokens:\n        return None",
            ),
            "a recomputed request hands its output to the tree": ("return shared", "return None"),
            "what a steered request generated is inserted into the tree": (
                "not state.settings.steers",
                "True",
            ),
        },
        retraction.limit_prefix_match: {
            "a recomputed request shares more than its prompt": (
                "return min(max_prefix_len, shareable)",
                "return None",
            ),
        },
        kv_cache.release_evicted: {
            "allocated length stays": ("kv.kv_allocated_len -= plan.evicted_tokens", "pass"),
            "committed length stays": ("kv.kv_committed_len -= plan.evicted_tokens", "pass"),
            "a part forgets what the others freed": (
                "for compaction in done for slots in compaction.freed",
                "for slots in done[-1].freed",
            ),
        },
        window_pool.free_evicted: {
            "slots are freed twice": (FREE, f"{FREE}; {FREE}"),
            "slots are not freed": (FREE, "pass"),
        },
        shorten: {
            "sequence lengths stay": (
                "batch.seq_lens_cpu - torch.tensor(evicted)",
                "batch.seq_lens_cpu",
            ),
            "device lengths stay": ("batch.seq_lens = ", "_ = "),
        },
        in_parts.in_parts: {
            "all but one request of a part are left out": (
                "[due[i] for i in part]",
                "[due[i] for i in part[:1]]",
            ),
        },
        batch.compact_due_requests: {
            "a compaction does not wait for the step that runs": (
                "wait_for_forward(batch.req_to_token_pool)",
                "pass",
            ),
        },
        request_state.RequestState.records_from.fget: {
            "a demand is measured without the queries of a prefill": (
                "min(first, max(self.kv.not_before, self._measured_from) - window)",
                "max(self.kv.not_before, self._measured_from)",
            ),
        },
        rewrite.__init__: {
            "one slot is forgotten": (
                "slots[evicted] if",
                "slots[evicted[1:]] if",
            ),
            "the slot before the first evicted one is freed": (
                "slots[evicted] if",
                "torch.cat([slots[kept][-1:], slots[evicted[1:]]]) if",
            ),
            "slots move and not KV": (
                "slots[kept] if page_tokens == 1 else slots[:keep_tokens].clone()",
                "slots[kept]",
            ),
        },
        kv_move.KVMove.apply: {
            "KV is overwritten before it is read": (
                "torch.index_select(buffer, 0, self._sources, out=staged)",
                "[buffer.__setitem__(t, buffer[s].clone()) for t, s in "
                "reversed([*zip(self._targets, self._sources)])]; staged = buffer[self._targets]",
            ),
        },
        compaction.Compaction.__init__: {
            "a page without tokens is kept": (
                "page_ceil(count, page_tokens) - count :",
                "page_ceil(count + (page_tokens > 1), page_tokens) - count :",
            ),
            "the page of the last tokens is freed": (
                "slots[page_ceil(count, page_tokens) - count :]",
                "slots",
            ),
        },
        kv_cache.alloc_slots: {
            "a restored row begins within a page": ("slots[:tokens]", "slots[-tokens:]"),
        },
        rewrite.write: {
            "the kept slots are written one entry too far": (
                "[row, :keep_tokens] = slots",
                "[row, 1 : keep_tokens + 1] = slots",
            ),
        },
        planner._protected: {
            "the prompt may go although the tree owns it": (
                "prompt = state.prompt_row_tokens if params.protect_prompt else 0",
                "prompt = 0",
            ),
        },
        request_state.RequestState.shared_row_tokens.fget: {
            "an evictable prompt is shared": ("if self.keeps_prompt_private:", "if False:"),
        },
        retraction.reset_request: {
            "state outlives a retraction": (
                "state.runtime.retract(state, generated=len(req.output_ids))",
                "pass",
            ),
        },
        life.continue_history: {
            "a lost conversation stays for good": ("count_conversation(state)", "pass"),
        },
        life._start_anew: {
            "evictions outlive a retraction": ("state.kv = KVState(", "_ = KVState("),
        },
        release.close_request: {
            "a finished request keeps its track": ("state.runtime.close(", "(lambda *_: None)("),
        },
        life._release: {
            "a row keeps its track": ("of_row[row].zero_()", "of_row[0].zero_()"),
            "a row stays steered": ("self.steerer.stop(row)", "pass"),
        },
        forward._place_decode: {
            "positions are physical": (
                "positions = result.orig_seq_lens - 1",
                "positions = batch.seq_lens - 1",
            ),
        },
        forward.prepare_forward: {
            "a restored token has its place in the row for a position": (
                "if any(shifts):",
                "if False:",
            ),
            "a continued prefill has its place in the row for a position": (
                "shifts = [0 if state is None else state.kv.evicted_tokens for state in states]",
                "shifts = [0 if state is None or state.reuse.continued else "
                "state.kv.evicted_tokens for state in states]",
            ),
        },
        request_state.RequestState.is_due: {
            "a compaction comes a step too late": (
                ">= budget + interval",
                "> budget + interval + 1",
            ),
        },
        request_state.RequestState.full_tokens: {
            "a share is of the tokens that are still cached": (" + evicted_tokens", ""),
            "a share counts the evictions that the request reports": (
                "self.kv.evicted_tokens - self.prompt_evicted_tokens",
                "self.report.evicted_tokens",
            ),
        },
        request_state.RequestState._demand.fget: {
            "a demand is that of the row before the last compaction": (
                "demand.logical_tokens > last.logical_tokens",
                "last is not None",
            ),
        },
        request_state.RequestState.may_be_due_until: {
            "a history is shared although its demand may evict from it": (
                "return reads_demand or ",
                "return ",
            ),
        },
        life.has_track: {
            "a request reserves a track that is taken": (
                "return len(self.recorder.free_tracks) > taken",
                "return True",
            ),
        },
        backup.restore_row: {
            "a backup comes back a token off": (
                "saved.to(buffer.device, first_row=saved.shape[0] - at.shape[0])",
                "saved.to(buffer.device).roll(1, 0)[saved.shape[0] - at.shape[0] :]",
            ),
        },
        future_kv.restored_tokens: {
            "a restored row is not paid for": (
                "state.offloaded.backup.row_tokens - req.prefix_len",
                "0",
            ),
        },
        backup.forget_backups: {
            "KV of before a pause comes back": ("runtime.backs_up = False", "pass"),
        },
        backup.forget_flushed: {
            "histories outlive a flush": ("runtime.histories.lose_all()", "pass"),
        },
        backup._forget_waiting: {
            "the input of a backup that was forgotten stays short": ("lengthen_input(req)", "pass"),
            "a pause leaves a request that cannot be recomputed in the queue": (
                "if is_stranded(req):",
                "if False:",
            ),
        },
        sampling.shift_positions: {
            "a restored row's token is drawn with the noise of another position": (
                "positions.add_(shifts)",
                "pass",
            ),
        },
        backup.drop_backup: {
            "a request that ends while it waits keeps host memory": (
                "    state.offloaded.backup = state.reuse.continued = None",
                "    pass",
            ),
        },
        backup.back_up: {
            "backups have no bound": ("not runtime.host_memory.fits(needed)", "False"),
        },
        steering.prepare_prefill: {
            "tokens that are computed again are not steered": ("if any(factors):", "if False:"),
            "a request that comes back is steered as at its start": (
                "steerer.start(state.row, schedule)",
                "steerer.start(state.row, state.schedule)",
            ),
        },
        continuation.continue_history: {
            "a shared history is compacted without a copy": ("continued.copies = ", "_ = "),
            "a history's last page is shared with who goes on in it": (
                "shared_tokens=page_floor(row_tokens, page_tokens)",
                "shared_tokens=page_ceil(row_tokens, page_tokens)",
            ),
            "the page that a prompt ends in is shared with who evicts behind it": (
                "page_floor(first_tokens",
                "page_ceil(first_tokens",
            ),
        },
        reuse._lock_shared: {
            "the lock on a history is kept": ("tree_cache.unlock(req.lock)", "pass"),
            "the whole history stays locked": (
                "req.lock, req.last_node = lock, match.last_device_node",
                "tree_cache.unlock(lock)",
            ),
        },
        continuation.history_of: {
            "a history's keys are its token ids": (
                "key = _private_key(state, finished)",
                "pass",
            ),
            "a restored row is filed as if its history were evicted from again": (
                "0 if continued is None else continued.evicted_tokens",
                "state.kv.evicted_tokens",
            ),
        },
        history.private_keys: {
            "two histories have the same keys": ("next(_lineages) % _LINEAGES << 32", "1 << 32"),
        },
        batch.admit_rows: {
            "decode steps of a continued row count on from its length": (
                "batch.orig_seq_lens[i].fill_(prefill_tokens(req))",
                "pass",
            ),
        },
        history.History.first_cut.func: {
            "a branch continues its sibling's row": (
                "self.own_prompt_tokens if self.last is None else self.last.logical_tokens",
                "self.own_prompt_tokens",
            ),
        },
        histories.Histories.find: {
            "a prompt that is a history as a whole leaves nothing to compute": (
                ", len(prompt) - 1)",
                ", len(prompt))",
            ),
        },
        reuse.split_behind_row_prompt: {
            "SGLang files the text of a prompt that contains a history": (
                "req.origin_input_ids = row_ids(req, state)[: state.shared_row_tokens]",
                "pass",
            ),
        },
        reuse.leaving_history: {
            "a history is filed while its request only gives way": ("checkpoint and ", ""),
        },
        reuse._history_of: {
            "a history is one token too long": ("[:logical_tokens]", "[: logical_tokens + 1]"),
        },
        continuation.namespace_of: {
            "another policy's request continues a history": (
                "(policy.name, policy.params) if",
                "() if",
            ),
            "a steered history is continued without steering": (
                "settings.kv_reuse, settings.steering,",
                "settings.kv_reuse,",
            ),
        },
        reuse._namespace: {
            "another cache_salt's request continues a history": ("req.cache_salt, ", ""),
            "another extra_key's request continues a history": ("req.extra_key, ", ""),
        },
        reuse._has_whole_row: {
            "a history that the tree has lost a part of is not dropped": (
                "return bool(req.prefix_len + req.host_hit_length >= row_tokens)",
                "return bool(req.prefix_len)",
            ),
            "the last page of a history is taken for there": (
                "if match.device_prefix_len + match.host_hit_length >= row_tokens:\n"
                "            req.prefix_len = min(match.device_prefix_len, row_tokens)",
                "if True:\n            req.prefix_len = row_tokens",
            ),
            "the rest of a history's last page is loaded as a part of its row": (
                "req.host_hit_length = row_tokens - req.prefix_len",
                "req.host_hit_length = match.host_hit_length",
            ),
        },
        kv_cache.fill_last_page: {
            "the last page of a history is filed under one slot": ("+ more", "+ 0 * more"),
        },
        reuse.fill_with_keys: {
            "the keys of a history that was lost stay the input": (
                "    else:",
                "    elif state.reuse.continued is not None:",
            ),
        },
        life.start_recording: {
            "a sentence goes on behind its turn": (
                "self.recorder.sentences.open_next(held.track_id, entries)",
                "pass",
            ),
            "a continued row has the recordings of whoever held its track before": (
                "self.recorder.restore(held.track_id, continued.recorded)",
                "pass",
            ),
            "recordings of a history are never let go": ("continued.recorded = None", "pass"),
        },
        hicache.load_row: {
            "a row is longer by the rest of its last page that was loaded": (
                "return params.host_hit_length, node",
                "return loaded",
            ),
        },
        hicache.wait_for_load: {
            "a history is copied before it has been loaded": ("index >= 0", "False"),
        },
        hicache.leave_to_backup: {
            "a restored row is loaded as well": ("req.host_hit_length = 0", "pass"),
        },
    }
    kinds = (table, decode_bugs(), window_bugs(), state_bugs(), draft_bugs())
    of_functions = [one for kind in kinds for one in kind.items()]
    return [(name, f, *change) for f, planted in of_functions for name, change in planted.items()]


def plant(
    patch: pytest.MonkeyPatch, function: Callable[..., Any], piece: str, instead: str
) -> None:
    """Rewrite one piece of a function in place, also where a hook already holds the function."""
    function = inspect.unwrap(function)  # not what a decorator made of it
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(piece) == 1, f"{function.__qualname__} has changed: {piece!r} is not in it"
    flags = annotations.compiler_flag
    code = compile(source.replace(piece, instead), "planted", "exec", flags=flags)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    planted = namespace[function.__name__]
    if isinstance(planted, property):
        planted = planted.fget
    elif isinstance(planted, cached_property):
        planted = planted.func
    else:
        planted = inspect.unwrap(planted)
    patch.setattr(function, "__code__", planted.__code__)
