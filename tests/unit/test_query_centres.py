"""Centres of the model's queries: un-rotated as SGLang rotates, refused elsewhere, and the same
whatever the text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool_content import plugin_and_topology
from pool_world import World
from score_inputs import score_input
from score_oracle import ScoreOracle
from torch import Tensor

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches.startup.query_centres import (
    NoRotation,
    _rotation,
    query_centres_of,
    rotation_of,
)
from sgl_skipkv.policy import make_policy
from sgl_skipkv.policy.query_centres import TEXT, QueryCentres, Rotation

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pairs": {"is_neox_style": False},
    "half of the head": {"partial_rotary_factor": 0.5},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
    "yarn": {"rope_scaling": YARN},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


@pytest.fixture(scope="module", autouse=True)
def sglang() -> Iterator[None]:
    with plugin_and_topology():
        yield


def embedding(**options: Any) -> Any:
    from sglang.srt.layers.rotary_embedding import get_rope

    given = {"head_size": 16, "rotary_dim": 16, "max_position": 256, "base": 10000, **options}
    return get_rope(**given, dtype=torch.float32)


@pytest.mark.parametrize("name", ROPES)
def test_queries_are_unrotated_as_sglang_rotates_them(name: str) -> None:
    queries = torch.randn(150, 3, 16, generator=torch.Generator().manual_seed(1))
    rotary = embedding(**ROPES[name])
    rotated, _ = rotary.forward_native(
        torch.arange(150), queries.flatten(1).clone(), queries.flatten(1).clone()
    )
    rotation = _rotation(rotary)
    assert (rotation.scale > 1) == (name == "yarn")
    found = rotation.unrotated(rotated.view(150, 3, 16), range(150))
    assert (found - rotation.bands(queries)).abs().max() < 1e-4
    assert (rotation.bands(rotated.view(150, 3, 16)) - rotation.bands(queries)).abs().max() > 1


@pytest.mark.parametrize("kind", ["dynamic", "mrope"])
def test_what_turns_otherwise_is_refused_by_name(kind: str) -> None:
    scaling: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0}
    if kind == "mrope":
        scaling = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    with pytest.raises(NoRotation, match=r"RotaryEmbedding: its turn does not follow"):
        _rotation(embedding(rope_scaling=scaling))
    with pytest.raises(NoRotation, match="without a rotary embedding"):
        _rotation(None)


def test_a_changed_table_is_refused() -> None:
    rotary = embedding(base=5000)
    rotary.cos_sin_cache = rotary.cos_sin_cache.roll(1, 0)
    with pytest.raises(NoRotation, match="its table is not that of its frequencies"):
        _rotation(rotary)


def test_all_layers_must_turn_alike() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    def model(*ropes: Any) -> torch.nn.Module:
        layers = []
        for i, rope in enumerate(ropes):
            layer = torch.nn.Module()
            layer.attn, layer.rotary_emb = RadixAttention(2, 16, 1.0, 2, i), rope
            layers.append(layer)
        return torch.nn.ModuleList(layers)

    rope = embedding()
    assert rotation_of(model(rope, rope)).scale == 1.0
    with pytest.raises(NoRotation, match="layers with different rotary embeddings"):
        rotation_of(model(rope, embedding(base=500)))


def test_centres_are_measured_if_somebody_asked_for_them() -> None:
    """Without a text, and with another default policy, no forward pass runs."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = torch.nn.Module()
    layer.attn, layer.rotary_emb = RadixAttention(2, 16, 1.0, 2, 0), embedding()
    runner = SimpleNamespace(model=torch.nn.ModuleList([layer]))
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    side: Any = SimpleNamespace(recorder=SimpleNamespace(device=torch.device("cpu")))
    centres, refused = query_centres_of(scheduler, side, ServerConfig())
    assert centres is not None and refused == {"triattention": "started without query_text"}
    layer.rotary_emb = None
    _, refused = query_centres_of(scheduler, side, ServerConfig())
    assert [*refused] == ["triattention", "expected"]
    layer.rotary_emb = embedding()
    with pytest.raises(SettingError, match="query_text: expected a readable text file, got "):
        query_centres_of(scheduler, side, ServerConfig(query_text="none.txt"))


def test_a_request_without_centres_is_refused() -> None:
    world = World()
    world.skipkv = dataclasses.replace(
        world.skipkv, refused_policies={"triattention": "no such embedding"}
    )
    asked = {"kv_budget": 8, "kv_params": {"sink": 1, "window": 2}}
    refused = world.arrive([5, 6, 7], 9, kv_policy="triattention", **asked)
    message = refused.to_finish.message
    assert message.startswith("kv_policy: expected another policy on this server (no such embed")
    assert "got 'triattention'; choices: skipkv, " in message
    assert world.arrive([5, 6, 7], 9, kv_policy="keydiff", **asked).to_finish is None
    world.run_dry()
    world.drain()


def heldout(prompts: slice) -> str:
    lines = (REASONER / "heldout.jsonl").read_text().splitlines()[prompts]
    return "\n".join(json.loads(line)["prompt"] for line in lines)


def test_how_far_centres_depend_on_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled model, which knows one kind of problem and no prose: two texts of problems
    agree, in the centres and in what is kept of other problems. The package's prose is strange to
    it, and they differ; more is kept alike than by chance."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    oracle, tokenizer = ScoreOracle(REASONER), get_tokenizer(str(REASONER))

    def seen(text: str, tokens: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(tokenizer.encode(text)[:tokens])
        queries, keys, *_ = oracle._forward(ids, torch.ones(len(ids), len(ids)).bool().tril())
        return queries, keys

    rotation = Rotation.of(oracle.frequencies, oracle.model.config.head_dim)
    texts = {
        "problems": heldout(slice(0, 20)),
        "other problems": heldout(slice(20, 40)),
        "prose": TEXT.read_text(),
    }
    _, keys = seen(heldout(slice(100, 130)), 600)
    inputs = dataclasses.replace(
        score_input(0, n=600, layers=len(keys)),
        positions=torch.arange(600),
        logical_tokens=600,
        keys=lambda layer: keys[layer].float(),
    )
    centres, kept = {}, {}
    for name, text in texts.items():
        centres[name] = QueryCentres.measured(rotation, seen(text, 1500)[0])
        asked = dataclasses.replace(inputs, centres=centres[name])
        best = make_policy("triattention").scores(asked)[10:-8].topk(145).indices
        kept[name] = {*best.tolist()}
    lines, agreement = [], {}
    for name in ("other problems", "prose"):
        one, other = centres["problems"].mean, centres[name].mean
        product = (one * other.conj()).sum(dim=-1).real
        cosine = product / (one.norm(dim=-1) * other.norm(dim=-1))
        common = len(kept["problems"] & kept[name]) / 145
        agreement[name] = float(cosine.median()), common
        concentration = float((other.abs() / centres[name].magnitude).mean())
        lines.append(
            f"{name}: concentration {concentration:.2f}, cosine of centres: median "
            f"{cosine.median():.2f}, least {cosine.min():.2f}; {common:.0%} of a quarter kept alike"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert agreement["other problems"] > (0.98, 0.0) and agreement["other problems"][1] > 0.9
    assert agreement["prose"][1] > 0.35  # by chance: a quarter
