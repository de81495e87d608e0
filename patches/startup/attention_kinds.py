"""Rows of the capability matrix about a model's attention: why eviction cannot work with it, or
None."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.engine.attention_layers import attention_layers, scored_layers


def counting_attention(scheduler: Any) -> str | None:
    """Attention that counts row entries, or reads other rows."""
    runner = scheduler.tp_worker.model_runner
    if runner.attention_chunk_size is not None:
        return "chunked attention: its chunks count row entries"
    for layer in attention_layers(runner.model):
        if (layer.xai_temperature_len or 0) > 0:
            return "attention whose temperature counts row entries"
        if layer.is_cross_attention:
            return "cross-attention layers"
    return None


def full_attention(scheduler: Any) -> str | None:
    """No layer without a window."""
    layers = attention_layers(scheduler.tp_worker.model_runner.model)
    if layers and not scored_layers(layers):
        return "a sliding window in every attention layer: none could score"
    return None


def logit_cap(scheduler: Any) -> str | None:
    """Layers with a cap on their logits."""
    layers = attention_layers(scheduler.tp_worker.model_runner.model)
    caps = {layer.logit_cap for layer in layers if (layer.logit_cap or 0) > 0}
    return f"attention logits capped at {max(caps):g}: scores have no cap" if caps else None
