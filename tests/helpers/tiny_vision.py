"""The vision half of the small random models that read images, and their processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

#: by family: what transformers' classes are called, and a patch's side in pixels
_PREFIXES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
_VIDEO_PROCESSORS = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}
_PATCH_PIXELS = {"qwen2_5_vl": 14, "qwen3_vl": 16}
_MERGE = 2
_SIZES: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
    **{"spatial_merge_size": _MERGE, "temporal_patch_size": 2, "in_channels": 3},
}
#: what only one of the two has
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"in_chans": 3, "window_size": 56, "fullatt_block_indexes": [1]},
    # the first layer of the text gets features of the first layer of vision
    "qwen3_vl": {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]},
}


def vision_model(family: str, text: Mapping[str, Any], media_ids: Mapping[str, int]) -> Any:
    """Random weights. text: sizes of the model that generates."""
    vision = {**_SIZES, **_EXTRA[family], "patch_size": _PATCH_PIXELS[family]}
    config = getattr(transformers, f"{_PREFIXES[family]}Config")(
        text_config=dict(text),
        vision_config={**vision, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
        **media_ids,
    )
    return getattr(transformers, f"{_PREFIXES[family]}ForConditionalGeneration")(config)


def processor(family: str, tokenizer: Any) -> Any:
    """Images keep their sizes where these are multiples of two patches."""
    side = _PATCH_PIXELS[family]
    images = transformers.Qwen2VLImageProcessor(
        patch_size=side, min_pixels=(_MERGE * side) ** 2, max_pixels=64 * (_MERGE * side) ** 2
    )
    videos = getattr(transformers, _VIDEO_PROCESSORS[family])()
    return getattr(transformers, f"{_PREFIXES[family]}Processor")(
        image_processor=images, tokenizer=tokenizer, video_processor=videos
    )
