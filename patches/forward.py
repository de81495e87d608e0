"""The forward pass: true positions, and what is recorded for the next compaction.

A compacted row is shorter than its sequence, so the position of the next token is no longer the row
length. ``orig_seq_lens`` keeps counting tokens through every decode step and nothing else reads it.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.binding import binding_of, state_of
from sgl_skipkv.recorder import Recording, device_tensor
from sgl_skipkv.runtime import CallState, Runtime


def prepare_forward(result: Any, cls: type, batch: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``ForwardBatch.init_new``: positions for rows that may be compacted, and a recording.

    A batch without budgeted requests is left as it came.
    """
    binding = binding_of(batch.req_to_token_pool)
    if binding is None or binding.runtime is None or binding.runtime.open_calls == 0:
        return
    states = [state_of(req) for req in batch.reqs]
    if not any(states):
        return
    result.skipkv = None
    if result.forward_mode.is_decode():
        positions = result.orig_seq_lens - 1
        result.positions = positions.to(result.positions.dtype)  # rebound: the old one is shared
        if any(state is not None and state.slot for state in states):
            slots = binding.runtime.recorder.slots.of_row[result.req_pool_indices]
            result.skipkv = (binding.runtime.recorder, Recording(slots, positions.long()))
    elif result.forward_mode.is_extend():
        recording = _prefill_recording(binding.runtime, batch, states)
        if recording is not None:
            result.skipkv = (binding.runtime.recorder, recording)


def _prefill_recording(
    runtime: Runtime, batch: Any, states: list[CallState | None]
) -> Recording | None:
    """The last queries of each prompt, and the generated tokens that a recomputation replays."""
    window = runtime.recorder.queries.window
    slots: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    replay: list[tuple[int, int, int]] = []
    offset = 0  # of this request's tokens in the flattened batch
    for state, first, count in zip(states, batch.prefix_lens, batch.extend_lens, strict=True):
        if state is not None:
            runtime.start_recording(state)
        if state is not None and state.slot:
            recorded = range(max(count - window, 0), count)
            slots.extend(state.slot for _ in recorded)
            positions.extend(first + i for i in recorded)
            tokens.extend(offset + i for i in recorded)
            generated_from = max(state.prompt_tokens - first, 0)
            if generated_from < count and state.settings.policy.needs_sentences:
                replay.append((state.slot, offset + generated_from, offset + count))
        offset += count
    if not slots:
        return None
    device = runtime.recorder.device
    return Recording(
        device_tensor(slots, device),
        device_tensor(positions, device),
        device_tensor(tokens, device),
        tuple(replay),
    )


def record_queries(
    attention: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``RadixAttention.forward``: q is rotated here, as the cached keys are."""
    entry = getattr(forward_batch, "skipkv", None)
    if entry is not None:
        recorder, recording = entry
        recorder.record_queries(recording, attention.layer_id, q)


def record_hidden(
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """BEFORE ``LogitsProcessor.forward``: hidden states after the final norm, one per token."""
    entry = getattr(logits_metadata, "skipkv", None)
    if entry is not None:
        recorder, recording = entry
        recorder.record_hidden(recording, input_ids, hidden_states)
