"""Which attention, KV pools and pages the capability matrix refuses, with SGLang's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capability_rows import on_a_server, row_named, scheduler_with

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.patches.engine import attention_layers, model_side
from sgl_skipkv.patches.startup import bind, pool_kinds
from sgl_skipkv.patches.startup.capabilities import STATES


def test_other_pools_are_refused_by_name() -> None:
    """Sparse attention has a pool of latents and more."""
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )

    check = row_named("KV pool").check
    assert check(scheduler_with(MHATokenToKVPool)) is None
    assert check(scheduler_with(MLATokenToKVPool)) is None
    refused = check(scheduler_with(DSATokenToKVPool))
    supported = "supported: MHATokenToKVPool, MLATokenToKVPool"
    assert refused == f"KV pool DSATokenToKVPool ({supported})"


def test_what_mla_is_refused_with() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    layer = {"num_kv_heads": 1, "head_dim": 32, "v_head_dim": 24}
    check = row_named("MLA").check

    def refused(*layers: dict[str, Any], dtype: torch.dtype = torch.bfloat16):
        scheduler = scheduler_with(MLATokenToKVPool, *layers)
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        pool.dtype, pool.kv_cache_dim, pool.kv_lora_rank = dtype, 32, 24
        pool.store_dtype = dtype if dtype.itemsize > 1 else torch.uint8
        return check(scheduler)

    assert check(scheduler_with(MHATokenToKVPool, {}, {})) is None
    assert refused(layer, layer) is None
    float8 = refused(layer, layer, dtype=torch.float8_e4m3fn)
    assert float8 == "MLA with KV cache dtype torch.float8_e4m3fn: untested"
    for other in ({"num_kv_heads": 4}, {"head_dim": 24}, {"v_head_dim": 32}):
        reads_else = "MLA with attention layers that do not read its latents (layer 1)"
        assert refused(layer, {**layer, **other}) == reads_else


def test_of_two_attentions_of_a_layer_the_one_over_the_cache_counts() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    both = {"attn_mqa": 1, "attn_mha": 4}
    model = torch.nn.ModuleList(
        torch.nn.ModuleDict({name: RadixAttention(4, 16, 1.0, n, i) for name, n in both.items()})
        for i in range(2)
    )
    assert attention_layers.attention_layers(model) == [layer["attn_mqa"] for layer in model]
    model_side.attach(model, recorder := object())
    attached = [name for name, one in model.named_modules() if hasattr(one, "skipkv")]
    assert attached == ["0.attn_mqa", "1.attn_mqa"] and model[0]["attn_mqa"].skipkv is recorder


def test_windows_need_a_layer_that_sees_everything() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    full, windows = row_named("full attention").check, {"sliding_window_size": 31}
    for layers in (({}, {}), (windows, {})):
        assert full(scheduler_with(MHATokenToKVPool, *layers)) is None
    refused = full(scheduler_with(MHATokenToKVPool, windows, windows))
    assert refused.startswith("a sliding window in every attention layer")


def with_window_pool(**more: Any) -> Any:
    """A scheduler whose window layers have a pool of their own."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    more = {"is_hybrid_swa": True, "page_size": 1, "enable_hierarchical_cache": False, **more}
    scheduler = scheduler_with(SWAKVPool, {"sliding_window_size": 31}, {}, **more)
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for name in ("full_kv_pool", "swa_kv_pool"):
        part = object.__new__(MHATokenToKVPool)
        part.kv_cache_layout, part.dtype = "nhd", torch.bfloat16
        setattr(pool, name, part)
    allocator = object.__new__(SWATokenToKVPoolAllocator)
    allocator.full_to_swa_index_mapping, allocator._kvcache = torch.zeros(2), pool
    allocator.page_size = more["page_size"]
    scheduler.token_to_kv_pool_allocator = allocator
    return scheduler


def test_what_a_window_pool_is_refused_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    check = row_named("window layers in a pool of their own").check
    for role in ("is_prefill_server", "is_decode_server"):
        monkeypatch.setattr(pool_kinds, role, lambda: False)
    for name in ("KV pool", "allocator", "window layers in a pool of their own"):
        assert row_named(name).check(with_window_pool()) is None

    def refused(**more: Any) -> str:
        found = str(check(with_window_pool(**more)))
        assert found.startswith("window layers in a pool of their own, with ")
        assert found.endswith("--disable-hybrid-swa-memory)")
        return found

    trees = {True: SimpleNamespace(swa_retain_window=31), False: SimpleNamespace()}
    assert check(with_window_pool(page_size=16, tree_cache=trees[True])) is None
    older: dict[str, Any] = {"page_size": 64, "tree_cache": trees[False]}
    assert "with pages of 64 tokens in SGLang 0.5.22 (" in refused(**older)
    scheduler = with_window_pool()
    scheduler.tp_worker.model_runner.prefill_aware_swa = True
    assert "with windows that keep the prompt (" in str(check(scheduler))
    both = refused(**older, enable_hierarchical_cache=True)
    assert "with pages of 64 tokens in SGLang 0.5.22 and HiCache (" in both
    monkeypatch.setattr(pool_kinds, "is_decode_server", lambda: True)
    assert "with PD disaggregation (" in refused()
    monkeypatch.setattr(pool_kinds, "is_decode_server", lambda: False)
    scheduler = with_window_pool()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool.swa_kv_pool.dtype = torch.float8_e4m3fn
    assert "with a quantised KV cache (" in str(check(scheduler))
    pool.full_kv_pool = object.__new__(MLATokenToKVPool)
    assert row_named("KV pool").check(scheduler).startswith("KV pool MLATokenToKVPool")
    # Another pool has another allocator.
    other = scheduler_with(MLATokenToKVPool, is_hybrid_swa=True, page_size=1)
    other.enable_hierarchical_cache = False
    other.token_to_kv_pool_allocator.get_kvcache().dtype = torch.bfloat16
    assert "with SimpleNamespace (" in str(check(other))


def with_states(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """A scheduler of whose layers some have a state instead of KV."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool

    settings = {"enable_mamba_extra_buffer_lazy": False, "enable_int8_mamba_checkpoint": False}
    settings["enable_linear_replayssm"] = False
    settings |= {name: more.pop(name) for name in [*settings] if name in more}
    on_a_server(monkeypatch, "exec.mamba", SimpleNamespace(**settings))
    attributes = {"is_hybrid_ssm": True, "enable_hierarchical_cache": False}
    attributes |= {"is_mixed_chunk": False, **more}
    scheduler = scheduler_with(HybridLinearKVPool, {}, {}, **attributes)
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool.full_kv_pool, pool.use_mla = object.__new__(MHATokenToKVPool), False
    pool.full_kv_pool.kv_cache_layout, pool.full_kv_pool.layer_num = "nhd", 2
    pool.full_kv_pool.dtype = torch.bfloat16
    states = SimpleNamespace(_slot_siblings=())
    scheduler.req_to_token_pool = SimpleNamespace(mamba_pool=states)
    return scheduler


def test_what_layers_with_a_state_are_refused_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("is_prefill_server", "is_decode_server"):
        monkeypatch.setattr(pool_kinds, role, lambda: False)
    check = row_named(STATES).check
    for name in ("KV pool", STATES, "layers of different shapes"):
        assert row_named(name).check(with_states(monkeypatch)) is None
    for setting, said in (
        ("enable_hierarchical_cache", "HiCache"),
        ("is_mixed_chunk", "--enable-mixed-chunk"),
        ("enable_mamba_extra_buffer_lazy", "--mamba-radix-cache-strategy extra_buffer_lazy"),
        ("enable_int8_mamba_checkpoint", "--enable-int8-mamba-checkpoint"),
        ("enable_linear_replayssm", "--enable-linear-replayssm"),
    ):
        refused = check(with_states(monkeypatch, **{setting: True}))
        assert refused == f"layers with a state instead of KV, with {said}"
    scheduler = with_states(monkeypatch)
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool.full_kv_pool.dtype = torch.float8_e4m3fn
    scheduler.req_to_token_pool.mamba_pool._slot_siblings = (object(),)
    both = "a quantised KV cache and states beside these"
    assert check(scheduler) == f"layers with a state instead of KV, with {both}"
    pool.use_mla = True
    assert "with MLA and a quantised" in str(check(scheduler))
    scheduler = with_states(monkeypatch)
    scheduler.req_to_token_pool = SimpleNamespace()
    assert check(scheduler) == "layers with a state instead of KV, with SimpleNamespace"
    monkeypatch.setattr(pool_kinds, "is_decode_server", lambda: True)
    assert "with PD disaggregation" in str(check(with_states(monkeypatch)))


def test_where_there_are_no_backups() -> None:
    """Nobody asked for any, none were asked for, and some were."""
    scheduler = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=None))
    reason = bind._without_backups(scheduler)
    facts = bind.ModelFacts(without_backups=reason)
    assert bind._wrong_settings(ServerConfig(kv_budget=64), facts) == []
    assert bind._wrong_settings(ServerConfig(retraction_backup_bytes=0), facts) == []
    (refused,) = bind._wrong_settings(ServerConfig(retraction_backup_bytes=1 << 20), facts)
    assert refused.startswith("retraction_backup_bytes: expected 0, because a state cannot go back")
    assert bind._without_backups(SimpleNamespace(req_to_token_pool=SimpleNamespace())) is None


def test_chunked_attention_is_refused() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    check, chunked = row_named("chunked attention").check, scheduler_with(MHATokenToKVPool, {}, {})
    assert check(chunked) is None
    chunked.tp_worker.model_runner.attention_chunk_size = 64
    assert check(chunked).startswith("chunked attention")


def test_what_scores_do_not_know_of_the_attention_is_refused() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    cap = row_named("capped attention logits").check
    scheduler = scheduler_with(MHATokenToKVPool, {}, {})
    assert cap(scheduler) is None
    for attention in scheduler.tp_worker.model_runner.model:
        attention.logit_cap = 50.0
    assert cap(scheduler) == "attention logits capped at 50: scores have no cap"


def test_the_largest_window_counts_as_in_config_json() -> None:
    from sgl_skipkv.patches.engine.attention_layers import model_window_tokens, scored_layers

    sizes = (31, -1, 63, -1)
    layers = [SimpleNamespace(sliding_window_size=size) for size in sizes]
    assert model_window_tokens(layers, None) == model_window_tokens(layers, 31) == 64
    assert model_window_tokens(layers, 127) == 128  # of backends that read the runner's
    assert scored_layers(layers) == [layers[1], layers[3]]
    # Without a window layer no backend reads it.
    assert model_window_tokens(layers[1:2], 31) == 0


def test_layers_of_different_heads_are_refused() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    check = row_named("layers of different shapes").check
    assert check(scheduler_with(MHATokenToKVPool, {}, {})) is None
    for other in ({"num_heads": 2}, {"num_kv_heads": 1}, {"head_dim": 32}, {"scaling": 1.0}):
        refused = check(scheduler_with(MHATokenToKVPool, {}, other))
        assert refused == "2 attention layers of 2 shapes over 2 cached"
    fewer = scheduler_with(MHATokenToKVPool, {}, {}, cached=1)
    assert check(fewer) == "2 attention layers of 1 shapes over 1 cached"


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64, 128])
def test_pages_of_tested_sizes_in_the_allocators_that_are_known(page_size: int) -> None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    whole = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    paged = PagedTokenToKVPoolAllocator(256, page_size, **whole)
    single = TokenToKVPoolAllocator(256, **whole)
    right, wrong = (single, paged) if page_size == 1 else (paged, single)
    scheduler = SimpleNamespace(page_size=page_size, token_to_kv_pool_allocator=right)
    tested = page_size in (1, 16, 32, 64)
    expected = None if tested else f"page size {page_size} (supported: 1, 16, 32, 64)"
    assert pool_kinds.page_size(scheduler) == expected
    assert pool_kinds.allocator(scheduler) is None
    scheduler.token_to_kv_pool_allocator = wrong
    assert type(wrong).__name__ in str(pool_kinds.allocator(scheduler))
    if page_size > 1:
        other = PagedTokenToKVPoolAllocator(256, 2 * page_size, **whole)
        scheduler.token_to_kv_pool_allocator = other
        assert f"pages of {2 * page_size} in memory" in str(pool_kinds.allocator(scheduler))
