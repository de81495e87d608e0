"""Images in the prompts of the tests. The token before an image says which one it is, so that
servers and oracles need no more than the prompt's ids."""

from __future__ import annotations

import base64
import functools
import io
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from PIL import Image
from tiny_models import IMAGE, VISION_END, VISION_START, prompt_ids
from transformers import AutoImageProcessor


def with_picture(seed: int | str, tokens: int) -> list[int]:
    """A prompt of so many tokens of text, one image among them."""
    text = prompt_ids(seed, tokens)
    return [*text[: tokens // 2], VISION_START, IMAGE, VISION_END, *text[tokens // 2 :]]


@functools.cache
def picture(seed: int) -> Image.Image:
    """Noise: no two places of it are alike. It takes at least 18 tokens."""
    rng = random.Random(seed)
    width, height = 64 + 32 * (seed % 3), 288
    return Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3))


def pictures(ids: Sequence[int]) -> list[Image.Image]:
    return [picture(ids[at - 1]) for at, token in enumerate(ids) if token == VISION_START]


def image_data(ids: Sequence[int]) -> list[str]:
    """As a request has them."""
    files = [io.BytesIO() for _ in pictures(ids)]
    for file, one in zip(files, pictures(ids), strict=True):
        one.save(file, "PNG")
    return [base64.b64encode(file.getvalue()).decode() for file in files]


class Pictures:
    """What one model makes of the images of a prompt."""

    def __init__(self, model_path: Path | str) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model_path)

    def pixels(self, ids: Sequence[int]) -> dict[str, Any]:
        """Arguments of the model's forward."""
        found = pictures(ids)
        return dict(self._processor(images=found, return_tensors="pt")) if found else {}

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """The prompt as the model sees it: as many ids as an image has tokens in its place, whether
        there was one or all of them."""
        merged = self._processor.merge_size**2
        sizes = [int(grid.prod()) // merged for grid in self.pixels(ids).get("image_grid_thw", ())]
        out: list[int] = []
        for token, run in groupby(ids):
            out += [IMAGE] * sizes.pop(0) if token == IMAGE else run
        return out
