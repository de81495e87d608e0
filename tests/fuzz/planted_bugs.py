"""Bugs to plant in our code, one at a time: the state machine must find each of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

#: bug -> the first seed whose first few lives find it; 4 or 5 where nothing is said
SOONEST = {
    "a part forgets what the others freed": 6,
    "the input of a backup that was forgotten stays short": 14,
    "a pause leaves a request that cannot be recomputed in the queue": 11,
    "a shared history is compacted without a copy": 6,
    "the lock on a history is kept": 6,
    "the whole history stays locked": 6,
    "another cache_salt's request continues a history": 24,
    "another extra_key's request continues a history": 16,
    "a sentence goes on behind its turn": 7,
    "a continued row has the recordings of whoever held its track before": 9,
    "recordings of a history are never let go": 7,
    "a share counts the evictions that the request reports": 6,
    "backups have no bound": 6,
    "tokens that are computed again are not steered": 7,
    "a request that comes back is steered as at its start": 7,
    "a demand is that of the row before the last compaction": 8,
    "a demand is measured without the queries of a prefill": 6,
    "a history is shared although its demand may evict from it": 27,
}
#: found in a hundred lives and more: ``make fuzz`` plants them, ``make test`` does not
RARE = {
    "the copy of a history is not paid for",
    "all but one request of a part are left out",
    "a restored row is not paid for",
    "a request that ends while it waits keeps host memory",
    "two histories have the same keys",
    "a prompt that is a history as a whole leaves nothing to compute",
    "SGLang files the text of a prompt that contains a history",
    "another policy's request continues a history",
    "the next turn misses queries of a prompt's end",
}
FOUND = (AssertionError, RuntimeError, ValueError, LookupError, MemoryError)


def bugs() -> list[tuple[str, Callable[..., Any], str, str]]:
    """Name, our function, a piece of its source, and what stands there instead."""
    from sgl_skipkv.eviction import page_table, planner, runtime
    from sgl_skipkv.patches.engine import (
        admission,
        backup,
        batch,
        forward,
        kv_cache,
        release,
        retraction,
        reuse,
        sampling,
        steering,
    )
    from sgl_skipkv.request import state as request_state
    from sgl_skipkv.reuse import continuation, histories, history

    shorten, life, rewrite = batch._shorten, runtime.Runtime, page_table.RowRewrite
    return [
        (
            "a compacted row is inserted into the tree",
            release.limit_insert,
            "and state.kv.evicted_tokens:\n        return 0",
            "and state.kv.evicted_tokens:\n        return None",
        ),
        (
            "a recomputed request hands its output to the tree",
            release.limit_insert,
            "return shared if result is None else min(result, shared)",
            "return None",
        ),
        (
            "a recomputed request shares more than its prompt",
            retraction.limit_prefix_match,
            "return min(max_prefix_len, shareable)",
            "return None",
        ),
        (
            "allocated length stays",
            kv_cache.release_evicted,
            "kv.kv_allocated_len -= plan.evicted_tokens",
            "pass",
        ),
        (
            "committed length stays",
            kv_cache.release_evicted,
            "kv.kv_committed_len -= plan.evicted_tokens",
            "pass",
        ),
        (
            "sequence lengths stay",
            shorten,
            "batch.seq_lens_cpu - torch.tensor(evicted)",
            "batch.seq_lens_cpu",
        ),
        (
            "all but one request of a part are left out",
            life._in_parts,
            "[due[i] for i in part]",
            "[due[i] for i in part[:1]]",
        ),
        (
            "a part forgets what the others freed",
            kv_cache.release_evicted,
            "for compaction in done for slots in compaction.freed",
            "for slots in done[-1].freed",
        ),
        ("device lengths stay", shorten, "batch.seq_lens = ", "_ = "),
        (
            "slots are freed twice",
            kv_cache.release_evicted,
            "        allocator.free(slots)\n",
            "        allocator.free(slots)\n        allocator.free(slots)\n",
        ),
        (
            "the next turn misses queries of a prompt's end",
            request_state.RequestState.records_from.fget,
            'kv_reuse == "budget"',
            'kv_reuse == "never"',
        ),
        (
            "slots are not freed",
            kv_cache.release_evicted,
            "        allocator.free(slots)\n",
            "        pass\n",
        ),
        (
            "one slot is forgotten",
            rewrite.__init__,
            "slots[evicted].to(torch.int64)",
            "slots[evicted[1:]].to(torch.int64)",
        ),
        (
            "the slot before the first evicted one is freed",
            rewrite.__init__,
            "slots[evicted].to(torch.int64)",
            "torch.cat([slots[kept][-1:], slots[evicted[1:]]]).to(torch.int64)",
        ),
        (
            "the kept slots are written one entry too far",
            rewrite.write,
            "[row, :keep_tokens] = slots",
            "[row, 1 : keep_tokens + 1] = slots",
        ),
        (
            "the prompt may go although the tree owns it",
            planner._protected,
            "prompt = state.prompt_row_tokens if params.protect_prompt else 0",
            "prompt = 0",
        ),
        (
            "an evictable prompt is shared",
            request_state.RequestState.shared_row_tokens.fget,
            "if self.keeps_prompt_private:",
            "if False:",
        ),
        (
            "state outlives a retraction",
            retraction.reset_request,
            "state.runtime.retract(state, generated=len(req.output_ids))",
            "pass",
        ),
        (
            "evictions outlive a retraction",
            life._start_anew,
            "state.kv = KVState(",
            "_ = KVState(",
        ),
        (
            "a finished request keeps its track",
            release.close_request,
            "state.runtime.close(state, row_tokens, req.output_ids_through_stop, reason)",
            "pass",
        ),
        ("a row keeps its track", life._release, "of_row[row] = 0", "of_row[0] = 0"),
        (
            "positions are physical",
            forward.prepare_forward,
            "positions = result.orig_seq_lens - 1",
            "positions = batch.seq_lens - 1",
        ),
        (
            "a compaction comes a step too late",
            request_state.RequestState.is_due,
            ">= budget + interval",
            "> budget + interval + 1",
        ),
        (
            "a share is of the tokens that are still cached",
            request_state.RequestState._full_tokens,
            " + evicted_tokens",
            "",
        ),
        (
            "a share counts the evictions that the request reports",
            request_state.RequestState._full_tokens,
            "self.kv.evicted_tokens - self.prompt_evicted_tokens",
            "self.report.evicted_tokens",
        ),
        (
            "a demand is that of the row before the last compaction",
            request_state.RequestState._demand.fget,
            "demand.logical_tokens > last.logical_tokens",
            "last is not None",
        ),
        (
            "a demand is measured without the queries of a prefill",
            request_state.RequestState.records_from.fget,
            "min(first, max(self.kv.not_before, self._measured_from) - window)",
            "max(self.kv.not_before, self._measured_from)",
        ),
        (
            "a history is shared although its demand may evict from it",
            request_state.RequestState.may_be_due_until,
            "return reads_demand or ",
            "return ",
        ),
        (
            "a request reserves a track that is taken",
            life.has_track,
            "return len(self.recorder.free_tracks) > taken",
            "return True",
        ),
        (
            "a backup comes back a token off",
            backup.restore_row,
            "saved.to(buffer.device, first_row=matched)",
            "saved.to(buffer.device).roll(1, 0)[matched:]",
        ),
        (
            "a restored token has its place in the row for a position",
            forward.prepare_forward,
            "if any(shifts):",
            "if False:",
        ),
        (
            "a restored row is not paid for",
            admission._restored_tokens,
            "state.offloaded.backup.row_tokens - req.prefix_len",
            "0",
        ),
        (
            "KV of before a pause comes back",
            backup.forget_backups,
            "runtime.backs_up = False",
            "pass",
        ),
        (
            "the input of a backup that was forgotten stays short",
            backup.forget_backups,
            "lengthen_input(req)",
            "pass",
        ),
        (
            "a restored row's token is drawn with the noise of another position",
            sampling.shift_positions,
            "positions.add_(shifts)",
            "pass",
        ),
        (
            "a pause leaves a request that cannot be recomputed in the queue",
            backup.forget_backups,
            "if is_stranded(req):",
            "if False:",
        ),
        (
            "a request that ends while it waits keeps host memory",
            backup.drop_backup,
            "state.offloaded.backup = state.reuse.continued = None",
            "pass",
        ),
        (
            "backups have no bound",
            life.can_back_up,
            "return self.host_memory.fits",
            "return 0 <",
        ),
        (
            "a compaction does not wait for the step that runs",
            batch.compact_due_requests,
            "wait_for_forward(batch.req_to_token_pool)",
            "pass",
        ),
        (
            "what a steered request generated is inserted into the tree",
            release.limit_insert,
            "not state.settings.steers",
            "True",
        ),
        ("a row stays steered", life._release, "self.steerer.stop(row)", "pass"),
        (
            "tokens that are computed again are not steered",
            steering.prepare_prefill,
            "if any(factors):",
            "if False:",
        ),
        (
            "a request that comes back is steered as at its start",
            steering.prepare_prefill,
            "steerer.start(state.row, schedule)",
            "steerer.start(state.row, state.schedule)",
        ),
        (
            "a shared history is compacted without a copy",
            continuation.continue_history,
            "continued.copies = ",
            "_ = ",
        ),
        (
            "the copy of a history is not paid for",
            admission._copied_tokens,
            "return continued.row_tokens - state.prompt_tokens",
            "return 0",
        ),
        (
            "the lock on a history is kept",
            reuse._lock_prompt,
            "tree_cache.unlock(req.lock)",
            "pass",
        ),
        (
            "the whole history stays locked",
            reuse._lock_prompt,
            "req.lock, req.last_node = lock, match.last_device_node",
            "tree_cache.unlock(lock)",
        ),
        (
            "a history's keys are its token ids",
            continuation.history_of,
            "key = key[:shared] + private_keys(len(key) - shared)",
            "pass",
        ),
        (
            "two histories have the same keys",
            history.private_keys,
            "next(_lineages) << 32",
            "1 << 32",
        ),
        (
            "a continued prefill has its place in the row for a position",
            forward.prepare_forward,
            "shifts = [0 if state is None else state.kv.evicted_tokens for state in states]",
            "shifts = [0 if state is None or state.reuse.continued else state.kv.evicted_tokens "
            "for state in states]",
        ),
        (
            "decode steps of a continued row count on from its length",
            batch.admit_rows,
            "batch.orig_seq_lens[i] = prefill_tokens(req)",
            "pass",
        ),
        (
            "a branch continues its sibling's row",
            histories.Histories.find,
            "if cut >= history.first_cut:",
            "if cut >= history.own_prompt_tokens:",
        ),
        (
            "a prompt that is a history as a whole leaves nothing to compute",
            histories.Histories.find,
            ", len(prompt) - 1)",
            ", len(prompt))",
        ),
        (
            "SGLang files the text of a prompt that contains a history",
            reuse.split_behind_row_prompt,
            "req.origin_input_ids = row_ids(req, state)[: state.shared_row_tokens]",
            "pass",
        ),
        (
            "a history is filed while its request only gives way",
            reuse.leaving_history,
            " or not req.finished()",
            "",
        ),
        (
            "an aborted request leaves a history",
            reuse._history_of,
            "isinstance(req.finished_reason, FINISH_ABORT) or ",
            "",
        ),
        (
            "histories outlive a flush",
            reuse.forget_histories,
            "runtime.histories.clear()",
            "pass",
        ),
        (
            "a history is one token too long",
            reuse._history_of,
            "[:logical_tokens]",
            "[: logical_tokens + 1]",
        ),
        (
            "another policy's request continues a history",
            continuation.namespace_of,
            "(policy.name, policy.params) if",
            "() if",
        ),
        (
            "another cache_salt's request continues a history",
            reuse._namespace,
            "req.cache_salt, ",
            "",
        ),
        (
            "another extra_key's request continues a history",
            reuse._namespace,
            "req.extra_key, ",
            "",
        ),
        (
            "a steered history is continued without steering",
            continuation.namespace_of,
            "settings.kv_reuse, settings.steering,",
            "settings.kv_reuse,",
        ),
        (
            "a history that the tree has lost a part of is not dropped",
            reuse.continue_history,
            "req.prefix_len >= found.cut - found.history.evicted_tokens",
            "req.prefix_len",
        ),
        (
            "the keys of a history that was lost stay the input",
            reuse.fill_with_keys,
            "    else:",
            "    elif state.reuse.continued is not None:",
        ),
        (
            "a restored row is filed as if its history were evicted from again",
            continuation.history_of,
            "0 if continued is None else continued.evicted_tokens",
            "state.kv.evicted_tokens",
        ),
        (
            "a sentence goes on behind its turn",
            life.start_recording,
            "self.recorder.sentences.open_next(held.track_id, entries)",
            "pass",
        ),
        (
            "a continued row has the recordings of whoever held its track before",
            life.start_recording,
            "self.recorder.restore(held.track_id, continued.recorded)",
            "pass",
        ),
        (
            "recordings of a history are never let go",
            life.start_recording,
            "continued.recorded = None",
            "pass",
        ),
    ]


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
    planted = planted.fget if isinstance(planted, property) else inspect.unwrap(planted)
    patch.setattr(function, "__code__", planted.__code__)
