"""The masking oracle of a model that reads images, whose positions have three axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from oracle import MaskingOracle
from pictures import Pictures
from tiny_models import IMAGE, WITH_VISION
from torch import Tensor
from transformers import AutoModelForImageTextToText


class MediaOracle(MaskingOracle):
    loader = AutoModelForImageTextToText

    def __init__(self, model_path: Path | str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(model_path, dtype)
        self._pictures = Pictures(model_path)

    def expanded(self, prompt_ids: Sequence[int]) -> list[int]:
        return self._pictures.expanded(prompt_ids)

    def forward(self, ids: Tensor, mask: Any) -> Tensor:
        media = self._pictures.pixels(ids.tolist())
        kinds = (ids == IMAGE).long()[None]
        grid = media.get("image_grid_thw")
        at, _ = self.model.model.get_rope_index(
            ids[None], image_grid_thw=grid, mm_token_type_ids=kinds
        )
        logits: Tensor = self.model(
            input_ids=ids[None], attention_mask=mask, position_ids=at, **media
        ).logits
        return logits[0]


def oracle_of(family: str, model_path: Path) -> MaskingOracle:
    """Of a family of ``tiny_models``."""
    return (MediaOracle if family in WITH_VISION else MaskingOracle)(model_path)
