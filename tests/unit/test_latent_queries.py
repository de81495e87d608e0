"""MLA: what is recorded and looked at where a backend gets queries in two parts or another form.

GPU backends do that; here SGLang's own attention layers are called as they are there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_skipkv.patches.engine import forward, kv_cache, model_side
from sgl_skipkv.patches.startup import measurements
from sgl_skipkv.patches.startup.attention_check import AttentionMismatch
from sgl_skipkv.policy.inputs.paged_cache import PagedCache
from sgl_skipkv.recording.recorder import ModelShape, Recorder, Recording
from sgl_skipkv.recording.sentences import Delimiters

HEADS, RANK, ROTARY, TOKENS = 4, 24, 8, 5


def recorder_of_latents() -> Recorder:
    return Recorder(
        ModelShape(1, HEADS, RANK + ROTARY, 8),
        **{"track_count": 1, "query_window": 8, "max_sentences": 4},
        delimiters=Delimiters([], 4),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def model_of_one_layer() -> Any:
    """With both attentions of a layer."""
    from sglang.srt.layers.radix_attention import RadixAttention

    latent = RadixAttention(HEADS, RANK + ROTARY, 1.0, 1, 0, v_head_dim=RANK)
    expanded = RadixAttention(HEADS, 24, 1.0, HEADS, 0, v_head_dim=16)
    layer = torch.nn.ModuleDict({"attn_mqa": latent, "attn_mha": expanded})
    return torch.nn.ModuleList([layer])


def test_both_parts_of_a_query_are_recorded_and_no_other_attention_is() -> None:
    recorder, model = recorder_of_latents(), model_of_one_layer()
    model_side.attach(model, recorder)
    positions = torch.arange(TOKENS)
    recorder.current = Recording(torch.ones_like(positions), positions)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    latent, rotary = torch.randn(TOKENS, HEADS, RANK), torch.randn(TOKENS, HEADS, ROTARY)
    whole = torch.cat([latent, rotary], dim=2)
    mqa, mha = model[0]["attn_mqa"], model[0]["attn_mha"]
    forward.record_queries(mqa, latent, None, None, batch, q_rope=rotary, k_rope=None)
    assert torch.equal(recorder.queries.data[0, 1, :TOKENS], whole)
    recorder.queries.data.zero_()
    forward.record_queries(mqa, whole, None, None, batch)
    assert torch.equal(recorder.queries.data[0, 1, :TOKENS], whole)
    forward.record_queries(mha, torch.ones(TOKENS, HEADS, 24), None, None, batch)
    assert torch.equal(recorder.queries.data[0, 1, :TOKENS], whole)


@pytest.mark.parametrize(
    ("drafts_with", "others"),
    [(None, "--enable-deterministic-inference"), ("EAGLE", "no flag, with drafts")],
)
def test_a_prefill_that_asks_no_latents_is_refused(
    drafts_with: str | None, others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's queries are then of another form, and nothing could be measured."""
    model = model_of_one_layer()
    runner = SimpleNamespace(model=model)
    algorithm = SpeculativeAlgorithm.from_string(drafts_with)
    worker = SimpleNamespace(model_runner=runner)
    scheduler = SimpleNamespace(tp_worker=worker, spec_algorithm=algorithm)
    side: Any = SimpleNamespace(recorder=recorder_of_latents(), scale=1.0)
    check: Any = SimpleNamespace(before=None, after=None)
    monkeypatch.setattr(measurements, "_prefill", lambda *arguments: None)
    message = f"--flashinfer-mla-disable-ragged; fa3, triton: {others}"
    with pytest.raises(AttentionMismatch, match=message):
        measurements._seen(scheduler, side, None, [1, 2], check, False)
    hooks = [*model[0]["attn_mqa"]._forward_pre_hooks]
    assert hooks == []


def test_a_latent_is_a_buffer_once_and_values_are_not_read_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values begin where keys do, and are shorter: kernels of one width must not read them."""
    from sgl_skipkv.kernels import on_device

    latents = [torch.zeros(9, 1, 64) for _ in range(3)]
    pool = SimpleNamespace(kv_buffer=latents)
    buffers = kv_cache.kv_buffers(SimpleNamespace(get_kvcache=lambda: pool))
    assert [one.data_ptr() for one in buffers] == [one.data_ptr() for one in latents]
    monkeypatch.setattr(on_device, "uses_triton", lambda device: True)
    pages = torch.zeros(2, 8, dtype=torch.int32)
    values = [one[..., :48] for one in latents]
    cache = PagedCache.of(latents, pages, None, values)
    assert cache is not None and cache.v_ptrs is None
    assert PagedCache.of(latents, pages, None, latents).v_ptrs is not None
    whole = [torch.zeros(9, 1, 576)]
    assert PagedCache.of(whole, pages, None, [whole[0][..., :512]]) is None
