"""A float8 KV cache: what its bytes stand for is what is scored, on SGLang's pool and a server."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet import Fleet
from pool_content import plugin_and_topology
from score_oracle import ScoreOracle
from servers import Server
from tiny_models import prompt_ids
from triton_tools import FLOAT8S

from sgl_skipkv import policy
from sgl_skipkv.kernels import on_device
from sgl_skipkv.patches.engine import kv_cache, model_side

LAYERS, HEADS, HEAD_DIM, SLOTS = 2, 3, 16, 40


@pytest.fixture(scope="module")
def float8(fleet: Fleet) -> Iterator[Server]:
    yield from fleet.lent("float8")


@pytest.mark.parametrize("dtype", FLOAT8S, ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch_native"])
def test_keys_are_read_with_the_scale_that_they_were_written_with(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, backend: str
) -> None:
    """SGLang's pool and attention layers; torch_native writes without scales."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    torch.manual_seed(0)
    with plugin_and_topology():
        layers = [RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, i) for i in range(LAYERS)]
        pool = MHATokenToKVPool(
            *(SLOTS, 1, dtype, HEADS, HEAD_DIM, LAYERS, "cpu"), enable_memory_saver=False
        )
    model = torch.nn.ModuleList(layers)
    runner = SimpleNamespace(dtype=torch.bfloat16, kv_cache_dtype=dtype, model=model)
    kernel = SimpleNamespace(attention_backend=backend, decode_attention_backend=None)
    with monkeypatch.context() as patch:  # nothing may be imported meanwhile
        patch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(kernel=kernel))
        scales_of = model_side.kv_scales_of(runner)
        binding = SimpleNamespace(kv_scales=scales_of, scored_layers=range(LAYERS))
    pages = SimpleNamespace(skipkv=binding, req_to_token=torch.zeros(2, SLOTS, dtype=torch.int32))
    pages.req_to_token[1, :7] = torch.tensor([9, 4, 30, 2, 17, 8, 1])
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1, kv_allocated_len=SLOTS), output_ids=[])
    state = SimpleNamespace(prompt=SimpleNamespace(uncounted_tokens=0, tokens=0))
    # After the binding was made, as new weights bring it.
    layers[1].k_scale_float, layers[1].v_scale_float = 0.5, 0.25
    scaled = backend == "triton"
    scales, v_scales = ([1.0, one if scaled else 1.0] for one in (0.5, 0.25))
    for layer, scale, v_scale in zip(layers, scales, v_scales, strict=True):
        keys = torch.randn(7, HEADS, HEAD_DIM).bfloat16()
        slots = pages.req_to_token[1, :7].long()
        given = (scale, v_scale) if scaled else (None, None)
        pool.set_kv_buffer(layer, slots, keys.clone(), keys.clone(), *given)
        due = kv_cache.due_of(req, state, 7, pages, allocator, None)
        for read, factor in ((due.keys, scale), (due.values, v_scale)):
            found = read(layer.layer_id)
            assert found.dtype == torch.float32
            assert torch.equal(found, (keys / factor).to(dtype).float() * factor)
            assert (found - keys.float()).abs().max() < 0.3  # float8 is coarse
    monkeypatch.setattr(on_device, "uses_triton", lambda device: True)
    cache = kv_cache.paged_cache(pages, allocator)
    assert cache is not None and cache.k_scales is not None
    assert cache.layer.dtype == dtype and cache.k_scales.tolist() == scales
    assert cache.v_scales is not None and cache.v_scales.tolist() == v_scales


def test_a_cache_in_the_models_type_has_no_scales() -> None:
    runner = SimpleNamespace(dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16)
    assert model_side.kv_scales_of(runner) == (None, None)
    assert model_side._recorded_dtype(runner) == torch.bfloat16
    runner.kv_cache_dtype = torch.float16  # queries meet keys in their type
    assert model_side._recorded_dtype(runner) == torch.float16
    runner.kv_cache_dtype = torch.float8_e4m3fn
    assert model_side._recorded_dtype(runner) == torch.bfloat16


@pytest.mark.server
@pytest.mark.slow
def test_kept_sets_are_those_of_a_forward_with_a_rounded_cache(
    float8: Server, model_folder: Any
) -> None:
    """In float64, keys and values rounded as the server's are.

    What is rounded is a float32 forward's number on one side and a float64 one's on the other, so
    once in a while one falls on the other side of a middle, and a set may differ.
    """
    wrong, compactions = {torch.float8_e4m3fn: 0, torch.float64: 0}, 0
    for name in ("rkv", "tova", "rpc"):
        prompt = prompt_ids(name, 40)
        parameters = {"interval": 16, "kernel": 3} if name != "tova" else {"interval": 16}
        keys = {"kv_budget": 32, "kv_policy": name, "kv_params": parameters}
        answer = float8.generate(prompt, 200, rid=name, **keys)
        info = answer["meta_info"]["skipkv"]
        assert info["peak_kv_tokens"] <= 32 + 16 + 1 and info["compactions"] >= 8
        events = [event for event in float8.events(name) if event["event"] == "compact"]
        chosen = policy.make_policy(name, **parameters)
        sides = prompt, answer["output_ids"], events, [False] * 200, chosen
        for cached in wrong:
            found = ScoreOracle(model_folder("llama"), cached).choices(*sides)
            wrong[cached] += sum(choice.inversion > 2e-6 for choice in found)
        compactions += len(events)
    assert compactions >= 25 and wrong[torch.float8_e4m3fn] <= 1
    assert wrong[torch.float64] > compactions / 2, "rounding makes no difference here"
