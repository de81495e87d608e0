"""What a request reports, traces, gives back and reserves, whichever way it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import BUDGET, PROMPT, SyntheticServer, served, words

from bench.lib.trace import read_trace
from sgl_skipkv.request.trace import TraceWriter

# -- what comes back


def test_summary_counts() -> None:
    server = SyntheticServer()
    call = served(server, words(5) * 25, kv_policy="rkv")
    server.run(call, 100)
    summary = server.finish(call)
    # Before each of 100 steps: 0 to 52, three times 41 to 52, and up to 51 again at the end.
    held = [*range(53), *3 * [*range(41, 53)], *range(41, 52)]
    assert summary == {
        **{"policy": "rkv", "kv_budget": BUDGET, "compactions": 4, "evicted_tokens": 48},
        **{"kv_tokens": 52, "peak_kv_tokens": 52, "full_kv_tokens": 100, "sentences": 20},
        "mean_kv_tokens": round(sum(held) / 100, 1),
        "evicted_sentences": summary["evicted_sentences"],
    }


def test_summary_counts_the_prompt_where_the_budget_does() -> None:
    server = SyntheticServer()
    parameters = {"count_prompt": True, "protect_prompt": False}
    call = served(server, kv_policy="streaming", kv_params=parameters)
    server.run(call, 100)
    summary = server.finish(call)
    assert (summary["full_kv_tokens"], summary["peak_kv_tokens"]) == (110, 52)
    assert summary["kv_tokens"] == 110 - summary["evicted_tokens"] == len(call.compactions[-1]) + 10


def test_summary_of_a_call_without_a_budget() -> None:
    server = SyntheticServer()
    call = server.open(words(5) * 10, kv_policy="full")
    server.prefill(call)
    server.run(call, 30)
    summary = server.finish(call)
    assert "kv_budget" not in summary
    assert (summary["compactions"], summary["kv_tokens"], summary["full_kv_tokens"]) == (0, 30, 30)


def traced(tmp_path: Path) -> tuple[SyntheticServer, Path]:
    path = tmp_path / "trace.jsonl"
    return SyntheticServer(trace=TraceWriter(str(path))), path


def test_trace_of_a_call(tmp_path: Path) -> None:
    server, path = traced(tmp_path)
    call = served(server, words(5) * 25, kv_policy="streaming", rid="r-1")
    server.run(call, 54)
    assert read_trace(path) == [], "a compaction is written once its positions are on the CPU"
    server.run(call, 6)
    assert len(read_trace(path)) == 1
    server.run(call, 40)
    summary = server.finish(call, reason="stop")
    *compactions, finish = read_trace(path)
    for i, (event, kept) in enumerate(zip(compactions, call.compactions, strict=True)):
        spans = [[PROMPT + 5 * s, PROMPT + 5 * s + 5] for s in range(20)]
        earlier = call.compactions[i - 1] if i else list(range(PROMPT + 52))
        fed = PROMPT + 52 + 12 * i
        gone = [
            s
            for s in spans
            if s[1] <= fed
            and not any(s[0] <= p < s[1] for p in kept)
            and (any(s[0] <= p < s[1] for p in earlier) or s[0] > earlier[-1])
        ]
        assert event == {
            **{"event": "compact", "rid": "r-1", "policy": "streaming", "prompt_tokens": PROMPT},
            **{"generated": 52 + 12 * i, "before": 62, "after": 50},
            **{"kept": kept, "evicted_sentences": gone},
        }
    gone_in_all = sum(len(event["evicted_sentences"]) for event in compactions)
    assert gone_in_all == summary["evicted_sentences"]
    assert finish == {
        **{"event": "finish", "rid": "r-1", "prompt_tokens": PROMPT, "finish_reason": "stop"},
        "kv_params": call.state.settings.policy.params.model_dump(mode="json"),
        "sentence_spans": [[PROMPT + 5 * s, PROMPT + 5 * s + 5] for s in range(20)],
        **{"output_ids": call.tokens[:101], **summary},
    }


@pytest.mark.parametrize("rows", [3, 512])
def test_trace_of_what_was_similar(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each evicted sentence, the later one with the highest cosine of any compaction so far."""
    monkeypatch.setattr("sgl_skipkv.eviction.similar_sentences._ROWS", rows)
    server, path = traced(tmp_path)
    call = served(server, words(5) * 25, kv_policy="skipkv", rid="r-3")
    server.run(call, 100)
    server.finish(call)
    *compactions, finish = read_trace(path)
    spans = finish["sentence_spans"]
    vectors = torch.stack([call.hidden[start:stop].double().mean(dim=0) for start, stop in spans])
    cosines = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=2)
    seen = 0
    for event in compactions:
        closed = sum(stop <= PROMPT + event["generated"] for _, stop in spans)
        for span, similar in zip(event["evicted_sentences"], event["similar"], strict=True):
            i = spans.index(span)
            best = max(range(i + 1, closed), key=lambda j, i=i: cosines[i, j])
            assert similar[:2] == spans[best]
            assert similar[2] == pytest.approx(float(cosines[i, best]), abs=1e-4)
            seen += 1
    assert seen == finish["evicted_sentences"] > 2


def test_trace_of_a_retracted_call(tmp_path: Path) -> None:
    """The last compaction is written before the recomputation that undoes it."""
    server, path = traced(tmp_path)
    call = served(server, rid="r-2")
    server.run(call, 55)
    server.retract(call)
    server.prefill(call)
    server.run(call, 20)
    server.finish(call)
    events = read_trace(path)
    assert [event["event"] for event in events] == [
        *("compact", "recompute", "compact", "compact", "finish")
    ]
    assert events[1] == {"event": "recompute", "rid": "r-2", "generated": 56}
    # after the recomputation the row is whole again: 56 tokens, due one step later
    assert (events[2]["generated"], events[2]["before"], events[2]["after"]) == (57, 67, 50)
    assert events[2]["kept"] == call.compactions[1]
    assert events[4]["evicted_tokens"] == sum(
        e["before"] - e["after"] for e in events if "kept" in e
    )


# -- starting anew, and giving back


def test_retraction_starts_eviction_anew() -> None:
    server = SyntheticServer()
    call = served(server)
    server.run(call, 70)
    assert call.state.kv.evicted_tokens == 24 and call.state.held.track_id
    server.retract(call)
    state = call.state
    held, sentences = state.held, state.sentences
    assert (state.kv.evicted_tokens, state.kv.last, held.track_id, held.row) == (0, None, 0, None)
    assert (sentences.live, sentences.table, sentences.tracker.closed) == ([], [], [])
    server.assert_idle()
    server.prefill(call)
    assert call.positions == list(range(PROMPT + 71)) and state.held.track_id
    server.run(call, 30)
    assert [len(kept) for kept in call.compactions[2:]] == [PROMPT + BUDGET] * 3
    summary = server.finish(call)
    assert (summary["compactions"], summary["evicted_tokens"]) == (5, 24 + 32 + 2 * 12)
    assert summary["kv_tokens"] == 101 - (32 + 24) and summary["peak_kv_tokens"] == 72
    server.assert_idle()


def test_a_request_that_ends_at_its_prefill() -> None:
    server = SyntheticServer()
    summary = server.finish(served(server))
    assert (summary["kv_tokens"], summary["full_kv_tokens"], summary["peak_kv_tokens"]) == (0, 0, 0)
    server.assert_idle()


def test_a_request_that_never_got_a_row_holds_nothing() -> None:
    server = SyntheticServer()
    call = served(server, prefill=False)
    assert server.runtime.open_requests == 0 and server.runtime.has_opened
    server.runtime.close(call.state, 0, [], "abort")
    assert call.state.report.summary is not None and call.state.report.summary["kv_tokens"] == 0
    server.assert_idle()


def test_slots_bound_admission() -> None:
    """A slot is counted as soon as a request of the same step will take it."""
    server = SyntheticServer(tracks=2)
    first, waiting = served(server), served(server, prefill=False)
    streaming = served(server, prefill=False, kv_policy="streaming")
    runtime = server.runtime
    ahead = served(server, prefill=False).state
    assert runtime.has_track(waiting.state, []) and not runtime.has_track(waiting.state, [ahead])
    assert runtime.has_track(streaming.state, [ahead]), "nothing is recorded for it"
    assert runtime.has_track(first.state, [ahead]), "it holds its slot"
    assert runtime.has_track(waiting.state, [first.state, streaming.state]), "neither takes one"
    server.prefill(waiting)
    third = served(server, prefill=False)
    assert not runtime.has_track(third.state, [])
    server.finish(first)
    assert runtime.has_track(third.state, [])


def test_policies_that_record_nothing_take_no_slot() -> None:
    server = SyntheticServer(tracks=1)
    calls = [served(server, kv_policy=name) for name in ("streaming", "random", "skipkv")]
    assert [bool(call.state.held.track_id) for call in calls] == [False, False, True]
    server.decode(*calls)
    for call in calls:
        server.finish(call)
    server.assert_idle()


# -- what admission reserves


@pytest.mark.parametrize(
    ("row", "left", "future"),
    [(10, 500, 53), (10, 20, 20), (62, 500, 1), (PROMPT + 200, 500, 1), (PROMPT + 200, 0, 0)],
)
def test_future_tokens(row: int, left: int, future: int) -> None:
    """The last two: of a recomputed request past its bound."""
    call = served(SyntheticServer())
    assert call.state.future_tokens(row, left) == future


@settings(max_examples=30)
@given(st.integers(13, 60), st.integers(8, 40), st.integers(1, 250), st.integers(0, 249))
def test_no_call_ever_grows_past_what_was_reserved(
    budget: int, interval: int, steps: int, at: int
) -> None:
    """At any moment, row + reserve covers every later length of the row."""
    server = SyntheticServer()
    keys = {"kv_budget": budget, "kv_params": {"interval": interval}, "kv_policy": "random"}
    call = served(server, words(5) * 51, **keys)
    at = min(at, steps)
    server.run(call, at)
    reserved = len(call.slots) + call.state.future_tokens(len(call.slots), steps - at)
    for _ in range(steps - at):
        server.decode(call)
        assert len(call.slots) <= reserved


def test_what_fits_the_pool() -> None:
    server = SyntheticServer(pool_tokens=100)
    call = served(server)
    assert server.runtime.fits_pool(97) and not server.runtime.fits_pool(98)
    assert server.runtime.can_recompute(call.state, 87)
    assert not server.runtime.can_recompute(call.state, 88)
