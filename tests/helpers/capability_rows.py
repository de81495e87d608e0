"""Rows of the capability matrix, and made-up servers to ask them about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context

from sgl_skipkv.patches.startup.capabilities import CAPABILITIES


def nested(path: str, value: object) -> Any:
    """An object that has this value at this path."""
    for name in reversed(path.split(".")):
        value = SimpleNamespace(**{name: value})
    return value


def on_a_server(monkeypatch: pytest.MonkeyPatch, path: str, value: object) -> None:
    """SGLang's runtime context has this value at this path. Nothing may be imported meanwhile."""
    bag, _, rest = path.partition(".")
    found = nested(rest, value)
    monkeypatch.setattr(runtime_context, f"get_{bag}", lambda: found)


def row_named(name: str) -> Any:
    (row,) = (row for row in CAPABILITIES if row.name == name)
    return row


def scheduler_with(pool: type, *layers: dict[str, Any], cached: int = 2, **more: Any) -> Any:
    """A scheduler whose model has these attention layers, and whose pool is of this class."""
    from sglang.srt.layers.radix_attention import RadixAttention

    sizes = {"num_heads": 4, "head_dim": 16, "scaling": 0.25, "num_kv_heads": 2}
    attention = [RadixAttention(layer_id=i, **{**sizes, **layer}) for i, layer in enumerate(layers)]
    memory = object.__new__(pool)  # only its class and its layout are looked at
    memory.kv_cache_layout, memory.layer_num = "nhd", cached
    runner = SimpleNamespace(
        model=torch.nn.ModuleList(attention), attention_chunk_size=None, token_to_kv_pool=memory
    )
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: memory),
        tp_worker=SimpleNamespace(model_runner=runner),
        **{"is_hybrid_swa": False, "is_hybrid_ssm": False, **more},
    )
