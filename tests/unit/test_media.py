"""What a forward pass is told of images in rows that have evicted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_skipkv.patches.engine.media import prepare_media, would_miss_media


def media(*offsets: Any, delta: int = 0) -> SimpleNamespace:
    items = [SimpleNamespace(offsets=one) for one in offsets]
    return SimpleNamespace(mm_items=items, mrope_position_delta=torch.tensor([[delta]]))


def missed(images: Any, cut: int, evicted_tokens: int = 1, unsent_tokens: int = 0) -> bool:
    """Whether a request with these images may not continue such a history."""
    history = SimpleNamespace(evicted_tokens=evicted_tokens, unsent_tokens=unsent_tokens)
    found: Any = SimpleNamespace(cut=cut, history=history)
    return would_miss_media(SimpleNamespace(multimodal_inputs=images), found)


@pytest.mark.parametrize(
    ("offsets", "stop"),
    [([[(3, 9)]], 10), ([[(3, 9), (20, 29)]], 30), ([[(3, 9)], [(20, 29)]], 30)],
)
def test_a_history_ends_behind_all_media(offsets: list[Any], stop: int) -> None:
    assert not missed(media(*offsets), stop)
    assert missed(media(*offsets), stop - 1)
    assert not missed(media(*offsets), stop - 1, evicted_tokens=0)  # the row is the prompt
    # The prompt is shorter than the text by what was dropped.
    assert not missed(media(*offsets), stop + 6, evicted_tokens=6, unsent_tokens=6)
    assert missed(media(*offsets), stop + 5, evicted_tokens=6, unsent_tokens=6)


def test_media_without_places_are_behind_everything() -> None:
    assert missed(media([(3, 9)], None), 100) and not missed(None, 0)


def test_a_row_that_is_longer_than_its_prompt() -> None:
    """SGLang has three axes for the prompt's tokens, and none for a row entry behind them."""
    assert missed(media([(3, 9)]), 100, evicted_tokens=20, unsent_tokens=21)
    assert not missed(media([(3, 9)]), 100, evicted_tokens=21, unsent_tokens=21)


@pytest.mark.parametrize("axes", [True, False])
def test_only_rows_that_have_evicted_are_changed(axes: bool) -> None:
    """Three rows: with an image, compacted; with an image, whole; text, compacted."""
    first, second = media([(2, 5)], delta=-3), media([(0, 1)], delta=-1)
    inputs = [first, second, None]
    forward = SimpleNamespace(
        mm_inputs=inputs,
        positions=torch.tensor([30, 31, 7, 50]),
        mrope_positions=torch.tensor([[20, 21, 1, 40]] * 3) if axes else None,
    )
    batch = SimpleNamespace(multimodal_inputs=inputs)
    prepare_media(forward, batch, shifts=[10, 0, 9], counts=[2, 1, 1])
    assert forward.mm_inputs == [None, second, None]
    assert inputs == [first, second, None]  # the batch's own list
    if axes:
        assert forward.mrope_positions.tolist() == [[27, 28, 1, 50]] * 3
