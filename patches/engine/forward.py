"""The forward pass: logical positions, and what is recorded for the next compaction.

A compacted row is shorter than its sequence, so the position of the next token is not the row
length. SGLang counts ``orig_seq_lens`` up in every decode step and reads it nowhere else.
"""

from __future__ import annotations

from typing import Any

from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.patches.engine.attention_layers import with_rotary_part
from sgl_skipkv.patches.engine.binding import binding_of, state_of
from sgl_skipkv.patches.engine.media import prepare_media
from sgl_skipkv.patches.engine.mixed_chunks import decoding_rows
from sgl_skipkv.patches.engine.model_side import model_side_of
from sgl_skipkv.patches.engine.pd_decode import end_silence
from sgl_skipkv.patches.engine.sampling import note_shifts
from sgl_skipkv.patches.engine.speculation import count_step, is_speculative, place_step
from sgl_skipkv.patches.engine.steering import is_capturing, prepare_prefill
from sgl_skipkv.recording.recorder import Recorder, Recording
from sgl_skipkv.request.state import RequestState


def prepare_forward(result: Any, cls: type, batch: Any, runner: Any, **kwargs: Any) -> None:
    """AFTER ``ForwardBatch.init_new``: set logical positions and what the pass records.

    A batch without budgeted requests is unchanged. Of a draft model, which has no ``ModelSide``,
    nothing is recorded.
    """
    binding = binding_of(batch.req_to_token_pool)
    if binding is None or binding.runtime is None:
        return
    side = model_side_of(runner)
    if side is not None and side.capture is not None and result.forward_mode.is_extend():
        side.capture.begin(batch)
    recorder, steerer = binding.runtime.recorder, binding.runtime.steerer
    # A process launches one forward pass after the other.
    recorder.current, recorder.records_decode = None, False
    if steerer is not None:
        steerer.factors = steerer.decoding = None
    states = [state_of(req) for req in batch.reqs] if binding.runtime.open_requests else []
    note_shifts(result.sampling_info, None)
    if not any(states):
        return
    shifts = [0 if state is None else state.kv.evicted_tokens for state in states]
    tracked = any(state is not None and state.held.track_id for state in states)
    if is_speculative(batch) and not result.forward_mode.is_extend_without_speculative():
        count_step(result, states)
        place_step(result, shifts)
        recorder.records_decode = tracked and result.forward_mode.is_target_verify()
    elif result.forward_mode.is_decode():
        _place_decode(result, batch, shifts)
        end_silence(binding.runtime, batch, states)
        recorder.records_decode = tracked
    elif result.forward_mode.is_extend():
        if any(shifts):  # of restored rows, and of rows that decode
            _place_prefill(result, batch, shifts)
        if side is None:
            return
        firsts = [first + shift for first, shift in zip(batch.prefix_lens, shifts, strict=True)]
        recorder.current = _prefill_recording(binding.runtime, batch, states, firsts)
        prepare_prefill(binding.runtime, batch, states, firsts)


def _place_decode(result: Any, batch: Any, shifts: list[int]) -> None:
    """Logical positions of a decode step."""
    positions = result.orig_seq_lens - 1  # a new tensor: the old one is shared
    result.positions = positions.to(result.positions.dtype)
    if result.mrope_positions is not None and any(shifts):
        prepare_media(result, batch, shifts, [1] * len(shifts))


def _place_prefill(result: Any, batch: Any, shifts: list[int]) -> None:
    """Logical positions of a prefill, and of what is sampled behind it."""
    device = result.positions.device
    note_shifts(result.sampling_info, device_tensor(shifts, device))
    counts = zip(shifts, batch.extend_lens, strict=True)
    shifted = [shift for shift, count in counts for _ in range(count)]
    result.positions = result.positions + device_tensor(shifted, device)
    prepare_media(result, batch, shifts, batch.extend_lens)


def _prefill_recording(
    runtime: Runtime, batch: Any, states: list[RequestState | None], firsts: list[int]
) -> Recording | None:
    """The queries that the first compaction needs, the generated tokens that a prefill after a
    retraction recomputes, and those of rows that decode; None if nothing is recorded.
    """
    tracks: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    generated: list[tuple[list[int], slice]] = []
    window, prefilled = runtime.config.query_window, len(states) - decoding_rows(batch)
    offset = 0  # of this request's tokens in the flattened batch
    columns = (states, firsts, batch.extend_lens)
    for state, first, count in zip(*(part[:prefilled] for part in columns), strict=True):
        if state is not None:
            runtime.start_recording(state)
            at, stop = offset - first, first + count  # position p is token at + p of the batch
            track_id = state.held.track_id
            if track_id:
                # At most one ring, or two tokens of this pass would write to the same entry.
                recorded = range(max(first, state.records_from, stop - window), stop)
                tracks += [track_id] * len(recorded)
                positions += recorded
                tokens += [at + position for position in recorded]
                generated_from = max(first, state.prompt.uncounted_tokens, state.kv.recorded_tokens)
                if generated_from < stop and state.settings.policy.needs_sentences:
                    generated.append(([track_id], slice(at + generated_from, at + stop)))
        offset += count
    decoding = [0 if state is None else state.held.track_id for state in states[prefilled:]]
    if any(decoding):  # together, as in a decode step: rows without a track write to scratch
        last = slice(offset, offset + len(decoding))
        tracks += decoding
        positions += firsts[prefilled:]
        tokens += range(last.start, last.stop)
        generated.append((decoding, last))
    if not tracks and not generated:
        return None
    device = runtime.recorder.device
    return Recording(
        device_tensor(tracks, device),
        device_tensor(positions, device),
        tokens=device_tensor(tokens, device),
        generated=tuple((device_tensor(ids, device), at) for ids, at in generated),
    )


def record_queries(
    attention: Any, q: Any, k: Any, v: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``RadixAttention.forward``: record q, which is rotated like the cached keys."""
    recorder: Recorder | None = vars(attention).get("skipkv")
    if recorder is None:
        return
    place, mode = attention.skipkv_layer, forward_batch.forward_mode
    begins_step = place == 0 and (mode.is_decode() or mode.is_target_verify())
    if begins_step and (recorder.records_decode or (recorder.track_count and is_capturing())):
        # A captured step records every row; untracked and padded rows write to scratch. It must
        # read the graph's own row and position buffers, which are known only here.
        recorder.current = recorder.decode_recording(
            forward_batch.req_pool_indices, forward_batch.positions.long()
        )
    if recorder.current is not None:
        recorder.record_queries(recorder.current, place, with_rotary_part(q, kwargs.get("q_rope")))


def record_hidden(
    processor: Any, input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``LogitsProcessor.forward``: record hidden states after the final norm, per token."""
    recorder: Recorder | None = vars(processor).get("skipkv")
    if recorder is None or recorder.current is None:
        return
    recorder.record_hidden(recorder.current, input_ids, hidden_states)
    if is_capturing():
        recorder.current = None  # end of the captured step
