"""Rows of the capability matrix about the KV pool: why eviction cannot work with it, or None."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.kernels.on_device import KEY_NAMES, TRITON_NAMES
from sgl_skipkv.patches.engine.forward import attention_layers

#: that tests have seen
PAGE_SIZES = (1, 16, 32, 64)


def page_size(scheduler: Any) -> str | None:
    if scheduler.page_size in PAGE_SIZES:
        return None
    return f"page size {scheduler.page_size} (supported: {', '.join(map(str, PAGE_SIZES))})"


def allocator(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    allocator = scheduler.token_to_kv_pool_allocator
    expected = TokenToKVPoolAllocator if scheduler.page_size == 1 else PagedTokenToKVPoolAllocator
    if type(allocator) is not expected:
        return f"allocator {type(allocator).__name__} (supported: {expected.__name__})"
    if allocator.page_size != scheduler.page_size:
        return f"pages of {allocator.page_size} in memory and of {scheduler.page_size} in the tree"
    return None


def kv_pool(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if _latent_pool(scheduler) is not None:
        return None
    if type(pool) is not MHATokenToKVPool:
        supported = "supported: MHATokenToKVPool, MLATokenToKVPool"
        return f"KV pool {type(pool).__name__} ({supported})"
    return None if pool.kv_cache_layout == "nhd" else f"KV layout {pool.kv_cache_layout}"


def prefix_tree(scheduler: Any) -> str | None:
    """A compacted row is kept out of the tree by a method that other components override."""
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tree = scheduler.tree_cache
    if type(tree) is not UnifiedRadixCache:
        return f"prefix cache {type(tree).__name__} (supported: UnifiedRadixCache)"
    kinds = {type(component) for component in tree.components.values()} - {FullComponent}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return f"prefix cache with {names} (supported: FullComponent)" if names else None


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
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if pool.dtype in KEY_NAMES and not pool.is_quantized_kv_cache:
        return None
    return f"KV cache dtype {pool.dtype}: block-scaled values"


def uniform_layers(scheduler: Any) -> str | None:
    if kv_pool(scheduler) is not None:
        return None
    runner = scheduler.tp_worker.model_runner
    layers = attention_layers(runner.model)
    shapes = {(m.tp_q_head_num, m.tp_k_head_num, m.head_dim, m.scaling) for m in layers}
    cached_layers = runner.token_to_kv_pool.layer_num
    if len(layers) == cached_layers and len(shapes) == 1:
        return None
    return f"{len(layers)} attention layers of {len(shapes)} shapes over {cached_layers} cached"
