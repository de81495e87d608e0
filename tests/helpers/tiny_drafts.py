"""Draft models for speculative decoding, of a small random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

#: of the standard deviation of each weight: some drafts are right, and some are not
_NOISE = 0.02


def save_draft(model: Path, kind: str) -> Path:
    """Write a draft model of a saved model; the same weights every time.

    Args:
        kind: "alike", the model itself with noise, for STANDALONE; "eagle", a random layer.
    """
    folder, weights = model / f"draft-{kind}", load_file(model / "model.safetensors")
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("model.safetensors", "draft-*"))
    draw = torch.Generator().manual_seed(5)
    if kind == "alike":
        for weight in weights.values():
            weight += torch.randn(weight.shape, generator=draw) * weight.std() * _NOISE
    else:
        config = json.loads((folder / "config.json").read_text())
        architecture = config["architectures"][0] + "Eagle"
        config |= {"architectures": [architecture], "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
        first = "model.layers.0."
        weights = {
            name.removeprefix("model."): weight
            for name, weight in weights.items()
            if name.startswith(first) and "input_layernorm" not in name
        }
        size = config["hidden_size"]
        weights["fc.weight"] = torch.randn(size, 2 * size, generator=draw) / size**0.5
        weights["fc.bias"] = torch.zeros(size)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
