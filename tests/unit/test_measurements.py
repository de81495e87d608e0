"""What is measured of the model: centres of its queries, un-rotated as SGLang rotates, refused
elsewhere; the reach of its heads; and how much both depend on the text."""

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
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches.api.gate import Gate
from sgl_skipkv.patches.api.metadata import Keys
from sgl_skipkv.patches.limits import ServerLimits
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.patches.startup import measurements
from sgl_skipkv.patches.startup.attention_check import AttentionMismatch
from sgl_skipkv.patches.startup.measurements import (
    NoRotation,
    _rotation,
    measure_model,
    rotation_of,
    text_ids,
    without_rotation,
)
from sgl_skipkv.policy import make_policy
from sgl_skipkv.policy.inputs.head_reach import head_reach
from sgl_skipkv.policy.inputs.query_centres import TEXT, QueryCentres, Rotation, means

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


def model(*ropes: Any, windows: int = 0) -> torch.nn.Module:
    """One layer with each of these; the last ``windows`` of them have a sliding window."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = []
    for i, rope in enumerate(ropes):
        layer, size = torch.nn.Module(), 31 if i >= len(ropes) - windows else -1
        layer.attn = RadixAttention(2, 16, 1.0, 2, i, sliding_window_size=size)
        layer.rotary_emb = rope
        layers.append(layer)
    return torch.nn.ModuleList(layers)


def test_all_layers_must_turn_alike() -> None:
    rope = embedding()
    assert rotation_of(model(rope, rope)).scale == 1.0
    with pytest.raises(NoRotation, match="layers with different rotary embeddings"):
        rotation_of(model(rope, embedding(base=500)))
    assert rotation_of(model(rope, embedding(base=500), windows=1)).scale == 1.0


@pytest.mark.parametrize("scaled", [1.0, 8.0])
def test_a_model_s_own_rotary_embedding_must_be_that_of_its_layers(scaled: float) -> None:
    """As Gemma 3's: its layers name an embedding without the scaling that the model turns by."""
    rope = embedding()
    whole, own = torch.nn.Module(), torch.nn.Module()
    own.inv_freq, own.attention_scaling = rope._compute_inv_freq(10000) / scaled, 1.0
    whole.model = model(rope, rope)
    whole.model.rotary_emb = own
    if scaled == 1.0:
        assert rotation_of(whole).scale == 1.0
        return
    with pytest.raises(NoRotation, match="not the rotary embedding of its layers"):
        rotation_of(whole)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_reach_is_the_most_attention_to_a_far_token(groups: int, has_sinks: bool) -> None:
    """Query by query and token by token in float64, T in and between the blocks; a sink has a share
    of the attention and is no token."""
    draw = torch.Generator().manual_seed(groups)
    queries = torch.randn(131, 2 * groups, 16, generator=draw)
    keys = torch.randn(131, 2, 16, generator=draw)
    sinks = torch.arange(2 * groups) + 1.0 if has_sinks else None
    expected = torch.zeros(2, dtype=torch.float64)
    for head in range(2 * groups):
        for t in range(64, 131):
            logits = keys[: t + 1, head // groups].double() @ queries[t, head].double() * 0.7
            taken = 0.0 if sinks is None else sinks[head].double().exp()
            far = (logits.exp() / (logits.exp().sum() + taken))[4 : t - 8]
            expected[head // groups] += far.max() / (131 - 64) / groups
    found = head_reach(queries, keys, 0.7, sinks)
    assert torch.allclose(found.double(), expected, rtol=1e-5)


def test_a_head_that_looks_at_one_far_token_has_reach_1_and_a_local_one_0() -> None:
    keys = torch.zeros(100, 2, 16)
    queries = torch.zeros(100, 2, 16)
    keys[20, 0, 0] = queries[:, 0, 0] = 100.0  # everybody looks at token 20
    turn = 2 * torch.pi * torch.arange(100) / 25  # everybody looks at where it is itself
    keys[:, 1, 0], keys[:, 1, 1] = turn.cos(), turn.sin()
    keys[:, 1, 2] = queries[:, 1, 2] = torch.arange(100) * 10.0
    far, near = head_reach(queries, keys, 1.0).tolist()
    assert far > 0.999 and near < 1e-6


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A scheduler of one attention layer, whose prefill is that layer alone: (scheduler, side)."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layer = torch.nn.Module()
    layer.attn, layer.rotary_emb = RadixAttention(2, 16, 1.0, 2, 0), embedding()
    model = torch.nn.ModuleList([layer])
    pool = SimpleNamespace(k_buffer=[torch.zeros(520, 2, 16)], v_buffer=[torch.zeros(520, 2, 16)])
    pool.get_kv_buffer = lambda layer: (pool.k_buffer[layer], pool.v_buffer[layer])
    runner = SimpleNamespace(model=model, dtype=torch.float32, kv_cache_dtype=torch.float32)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool, size=520),
        tokenizer=SimpleNamespace(encode=lambda text: [*range(len(text.split()))]),
        true_scale=0.25,
        model_config=SimpleNamespace(context_len=4096),
    )
    recorder = SimpleNamespace(
        device=torch.device("cpu"), shape=SimpleNamespace(head_dim=16), current=None
    )

    def prefill(scheduler: Any, ids: list[int], recorder: Any, serving: bool) -> None:
        scheduler.read = len(ids)
        queries, keys, values = torch.randn(3, len(ids), 32)
        slots = torch.arange(len(ids))
        pool.k_buffer[0][slots], pool.v_buffer[0][slots] = (
            x.view(-1, 2, 16) for x in (keys, values)
        )
        args = (queries, keys, values, SimpleNamespace(out_cache_loc=slots))
        for hook in layer.attn._forward_pre_hooks.values():
            hook(layer.attn, args, {})
        by_head = (x.view(1, -1, 2, 16).transpose(1, 2) for x in args[:3])
        output = scaled_dot_product_attention(*by_head, is_causal=True, scale=scheduler.true_scale)
        for hook in layer.attn._forward_hooks.values():
            hook(layer.attn, args, {}, output[0].transpose(0, 1).flatten(1))

    monkeypatch.setattr(measurements, "_prefill", prefill)
    return scheduler, SimpleNamespace(recorder=recorder, scale=0.25)


def test_what_is_measured_and_who_is_refused_without_it(measuring: Any, tmp_path: Path) -> None:
    scheduler, side = measuring
    ids = text_ids(scheduler, ServerConfig())
    model = scheduler.tp_worker.model_runner.model
    centres, reach = measure_model(scheduler, side, ids)
    assert centres is not None and centres.mean.shape == (1, 2, 8)
    assert without_rotation(model) is None
    assert reach.shape == (1, 2)
    assert scheduler.read == 512  # what the pool has room for
    text = tmp_path / "short.txt"
    text.write_text("word " * 64)
    with pytest.raises(SettingError, match=r"query_text: expected more than 64 tokens .*, got 64"):
        text_ids(scheduler, ServerConfig(query_text=str(text)))
    model[0].rotary_emb = None
    centres, reach = measure_model(scheduler, side, ids)
    assert centres is None and reach.shape == (1, 2)
    why = without_rotation(model)
    assert why is not None and "rotary" in why
    with pytest.raises(SettingError, match="query_text: expected a readable text file, got "):
        text_ids(scheduler, ServerConfig(query_text="none.txt"))


def test_a_model_that_attends_otherwise_is_refused(measuring: Any) -> None:
    scheduler, side = measuring
    scheduler.true_scale = 0.5
    with pytest.raises(AttentionMismatch, match="attention layer 0 is not that of its recorded"):
        measure_model(scheduler, side, text_ids(scheduler, ServerConfig()))
    assert not scheduler.tp_worker.model_runner.model[0].attn._forward_hooks


class _RealMeans(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mean.dim:
            assert not args[0].is_complex()
        return func(*args, **(kwargs or {}))


def test_no_mean_of_complex_numbers() -> None:
    """SGLang's kernel for means, with --enable-deterministic-inference, knows real numbers only."""
    with _RealMeans(), torch.inference_mode():
        mean, magnitude = means(_rotation(embedding()), torch.randn(70, 4, 16))
        with pytest.raises(AssertionError):
            mean.mean(dim=0)
    assert mean.shape == magnitude.shape == (4, 8) and mean.is_complex()


@pytest.mark.parametrize("serving", [False, True])
def test_a_prefill_that_fails_leaves_no_slot(monkeypatch: Any, serving: bool) -> None:
    """The server goes on without eviction, and SGLang would find the slots missing. No graph would
    have run, also where our hooks have seen the batch: a graph calls no hook of a layer."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    world, eager = World(), []
    recorder = world.runtime.recorder

    def fails(inputs: Any) -> None:
        eager.append(recorder.current is not None)
        raise torch.OutOfMemoryError

    def init_new(*args: Any, **kwargs: Any) -> None:
        recorder.current = None  # as ``prepare_forward`` does for a batch without our requests

    pools = world.token_to_kv_pool_allocator, world.req_to_token_pool
    if not serving:
        for holder in (world, world.req_to_token_pool):
            holder.skipkv = None  # as it is while the server starts
    runner = SimpleNamespace(forward=fails)
    alone = SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda batch: batch)
    monkeypatch.setattr(world, "dp_attn_adapter", alone, raising=False)
    monkeypatch.setattr(world, "tp_worker", SimpleNamespace(model_runner=runner), raising=False)
    monkeypatch.setattr(ForwardBatch, "init_new", init_new)
    free = [pool.available_size() for pool in pools]
    with pytest.raises(torch.OutOfMemoryError):
        measurements._prefill(world, [*range(3, 43)], recorder, serving)
    assert [pool.available_size() for pool in pools] == free
    assert eager == [True] and recorder.current is None


def test_a_request_without_centres_is_refused() -> None:
    world = World()
    limits = ServerLimits(without_rotation="no such embedding")
    world.skipkv = dataclasses.replace(world.skipkv, limits=limits)
    asked = {"kv_budget": 8, "kv_params": {"sink": 1, "window": 2}}
    refused = world.arrive([5, 6, 7], 9, kv_policy="triattention", **asked)
    message = refused.to_finish.message
    assert message.startswith("kv_policy: expected another policy on this server (no such embed")
    assert "got 'triattention'; choices: distinct, " in message
    gate = Gate(ServerConfig(), Readiness((), enabled=False), limits)  # before a stream begins
    with pytest.raises(SettingError, match="another policy on this server"):
        gate.check(Keys({"kv_policy": "triattention", "kv_budget": 64}))
    assert world.arrive([5, 6, 7], 9, kv_policy="keydiff", **asked).to_finish is None
    world.run_dry()
    world.drain()


def heldout(prompts: slice) -> str:
    lines = (REASONER / "heldout.jsonl").read_text().splitlines()[prompts]
    return "\n".join(json.loads(line)["prompt"] for line in lines)


def test_how_far_measurements_depend_on_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """On the bundled model, which knows one kind of problem and no prose: two texts of problems
    agree, in the centres and in what is kept of other problems. The package's prose is strange to
    it, and centres differ; more is kept alike than by chance. How far heads look is nearly the
    same on all three."""
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
    centres, kept, reach = {}, {}, {}
    for name, text in texts.items():
        asking, asked_for = seen(text, 1000)
        centres[name] = QueryCentres.measured(rotation, asking)
        layers = zip(asking, asked_for, strict=True)
        scale = oracle.model.config.head_dim**-0.5
        reach[name] = torch.stack([head_reach(q, k, scale) for q, k in layers]).flatten()
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
        alike = float(torch.cosine_similarity(reach["problems"], reach[name], dim=0))
        assert alike > 0.9
        lines.append(
            f"{name}: concentration {concentration:.2f}, cosine of centres: median "
            f"{cosine.median():.2f}, least {cosine.min():.2f}; {common:.0%} of a quarter kept "
            f"alike; cosine of the heads' reach {alike:.2f}"
        )
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert agreement["other problems"] > (0.98, 0.0) and agreement["other problems"][1] > 0.9
    assert agreement["prose"][1] > 0.35  # by chance: a quarter


@pytest.mark.parametrize("count", [1, 2, 512, 65536])
def test_a_mean_turn_is_the_mean_of_the_turns(count: int) -> None:
    """Of fast and slow bands, and of one that is not rotated."""
    rotation = Rotation.of(torch.tensor([1.0, 0.3, 1e-3, 1e-7, 0.0]), 10)
    expected = rotation.turns(range(count)).mean(dim=0)
    assert torch.allclose(rotation.mean_turn(count), expected, rtol=0, atol=1e-12)
