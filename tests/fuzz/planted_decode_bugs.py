"""Bugs of a decode server (PD disaggregation): ``planted_bugs.py`` plants them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Changes = dict[Callable[..., Any], dict[str, tuple[str, str]]]


def decode_bugs() -> Changes:
    """Our function -> name of a bug -> a piece of its source, and what stands there instead."""
    from sgl_skipkv.eviction import runtime
    from sgl_skipkv.patches.engine import backup, pd_admission, pd_decode, release

    return {
        pd_decode.hold_back_untracked: {
            "a request starts without a track": ("runtime.has_track(state, before)", "True"),
            "two requests start with one track": ("[] if state is None else [state]", "[]"),
        },
        pd_decode.start_rows: {
            "SGLang takes a restored row for a whole text": ("if any(evicted):", "if False:"),
            "the CPU takes a restored row for a whole text": (
                "batch.seq_lens_cpu = ",
                "_ = ",
            ),
            "the input of a restored row stays short": ("lengthen_input(req)", "pass"),
            "a token of a restored row is recorded twice": (
                "state.kv.recorded_tokens > tokens",
                "False",
            ),
            "what is restored is steered as at its start": (
                "schedule.feed(req.output_ids[:-1])",
                "pass",
            ),
            "rows that arrive are not steered": (
                "runtime.steerer.start(state.row, schedule)",
                "pass",
            ),
            "a row that arrives records with who had it before": (
                "runtime.start_recording(state)",
                "state.held.started, state.offloaded.backup = True, None",
            ),
        },
        pd_decode.end_silence: {
            "a restored row never records again": (
                "runtime.silence(state, silent=False)",
                "pass",
            ),
        },
        pd_decode.row_tokens: {
            "a row is restored as long as its text": (
                "state is None or state.offloaded.backup is None",
                "True",
            ),
        },
        pd_decode.discard_backup: {
            "SGLang discards a copy that it has not": (
                "evicting_state_of(req) is None",
                "True",
            ),
        },
        pd_decode.restore_row: {
            "a row comes back a token off": (
                "saved.to(buffer.device)",
                "saved.to(buffer.device).roll(1, 0)",
            ),
        },
        pd_decode.end_paused: {
            "a paused request is computed again": (
                "state is None or not state.settings.changes_kv",
                "True",
            ),
            "a pause takes a token from who ends": (
                "req.output_ids.append(req.pd_rebootstrap_forced_output_id)",
                "pass",
            ),
        },
        pd_admission.reserve_growth: {
            "SGLang's reservation for a row is not replaced": (
                " - queue.num_reserved_decode_tokens",
                "",
            ),
            "growth is not reserved": ("growth_tokens(state, req)", "0"),
        },
        pd_admission._with_rows: {
            "growth of rows that arrive is not reserved": (
                "scheduler.waiting_queue, arriving, queue.retracted_queue",
                "scheduler.waiting_queue, queue.retracted_queue",
            ),
            "growth of rows that wait is not reserved": (
                "scheduler.waiting_queue, arriving, queue.retracted_queue",
                "arriving",
            ),
        },
        pd_admission.needed_by_longest: {
            "evicted tokens are given back": (
                "retractable_tokens -= _evicted_tokens(queue)",
                "pass",
            ),
        },
        pd_admission.needed_by_arrival: {
            "a request arrives without room to grow": ("future_tokens(state, req)", "0"),
            "evicted tokens are given back to who arrives": (
                "retractable_tokens -= _evicted_tokens(queue)",
                "pass",
            ),
        },
        pd_admission.needed_by_restored: {
            "a row comes back without room to grow": ("future_tokens(state, req)", "0"),
            "a row comes back as long as its text": (
                "state.offloaded.backup.row_tokens + 1",
                "len(req.origin_input_ids) + len(req.output_ids)",
            ),
        },
        release.close_request: {
            "a decode server copies a row twice": ("if state.runtime.recomputes:", "if True:"),
            "who ends while it waits is closed twice": (" and state.report.summary is None", ""),
        },
        backup._forget_waiting: {
            "KV of old weights waits in SGLang's other queue": (
                "if not runtime.recomputes:",
                "if False:",
            ),
            "who waits with a row is ended by a pause as if it had none": (
                " and not req.kv.holds_kv",
                "",
            ),
        },
        runtime.Runtime.can_recompute: {
            "a decode server waits for a prefill": (
                "if state.settings.evicts and not self.recomputes:",
                "if False:",
            ),
        },
        runtime.Runtime.start_recording: {
            "recordings do not come back": (
                "self.recorder.restore(held.track_id, backup.recorded)",
                "pass",
            ),
        },
    }
