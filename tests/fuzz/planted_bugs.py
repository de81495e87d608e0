"""Bugs to plant in our code, one at a time: the state machine must find each of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

FOUND = (AssertionError, RuntimeError, ValueError, LookupError, MemoryError)


def bugs() -> list[tuple[str, Callable[..., Any], str, str]]:
    """Name, our function, a piece of its source, and what stands there instead."""
    from sgl_skipkv.eviction import page_table, planner, runtime
    from sgl_skipkv.patches.engine import (
        admission,
        backup,
        batch,
        forward,
        release,
        retraction,
        sampling,
        steering,
    )

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
            "return state.prompt_tokens if result is None else min(result, state.prompt_tokens)",
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
            shorten,
            "batch.reqs[i].kv.kv_allocated_len -= plan.evicted_tokens",
            "pass",
        ),
        (
            "committed length stays",
            shorten,
            "batch.reqs[i].kv.kv_committed_len -= plan.evicted_tokens",
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
            batch.compact_due_requests,
            "for compaction in done for slots in compaction.freed",
            "for slots in done[-1].freed",
        ),
        ("device lengths stay", shorten, "batch.seq_lens = ", "_ = "),
        (
            "slots are freed twice",
            shorten,
            "        allocator.free(slots)\n",
            "        allocator.free(slots)\n        allocator.free(slots)\n",
        ),
        ("slots are not freed", shorten, "        allocator.free(slots)\n", "        pass\n"),
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
            "prompt = state.prompt_tokens if params.protect_prompt else 0",
            "prompt = 0",
        ),
        (
            "an evictable prompt is shared",
            retraction.limit_prefix_match,
            "shareable = 0 if state.keeps_prompt_private else state.prompt_tokens",
            "shareable = state.prompt_tokens",
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
            life.due,
            "state.budgeted_tokens(row_tokens) >= state.due_tokens",
            "state.budgeted_tokens(row_tokens) > state.due_tokens + 1",
        ),
        (
            "a request reserves a track that is taken",
            life.has_track,
            "return self.recorder.tracks.free > taken",
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
            "with binding.runtime.without_backups():",
            "if True:",
        ),
        (
            "the input of a backup that was forgotten stays short",
            backup.forget_backups,
            "_lengthen_input(req)",
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
            "state.offloaded.backup = None",
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
            "binding.scheduler.schedule_stream.wait_stream(binding.scheduler.forward_stream)",
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
    ]


def plant(
    patch: pytest.MonkeyPatch, function: Callable[..., Any], piece: str, instead: str
) -> None:
    """Rewrite one piece of a function in place, also where a hook already holds the function."""
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(piece) == 1, f"{function.__qualname__} has changed: {piece!r} is not in it"
    flags = annotations.compiler_flag
    code = compile(source.replace(piece, instead), "planted", "exec", flags=flags)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    patch.setattr(function, "__code__", namespace[function.__name__].__code__)
