"""Speculative decoding: the tail of a row, lengths that a running step publishes, positions, and
what is refused beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capability_rows import row_named
from device_ops import NoHostRead
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from synthetic import WORD, SyntheticServer

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.compaction import Compaction, Plan
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.patches.engine import forward, speculation
from sgl_skipkv.patches.startup import bind, draft_kinds
from sgl_skipkv.request.parts import KVState

WIDTH, TOKENS = 48, 200


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_tail_follows_what_is_kept(data: st.DataObject) -> None:
    """Of several rows, against plain lists. What the step has written is read back with it."""
    table, rows, plans = torch.zeros(4, WIDTH, dtype=torch.int32), [], []
    slots = iter(data.draw(st.permutations(range(1, 3 * WIDTH + 1))))
    for row in range(1, 4):
        stays = data.draw(st.lists(st.booleans(), min_size=1, max_size=WIDTH - 12))
        tail = data.draw(st.integers(0, 12))
        own = [next(slots) for _ in range(len(stays) + tail)]
        table[row, : len(own)] = torch.tensor(own)
        rows.append((stays, own, data.draw(st.integers(0, tail))))
        plans.append(plan_of(row, stays, tail, rows[-1][2]))
    recorder: Any = None
    with NoHostRead():
        done = Compaction(plans, table, recorder, page_tokens=1, buffers=(), check=False)
        done.apply()
    for plan, (stays, own, written), vacated in zip(plans, rows, done.vacated, strict=True):
        kept = [slot for slot, stay in zip(own, stays, strict=False) if stay]
        left = [*kept, *own[len(stays) :]]
        assert table[plan.state.row].tolist() == left + [0] * (WIDTH - len(left))
        assert vacated.tolist() == [
            slot for slot, stay in zip(own, stays, strict=False) if not stay
        ]
        last = plan.state.kv.last
        assert last is not None and last.running_tokens == written
        assert last.read()[0] == [2 * i for i, stay in enumerate(stays) if stay]
        assert (last.row_tokens, last.logical_tokens) == (len(stays), 2 * len(stays))


def plan_of(row: int, stays: list[bool], tail: int, written: int) -> Plan:
    keep, entries = torch.tensor(stays, dtype=torch.bool), torch.arange(len(stays))
    kv = SimpleNamespace(statistics={}, evicted_tokens=0)
    report = SimpleNamespace(evicted_tokens=0, compactions=0)
    state: Any = SimpleNamespace(row=row, kv=kv, report=report)
    selection = Selection(entries[keep], entries[~keep])
    lengths = len(stays), 2 * len(stays)
    behind = tail, torch.tensor(len(stays) + written)
    return Plan(state, selection, 0, entries * 2, torch.tensor(True), *lengths, None, *behind)


def batch_with(lengths: torch.Tensor, *, overlap: bool = True) -> tuple[Any, list[str]]:
    """A batch of a scheduler whose running step has published lengths, and what happens to the
    event that their readers wait for."""
    recorded: list[str] = []
    ready = SimpleNamespace(record=lambda: recorded.append("recorded"))
    future_map = SimpleNamespace(new_seq_lens_buf=lengths, publish_ready=ready)
    binding = SimpleNamespace(scheduler=SimpleNamespace(future_map=future_map))
    pool = SimpleNamespace(skipkv=binding)
    algorithm = SpeculativeAlgorithm.EAGLE
    batch = SimpleNamespace(
        spec_algorithm=algorithm, enable_overlap=overlap, req_to_token_pool=pool
    )
    return batch, recorded


def test_published_lengths_are_shortened_before_they_are_read() -> None:
    lengths = torch.arange(100, 108)
    batch, recorded = batch_with(lengths)
    assert speculation.published_lengths(batch) is lengths
    with NoHostRead():
        speculation.shorten_published(batch, [6, 2], [17, 40])
    assert lengths.tolist() == [100, 101, 62, 103, 104, 105, 89, 107]
    assert recorded == ["recorded"]
    batch, recorded = batch_with(lengths, overlap=False)
    assert speculation.published_lengths(batch) is None
    speculation.shorten_published(batch, [6], [17])
    batch.spec_algorithm, batch.enable_overlap = SpeculativeAlgorithm.NONE, True
    speculation.shorten_published(batch, [6], [17])
    assert lengths[6] == 89 and recorded == []


@pytest.mark.parametrize(("mode", "per_request"), [("TARGET_VERIFY", 4), ("DRAFT_EXTEND_V2", 4)])
def test_a_step_is_at_its_logical_positions(mode: str, per_request: int) -> None:
    rows = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23], dtype=torch.int32)
    result = SimpleNamespace(forward_mode=ForwardMode[mode], positions=rows)
    state: Any = SimpleNamespace(kv=KVState(followed_tokens=0))
    speculation.count_step(result, [state, None])
    speculation.place_step(result, [5, 0])
    assert state.kv.running_steps == (mode == "TARGET_VERIFY")
    assert result.positions.tolist() == [15, 16, 17, 18, 20, 21, 22, 23]
    assert result.positions.dtype == torch.int32
    assert rows.tolist() == [10, 11, 12, 13, 20, 21, 22, 23], "SGLang may read them again"


def test_drafts_are_placed_once_their_attention_is_planned() -> None:
    """Until then attention backends take a position for the length of its row."""
    rows = torch.tensor([10, 20])
    result = SimpleNamespace(forward_mode=ForwardMode.DECODE, positions=rows)
    speculation.place_step(result, [5, 0])
    assert result.positions is rows and rows.tolist() == [10, 20]
    speculation.place_draft(None, result)
    assert result.positions.tolist() == [15, 20] and rows.tolist() == [10, 20]
    buffer = torch.tensor([10, 20, 0, 0])  # of a graph, with padded rows
    runner = SimpleNamespace(buffers=SimpleNamespace(positions=buffer))
    speculation.place_captured_draft(runner, None, result)
    assert buffer.tolist() == [15, 20, 0, 0]
    untouched = SimpleNamespace(positions=rows)  # of a batch without compacted rows
    speculation.place_draft(None, untouched)
    speculation.place_captured_draft(runner, None, untouched)
    assert untouched.positions is rows and buffer.tolist() == [15, 20, 0, 0]


@pytest.mark.parametrize("is_draft", [False, True])
def test_of_a_draft_model_nothing_is_recorded(is_draft: bool) -> None:
    """Its prefill comes behind the other model's, for the same requests: here of one that is
    computed again."""
    server = SyntheticServer(kv_policy="skipkv")
    call = server.open([WORD] * TOKENS, kv_budget=24)
    server.prefill(call)
    runtime, recorder = server.runtime, server.recorder
    binding = SimpleNamespace(runtime=runtime)
    batch = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(skipkv=binding),
        reqs=[SimpleNamespace(skipkv=call.state)],
        **{"prefix_lens": [0], "extend_lens": [TOKENS]},
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
        forward_mode=ForwardMode.EXTEND,
    )
    result = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, positions=torch.arange(TOKENS), sampling_info=None
    )
    runner = (
        SimpleNamespace() if is_draft else SimpleNamespace(skipkv=SimpleNamespace(capture=None))
    )
    forward.prepare_forward(result, type(result), batch, runner)
    assert (recorder.current is None) == is_draft


def test_what_is_evicted_does_not_depend_on_when_a_result_is_read() -> None:
    """A prefill of another request lets the last step's result arrive before the next check."""
    batch, _ = batch_with(torch.zeros(1))
    state: Any = SimpleNamespace(kv=KVState(followed_tokens=0))
    req = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=50), skipkv=state, is_retracted=False)
    batch.reqs = [req, SimpleNamespace(is_retracted=False)]
    assert speculation.evictable_tokens(batch, req, state) == 50, "of the prefill"
    for added in (3, 1):
        state.kv.running_steps += 1
        before = req.kv.kv_committed_len
        assert speculation.evictable_tokens(batch, req, state) == before, "it runs"
        speculation.read_step([[7] * added, [8]], None, None, batch)
        req.kv.kv_committed_len += added
        assert speculation.evictable_tokens(batch, req, state) == before, "its result is known"
    batch.enable_overlap = False
    assert speculation.evictable_tokens(batch, req, state) == 54
    req.is_retracted = True  # the result of a step that ran then is dropped
    speculation.read_step([[7, 7], [8]], None, None, batch)
    assert (state.kv.running_steps, state.kv.step_tokens) == (0, 1)


def text_only(**others: bool) -> Any:
    return SimpleNamespace(**{"is_multimodal": False, "model_is_mrope": False, **others})


def worker_with(pool: str) -> Any:
    worker: Any = object.__new__(EAGLEWorkerV2)
    runner = SimpleNamespace(token_to_kv_pool=type(pool, (), {})())
    worker._draft_worker = SimpleNamespace(draft_runner=runner)
    return worker


def scheduler_with_drafts(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    flags = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
    flags["speculative_adaptive"] = False
    flags |= {name: more.pop(name) for name in [*flags] if name in more}
    seeded = SimpleNamespace(enable_deterministic_inference=more.pop("seeded", False))
    runs = SimpleNamespace(deterministic=seeded)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: runs)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(**flags))
    for role in ("is_prefill_server", "is_decode_server"):
        is_one = more.pop(role, False)
        monkeypatch.setattr(draft_kinds, role, lambda is_one=is_one: is_one)
    made = {
        **{"spec_algorithm": SpeculativeAlgorithm.EAGLE, "is_mixed_chunk": False},
        **{"draft_worker": worker_with("MHATokenToKVPool")},
        **{"token_to_kv_pool_allocator": SimpleNamespace(), "req_to_token_pool": SimpleNamespace()},
        **{"model_config": text_only()},
    }
    return SimpleNamespace(**{**made, **more})


STANDALONE: dict[str, Any] = {"spec_algorithm": SpeculativeAlgorithm.STANDALONE}
ONLY_EAGLE = "PD disaggregation, where SGLang drafts with EAGLE only"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"draft_worker": object.__new__(NgramVerifyInput)}, "EAGLE as NgramVerifyInput"),
        ({"draft_worker": worker_with("SWAKVPool")}, "a draft model with SWAKVPool"),
        (
            {"speculative_eagle_topk": 4},
            "drafts that are trees (--speculative-eagle-topk 1: chains)",
        ),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        (
            {"token_to_kv_pool_allocator": SimpleNamespace(full_to_swa_index_mapping=None)},
            "window layers in a pool of their own (--disable-hybrid-swa-memory)",
        ),
        (
            {"req_to_token_pool": SimpleNamespace(mamba_pool=None)},
            "layers with a state instead of KV",
        ),
        ({"model_config": text_only(is_multimodal=True)}, "images"),
        ({"model_config": text_only(model_is_mrope=True)}, "positions on three axes"),
        ({"seeded": True}, "--enable-deterministic-inference"),
        ({"is_prefill_server": True, **STANDALONE}, ONLY_EAGLE),
        ({"is_decode_server": True, **STANDALONE}, ONLY_EAGLE),
        ({"is_mixed_chunk": True}, "--enable-mixed-chunk"),
        (
            {"speculative_adaptive": True, "is_mixed_chunk": True},
            "--speculative-adaptive and --enable-mixed-chunk",
        ),
    ],
)
def test_what_drafts_are_refused_with(
    found: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = row_named("speculative decoding").check
    for fine in ({}, STANDALONE, {"is_prefill_server": True}, {"is_decode_server": True}):
        assert check(scheduler_with_drafts(monkeypatch, **fine)) is None
    assert (
        check(scheduler_with_drafts(monkeypatch, **found)) == f"speculative decoding, with {said}"
    )
    found = {**found, "spec_algorithm": SpeculativeAlgorithm.NONE}
    assert check(scheduler_with_drafts(monkeypatch, **found)) is None


def test_what_a_server_with_drafts_does_not_serve() -> None:
    facts = bind.ModelFacts(without_steering="speculative decoding")
    assert bind._wrong_settings(ServerConfig(kv_budget=64, kv_policy="skipkv"), facts) == []
    for name, value in (("steering_vector", "v.safetensors"), ("steering_capture", "folder")):
        config = ServerConfig(**{name: value})
        assert bind._wrong_settings(config, facts) == [f"{name}: speculative decoding"]
