"""What a forward pass is told of images in rows that have evicted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_skipkv.patches.engine.media import media_behind, prepare_media


def media(*offsets: Any, delta: int = 0) -> SimpleNamespace:
    items = [SimpleNamespace(offsets=one) for one in offsets]
    return SimpleNamespace(mm_items=items, mrope_position_delta=torch.tensor([[delta]]))


@pytest.mark.parametrize(
    ("offsets", "behind"),
    [([[(3, 9)]], 10), ([[(3, 9), (20, 29)]], 30), ([[(3, 9)], [(20, 29)]], 30), ([], 0)],
)
def test_media_end_at_their_last_token(offsets: list[Any], behind: int) -> None:
    req = SimpleNamespace(multimodal_inputs=media(*offsets))
    assert not media_behind(req, behind)
    assert not offsets or media_behind(req, behind - 1)


def test_media_without_places_are_behind_everything() -> None:
    assert media_behind(SimpleNamespace(multimodal_inputs=media([(3, 9)], None)), 100)
    assert not media_behind(SimpleNamespace(multimodal_inputs=None), 0)


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
