"""Images, videos and audio of a prompt, in a row that has fewer entries than its text has tokens.

SGLang finds the media that a prefill computes, and the place of each token on the axes of a
multimodal rotary embedding (time, height, width), by row entries. Both are right until a row has
evicted. From then on it computes text only: ``continue_history`` starts no row from a history in
front of media. Behind all media the three axes are equal, and differ from the position by what the
media took less than their tokens (``mrope_position_delta``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_skipkv.kernels.on_device import device_tensor


def media_behind(req: Any, tokens: int) -> bool:
    """Whether a part of the prompt's media is behind its first ``tokens`` tokens."""
    media = req.multimodal_inputs
    return media is not None and any(
        # Models that place them by themselves leave no offsets.
        not item.offsets or any(stop >= tokens for _, stop in item.offsets)
        for item in media.mm_items
    )


def prepare_media(forward: Any, batch: Any, shifts: Sequence[int], counts: Sequence[int]) -> None:
    """What a forward pass is told of rows that have evicted: no media, and the positions behind
    them.

    Args:
        forward: ``ForwardBatch`` with logical positions.
        shifts: tokens that each row has evicted.
        counts: tokens that the pass computes of each row.
    """
    media = batch.multimodal_inputs
    if forward.mm_inputs is not None:
        pairs = zip(forward.mm_inputs, shifts, strict=True)
        forward.mm_inputs = [None if shift else one for one, shift in pairs]
    if forward.mrope_positions is None:
        return
    columns, deltas, first = list[int](), list[int](), 0
    for one, shift, count in zip(media, shifts, counts, strict=True):
        if shift:
            columns += range(first, first + count)
            deltas += [0 if one is None else int(one.mrope_position_delta)] * count
        first += count
    device = forward.positions.device
    at = device_tensor(columns, device)
    forward.mrope_positions[:, at] = forward.positions[at] + device_tensor(deltas, device)
