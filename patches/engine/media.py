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
from sgl_skipkv.reuse.histories import HistoryMatch


def would_miss_media(req: Any, found: HistoryMatch) -> bool:
    """Whether SGLang would look for the media of a request that continues this history in the wrong
    place: some are behind it, or its row is longer than the prompt whose places SGLang knows."""
    media, history = req.multimodal_inputs, found.history
    if media is None or not history.evicted_tokens:
        return False
    sent_tokens = found.cut - history.unsent_tokens
    # Dropped thoughts leave in the row what opened them.
    is_longer = history.unsent_tokens > history.evicted_tokens
    return is_longer or any(
        # Models that place media by themselves say no offsets.
        not item.offsets or any(last >= sent_tokens for _, last in item.offsets)
        for item in media.mm_items
    )


def prepare_media(forward: Any, batch: Any, shifts: Sequence[int], counts: Sequence[int]) -> None:
    """Rows that have evicted: take their media from a forward pass, and set their three axes from
    the logical position.

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
    tokens, deltas, first = list[int](), list[int](), 0
    for one, shift, count in zip(media, shifts, counts, strict=True):
        if shift:
            tokens += range(first, first + count)
            deltas += [0 if one is None else int(one.mrope_position_delta)] * count
        first += count
    device = forward.positions.device
    at = device_tensor(tokens, device)
    forward.mrope_positions[:, at] = forward.positions[at] + device_tensor(deltas, device)
