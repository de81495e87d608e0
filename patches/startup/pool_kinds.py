"""Rows of the capability matrix about the KV pool: why eviction cannot work with it, or None."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.kernels.on_device import KEY_NAMES, TRITON_NAMES
from sgl_skipkv.patches.engine.attention_layers import attention_layers
from sgl_skipkv.patches.engine.linear_states import has_linear_states
from sgl_skipkv.patches.engine.pd_roles import is_decode_server, is_prefill_server
from sgl_skipkv.patches.engine.window_pool import has_window_pool

#: that tests have seen
PAGE_SIZES = (1, 16, 32, 64)


def page_size(scheduler: Any) -> str | None:
    if scheduler.page_size in PAGE_SIZES:
        return None
    return f"page size {scheduler.page_size} (supported: {', '.join(map(str, PAGE_SIZES))})"


def allocator(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    allocator = scheduler.token_to_kv_pool_allocator
    expected = TokenToKVPoolAllocator if scheduler.page_size == 1 else PagedTokenToKVPoolAllocator
    if has_window_pool(allocator):
        expected = SWATokenToKVPoolAllocator
    if type(allocator) is not expected:
        return f"allocator {type(allocator).__name__} (supported: {expected.__name__})"
    if allocator.page_size != scheduler.page_size:
        return f"pages of {allocator.page_size} in memory and of {scheduler.page_size} in the tree"
    return None


def kv_pool(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if _latent_pool(scheduler) is not None:
        return None
    for pool in _head_pools(scheduler):
        if type(pool) is not MHATokenToKVPool:
            supported = "supported: MHATokenToKVPool, MLATokenToKVPool"
            return f"KV pool {type(pool).__name__} ({supported})"
        if pool.kv_cache_layout != "nhd":
            return f"KV layout {pool.kv_cache_layout}"
    return None


def window_pool(scheduler: Any) -> str | None:
    """Window layers in a pool of their own, beside what was not made to work with it."""
    if not scheduler.is_hybrid_swa:
        return None
    allocator, pools = scheduler.token_to_kv_pool_allocator, _head_pools(scheduler)
    beside = {
        # There a row keeps less than a window in whole pages, and a compaction may need that.
        f"pages of {scheduler.page_size} tokens in SGLang 0.5.22": (
            scheduler.page_size != 1 and not hasattr(scheduler.tree_cache, "swa_retain_window")
        ),
        "windows that keep the prompt": getattr(
            scheduler.tp_worker.model_runner, "prefill_aware_swa", False
        ),
        "a ring per request": getattr(allocator, "swa_req_ring", False),
        "PD disaggregation": is_prefill_server() or is_decode_server(),
        "HiCache": scheduler.enable_hierarchical_cache,
        "a quantised KV cache": any(one.dtype not in TRITON_NAMES for one in pools),
    }
    found = " and ".join(name for name, is_there in beside.items() if is_there)
    if not found and has_window_pool(allocator):
        return None
    return (
        f"window layers in a pool of their own, with {found or type(allocator).__name__} "
        "(one pool for all layers: --disable-hybrid-swa-memory)"
    )


def linear_states(scheduler: Any) -> str | None:
    """Layers with a state instead of KV, beside what was not made to work with them."""
    if not scheduler.is_hybrid_ssm:
        return None
    from sglang.srt.runtime_context import get_exec

    allocator, states = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    is_on = get_exec().mamba
    beside = {
        "MLA": getattr(allocator.get_kvcache(), "use_mla", False),
        "window layers in a pool of their own": has_window_pool(allocator),
        "a quantised KV cache": any(
            one.dtype not in TRITON_NAMES for one in _head_pools(scheduler)
        ),
        "PD disaggregation": is_prefill_server() or is_decode_server(),
        "HiCache": scheduler.enable_hierarchical_cache,
        "--enable-mixed-chunk": scheduler.is_mixed_chunk,
        "--mamba-radix-cache-strategy extra_buffer_lazy": is_on.enable_mamba_extra_buffer_lazy,
        "--enable-int8-mamba-checkpoint": is_on.enable_int8_mamba_checkpoint,
        "--enable-linear-replayssm": is_on.enable_linear_replayssm,
        "states beside these": bool(
            getattr(getattr(states, "mamba_pool", None), "_slot_siblings", ())
        ),
    }
    found = " and ".join(name for name, is_there in beside.items() if is_there)
    if not found and has_linear_states(states):
        return None
    return f"layers with a state instead of KV, with {found or type(states).__name__}"


def without_budget_reuse(scheduler: Any) -> str | None:
    """Why no request may evict from a history."""
    if not has_window_pool(scheduler.token_to_kv_pool_allocator):
        return None
    return (
        "window layers in a pool of their own: a copied row cannot lock less than its history (one "
        "pool for all layers: --disable-hybrid-swa-memory)"
    )


def prefix_tree(scheduler: Any) -> str | None:
    """A compacted row is kept out of the tree by a method that other components override. Of all
    components the shortest part is inserted."""
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
    from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tree = scheduler.tree_cache
    if type(tree) is not UnifiedRadixCache:
        return f"prefix cache {type(tree).__name__} (supported: UnifiedRadixCache)"
    supported = {FullComponent, SWAComponent, MambaComponent}
    kinds = {type(component) for component in tree.components.values()} - supported
    names, known = (
        ", ".join(sorted(kind.__name__ for kind in some)) for some in (kinds, supported)
    )
    return f"prefix cache with {names} (supported: {known})" if names else None


def _head_pools(scheduler: Any) -> list[Any]:
    """The pool of keys and values of heads, or the two where window layers have their own."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is HybridLinearKVPool:  # of the attention layers alone
        return [pool.full_kv_pool]
    return [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]


def _latent_pool(scheduler: Any) -> Any:
    """The pool of MLA's latents; None: it is another one. Sparse attention has a subclass, whose
    rows hold more."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return pool if type(pool) is MLATokenToKVPool else None


def latents(scheduler: Any) -> str | None:
    pool = _latent_pool(scheduler)
    if pool is None:
        return None
    if pool.dtype not in TRITON_NAMES or pool.store_dtype != pool.dtype:
        return f"MLA with KV cache dtype {pool.dtype}: untested"
    for layer in attention_layers(scheduler.tp_worker.model_runner.model):
        widths = layer.tp_k_head_num, layer.head_dim, layer.v_head_dim
        if widths != (1, pool.kv_cache_dim, pool.kv_lora_rank):
            return (
                f"MLA with attention layers that do not read its latents (layer {layer.layer_id})"
            )
    return None


def quantised_kv(scheduler: Any) -> str | None:
    if kv_pool(scheduler) is not None or _latent_pool(scheduler) is not None:
        return None  # the row of ``kv_pool`` or ``latents`` reports it; these have other attributes
    for pool in _head_pools(scheduler):
        if pool.dtype not in KEY_NAMES or pool.is_quantized_kv_cache:
            return f"KV cache dtype {pool.dtype}: block-scaled values"
    return None


def uniform_layers(scheduler: Any) -> str | None:
    if kv_pool(scheduler) is not None:
        return None
    runner = scheduler.tp_worker.model_runner
    layers = attention_layers(runner.model)
    shapes = {(m.tp_q_head_num, m.tp_k_head_num, m.head_dim, m.scaling) for m in layers}
    cached_layers = sum(pool.layer_num for pool in _head_pools(scheduler))
    if len(layers) == cached_layers and len(shapes) == 1:
        return None
    return f"{len(layers)} attention layers of {len(shapes)} shapes over {cached_layers} cached"
