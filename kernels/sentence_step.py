"""Add tokens to the open sentence of each call, and close it at a delimiter: one launch per step.

``total[track] += hidden[b]``, from zero where the token opens a sentence; at a delimiter
``vectors[track, sentence] = total / length``, L2-normalised. The truth is
``reference.sentence_step``, less its writes to track 0, which nobody reads.

Source: SkipKV (arXiv 2512.07993) section 4.1. Mutates the tables of the tracks. Graph-safe: tracks
and tokens are read on the device, only B and S decide the launch, nothing is allocated.

One program per track, with a hidden state in registers: it alone updates the track. A decode step
brings one token per track, a prefill that recomputes generated tokens all of one track's.

Floors for T tracked tokens, C of them at a delimiter: bytes
``T (D (hidden_bytes + 8) + 44) + C D vector_bytes`` (the 44 are token, track and its entries);
operations ``2 T D + 5 C D``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_EPS = tl.constexpr(1e-8)


# Tokens of a prefill, from any on; tracks of a chain's tokens, one row of them after the other.
@triton.jit(do_not_specialize_on_alignment=["token_ids", "steps", "tracks"])
def _sentence_step_kernel(
    hidden, tracks, token_ids, bits, preset, total, length, index, after_delimiter, vectors,
    hidden_stride, width, capacity, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    track = tl.load(tracks + b).to(tl.int64)
    if track == 0:
        return
    i = tl.arange(0, BLOCK)
    inside = i < width
    sums = total + track * width + i
    for step in range(0, steps):
        token = b * steps + step
        token_bits = tl.load(bits + tl.load(token_ids + token).to(tl.int64))
        is_delimiter = (token_bits & tl.load(preset + track)) != 0
        opens = tl.load(after_delimiter + track) & (is_delimiter == 0)
        tokens = tl.where(opens, 0.0, tl.load(length + track)) + 1.0
        sentence = tl.load(index + track) + opens.to(tl.int64)
        # Every warp has loaded the track's entries before the first one stores them: one that came
        # late would see this token as the last one.
        tl.debug_barrier()
        tl.store(length + track, tokens)
        tl.store(index + track, sentence)
        tl.store(after_delimiter + track, is_delimiter)
        new = tl.load(sums, mask=inside & (opens == 0), other=0.0)
        new += tl.load(hidden + token * hidden_stride + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums, new, mask=inside)
        if is_delimiter:
            mean = tl.div_rn(new, tokens)
            norm = tl.sqrt_rn(tl.sum(mean * mean, axis=0))
            unit = tl.div_rn(mean, tl.maximum(norm, _EPS))
            entry = track * capacity + tl.minimum(sentence, capacity - 1)
            tl.store(vectors + entry * width + i, unit, mask=inside)
        if steps > 1:
            tl.debug_barrier()  # the next token sees what all warps have stored


def sentence_step(
    hidden: Tensor,
    tracks: Tensor,
    token_ids: Tensor,
    *,
    bits: Tensor,
    preset: Tensor,
    total: Tensor,
    length: Tensor,
    index: Tensor,
    after_delimiter: Tensor,
    vectors: Tensor,
) -> None:
    """Add S tokens per call to its open sentence, one after the other; at a delimiter store the
    sentence's mean vector.

    A full table keeps writing its last entry.

    Args:
        hidden: float16, bfloat16 or float32 [B S, D], rows contiguous, after the final norm.
        tracks: int64 or int32 [B], track id of each call, 0 for none; any number of calls
            may have none, no two others share a track.
        token_ids: int64 or int32 [B S], the token that each hidden state belongs to, call after
            call.
        bits: uint8 [vocabulary], the presets under which each token closes a sentence.
        preset: uint8 [tracks], the preset of each track as a bit.
        total, length, index, after_delimiter, vectors: as in ``reference.sentence_step`` (changed
            in place, except track 0); total and vectors contiguous, vectors in any of the three.

    Raises:
        ValueError: shapes or strides that do not fit.
    """
    count, calls, width = hidden.shape[0], tracks.shape[0], hidden.shape[1]
    if total.shape[1] != width or vectors.shape[2] != width or hidden.stride(1) != 1:
        raise ValueError(
            f"hidden: expected contiguous rows of D numbers as in total {[*total.shape]} and "
            f"vectors {[*vectors.shape]}, got {[*hidden.shape]} with strides {[*hidden.stride()]}"
        )
    for name, table in (("total", total), ("vectors", vectors)):
        if not table.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {[*table.stride()]}"
            )
    if count == 0:
        return
    if token_ids.shape[0] != count or calls == 0 or count % calls:
        raise ValueError(
            f"token_ids: expected one per hidden state, {count}, and as many for each of the "
            f"{calls} tracks, got {token_ids.shape[0]}"
        )
    _sentence_step_kernel[(calls,)](
        *(hidden, tracks, token_ids, bits, preset),
        *(total, length, index, after_delimiter, vectors),
        *(hidden.stride(0), width, vectors.shape[1], count // calls),
        **_options(width),
    )


def _options(width: int) -> dict[str, int]:
    """A row lies in the registers of one program, 16 numbers per thread, 32 at 16 warps."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
