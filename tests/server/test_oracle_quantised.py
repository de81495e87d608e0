"""Quantised weights: int8 of bitsandbytes, which needs no GPU. In pages of 16, and some requests
are retracted and restored.

Its linear layers round what they are given, to bfloat16 and then to 8 bits, so rounding errors of
float32 seldom stay small: a few log-probabilities differ, and now and then a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
from fleet import flags_of
from oracle import MaskingOracle
from safetensors.torch import load_file, save_file
from server_parts import CHECKED, ONE_BATCH, PAGES_OF_16, retracts
from servers import Server, output_logprobs
from tiny_models import prompt_ids
from torch import Tensor, nn

from sgl_skipkv.policy import names

pytestmark = [pytest.mark.server, pytest.mark.slow]

FAMILY, TOKENS = "qwen3", 100
POLICIES = [name for name in names() if name != "full"]
FLAGS = ("--quantization", "bitsandbytes", "--load-format", "bitsandbytes")
#: columns with large inputs would be left out of it, for a whole batch at once
CONFIG = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0}


def quantised(model: Path, folder: Path) -> Path:
    """Write the model with projections in int8, one scale per row."""
    copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scale = weights[name].abs().amax(dim=1)
        weights[name] = (weights[name] / scale[:, None] * 127).round().to(torch.int8)
        weights[name.replace("weight", "SCB")] = scale
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {**CONFIG, "load_in_4bit": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Int8Linear(nn.Module):
    """As SGLang's linear layer calls bitsandbytes."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        from bitsandbytes import MatmulLtState  # looks for kernels when it is imported

        super().__init__()
        self.state = MatmulLtState(CB=weight, SCB=scale)
        self.state.has_fp16_weights = self.state.is_training = False

    def forward(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul

        found = matmul(x.to(torch.bfloat16), self.state.CB, state=self.state)
        return found.to(torch.float16).to(x.dtype)


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory) -> Path:
    return quantised(model_folder(FAMILY), tmp_path_factory.mktemp("quantised") / "model")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory) -> Iterator[Server]:
    own = tmp_path_factory.mktemp("quantised")
    flags = (*FLAGS, *ONE_BATCH, *PAGES_OF_16, *flags_of(own, CHECKED))
    running = Server(folder, own, flags, env=retracts(40))
    try:
        yield running.wait_ready(400)
        running.assert_clean()
    finally:
        running.stop()


def test_tokens_are_the_argmax_under_the_trace_masks(server, folder, model_folder, oracle) -> None:
    weights, judge = load_file(folder / "model.safetensors"), MaskingOracle(model_folder(FAMILY))
    for name in [name for name in weights if name.endswith("proj.weight")]:
        layer = Int8Linear(weights[name], weights[name.replace("weight", "SCB")])
        judge.model.set_submodule(name.removesuffix(".weight"), layer)
    parameters = {"kv_budget": 40, "kv_params": {"interval": 16, "delimiters": "any-newline"}}
    calls = [
        {"rid": name, "input_ids": prompt_ids(name, 30), "tokens": TOKENS, "kv_policy": name}
        | parameters
        for name in POLICIES
    ]
    wrong, unmasked, unquantised, restored, gaps = 0, 0, 0, 0, list[Tensor]()
    for asked, answer in zip(calls, server.generate_all(calls), strict=True):
        prompt, ids, events = asked["input_ids"], answer["output_ids"], server.events(asked["rid"])
        assert answer["meta_info"]["skipkv"]["compactions"] >= 3, asked["rid"]
        verdict = judge.judge(prompt, ids, events)
        wrong += len(verdict.wrong)
        gaps.append((torch.tensor(output_logprobs(answer)) - verdict.logprobs).abs())
        unmasked += len(judge.judge(prompt, ids, []).wrong)
        unquantised += len(oracle(FAMILY).judge(prompt, ids, events).wrong)
        restored += [event["event"] for event in events].count("restore")
    tokens = TOKENS * len(calls)
    assert wrong <= tokens // 200 and torch.cat(gaps).quantile(0.98) <= 0.02
    assert unmasked >= tokens // 5 and unquantised >= tokens // 10
    assert restored >= 1
