"""Draft models for speculative decoding, of a small random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: of the standard deviation of each weight: some drafts are right, and some are not
_NOISE = 0.005
_EXPERTS, _EXPERT_SIZE = 4, 32

Weights = dict[str, Tensor]


def save_draft(model: Path, kind: str) -> Path:
    """Write a draft model of a saved model; the same weights every time.

    Args:
        kind: for STANDALONE "alike", the model itself with noise; for EAGLE a random layer:
            "eagle" as Llama has it, "nextn" as DeepSeek has it.
    """
    folder, weights = model / f"draft-{kind}", load_file(model / "model.safetensors")
    if folder.exists():
        return folder
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("model.safetensors", "draft-*"))
    config = json.loads((folder / "config.json").read_text())
    draw = torch.Generator().manual_seed(5)
    if kind == "alike":
        for weight in weights.values():
            weight += torch.randn(weight.shape, generator=draw) * weight.std() * _NOISE
    elif kind == "eagle":
        config["architectures"] = [config["architectures"][0] + "Eagle"]
        weights = _eagle_layer(weights, config["hidden_size"], draw)
        config["num_hidden_layers"] = 1
    elif kind == "nextn":
        weights |= _nextn_layer(weights, config, draw)
        config |= {"num_nextn_predict_layers": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
        config |= {"n_routed_experts": _EXPERTS, "moe_intermediate_size": _EXPERT_SIZE}
        config |= {"n_group": 1, "topk_group": 1}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _first_layer(weights: Weights) -> Weights:
    first = "model.layers.0."
    names = (name for name in weights if name.startswith(first))
    return {name.removeprefix(first): weights[name].clone() for name in names}


def _joining(size: int, draw: torch.Generator) -> Tensor:
    """A token's embedding and the hidden state before it become one."""
    return torch.randn(size, 2 * size, generator=draw) / size**0.5


def _eagle_layer(weights: Weights, size: int, draw: torch.Generator) -> Weights:
    layer = {f"layers.0.{name}": weight for name, weight in _first_layer(weights).items()}
    del layer["layers.0.input_layernorm.weight"]
    return layer | {"fc.weight": _joining(size, draw), "fc.bias": torch.zeros(size)}


def _nextn_layer(weights: Weights, config: dict[str, Any], draw: torch.Generator) -> Weights:
    size, layer = config["hidden_size"], _first_layer(weights)
    for name in [name for name in layer if name.startswith("mlp.")]:
        dense = layer.pop(name)
        part = dense[:, :_EXPERT_SIZE] if "down" in name else dense[:_EXPERT_SIZE]
        for expert in (*(f"experts.{i}" for i in range(_EXPERTS)), "shared_experts"):
            layer[name.replace("mlp.", f"mlp.{expert}.")] = part.clone()
    layer["mlp.gate.weight"] = torch.randn(_EXPERTS, size, generator=draw)
    layer["mlp.gate.e_score_correction_bias"] = torch.zeros(_EXPERTS)
    layer["eh_proj.weight"] = _joining(size, draw)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{norm}.weight"] = torch.ones(size)
    number = config["num_hidden_layers"]
    return {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
