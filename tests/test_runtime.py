"""The life of a call: when it compacts, what it keeps, what it reports, what it gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import cosine_matrix, importance, redundancy
from synthetic import DELIMITER, HEAD_DIM, LAYERS, WORD, Call, SyntheticServer, words

from sgl_skipkv.runtime import Plan
from sgl_skipkv.trace import TraceWriter, read_trace

REPEATABLE = settings(deadline=None, derandomize=True)
BUDGET, INTERVAL, PROMPT, WINDOW, SINK = 40, 12, 10, 8, 4
KNOBS: dict[str, Any] = {"interval": INTERVAL, "delimiters": "paper"}


def served(
    server: SyntheticServer, tokens: list[int] | None = None, *, prefill: bool = True, **call: Any
) -> Call:
    """A call with the file's usual budget, prefilled."""
    knobs = {**KNOBS, **call.pop("kv_params", {})}
    keys = {"kv_budget": BUDGET, "kv_params": knobs, **call}
    opened = server.open(tokens or words(5, 3, 7, 4, 9) * 10, **keys)
    if prefill:
        server.prefill(opened)
    return opened


# -- when


def test_a_compaction_is_due_when_the_call_grew_an_interval_past_its_budget() -> None:
    server = SyntheticServer()
    call = served(server)
    at: list[int] = []
    own: list[int] = []
    for _ in range(110):
        done = len(call.compactions)
        fed = call.generated
        server.decode(call)
        if len(call.compactions) > done:
            at.append(fed)
        own.append(len(call.slots) - PROMPT)
    assert at == [52, 64, 76, 88, 100]
    assert max(own) == BUDGET + INTERVAL and min(own[52:]) == BUDGET + 1
    assert call.state.peak_own_tokens == BUDGET + INTERVAL


def test_nothing_is_due_before_the_first_decode_step() -> None:
    """A counted prompt may be past the budget at once; its prefill may still be running."""
    server = SyntheticServer()
    knobs = {"protect_prompt": False, "count_prompt": True}
    call = served(server, prompt=[3] * 90, kv_params=knobs)
    assert server.compact_if_due(call) is None
    server.decode(call)
    assert call.compactions == [] and len(call.slots) == 91
    server.decode(call)
    assert len(call.compactions[0]) == BUDGET and len(call.slots) == BUDGET + 1
    server.run(call, 60)
    assert len(call.slots) <= BUDGET + INTERVAL + 1


@pytest.mark.parametrize(("budget", "interval"), [(13, 8), (13, 128), (100, 8), (64, 33)])
def test_own_tokens_never_pass_the_bound_of_the_contract(budget: int, interval: int) -> None:
    server = SyntheticServer()
    call = served(server, words(4) * 75, kv_budget=budget, kv_params={"interval": interval})
    for _ in range(290):
        server.decode(call)
        assert len(call.slots) - PROMPT <= budget + interval + 1
    assert call.compactions
    assert server.finish(call)["peak_kv_tokens"] <= budget + interval + 1


def test_a_budget_above_the_length_changes_nothing() -> None:
    server = SyntheticServer()
    call = served(server, kv_budget=500)
    server.run(call, 200)
    assert call.positions == list(range(PROMPT + 200)) and call.compactions == []
    assert server.finish(call)["evicted_tokens"] == 0


# -- what


def exact_scores(call: Call, positions: list[int], redundant: dict[int, float]) -> list[float]:
    """Z of each cached token from the call's own content, in fp64 loops; lambda by position."""
    n = len(positions)
    last = positions[-1]
    total = [0.0] * n
    for layer in range(LAYERS):
        keys = call.keys[layer, positions]
        queries = call.queries[layer, last + 1 - WINDOW : last + 1]
        important = importance(queries, keys, scale=HEAD_DIM**-0.5)
        repeated = redundancy(keys)
        for head in range(len(important)):
            for i in range(n - WINDOW):
                z = 0.1 * important[head][i] - 0.9 * repeated[head][i]
                total[i] += z / len(important) / LAYERS
    return [z - redundant.get(p, 0.0) for z, p in zip(total, positions, strict=True)]


def redundant_positions(call: Call, tau: float) -> dict[int, float]:
    """lambda of every token of a sentence that resembles a sentence closed later."""
    spans = call.state.tracker.closed
    means = [call.hidden[PROMPT + a : PROMPT + b].double().mean(dim=0).tolist() for a, b in spans]
    likeness = cosine_matrix(means) if means else []
    found = {}
    for i, (start, stop) in enumerate(spans):
        best = max((likeness[i][j] for j in range(i + 1, len(spans))), default=-1.0)
        if best > tau and stop - start > 1:
            found.update(dict.fromkeys(range(PROMPT + start, PROMPT + stop), best))
    return found


def check_choice(call: Call, before: list[int], pinned: set[int], tau: float) -> None:
    """The kept set is that of the exact scores, up to ties within rounding."""
    kept = set(call.compactions[-1])
    redundant = redundant_positions(call, tau) if tau < 1 else {}
    scores = dict(zip(before, exact_scores(call, before, redundant), strict=True))
    free = [p for p in before if p not in pinned]
    chosen = [scores[p] for p in free if p in kept]
    dropped = [scores[p] for p in free if p not in kept]
    assert pinned <= kept
    assert min(chosen, default=1.0) >= max(dropped, default=-1.0) - 1e-6
    assert len(dropped) == INTERVAL


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("policy", "tau"), [("rkv", 1.0), ("skipkv", 0.95), ("skipkv", 0.5)])
def test_the_kept_set_is_that_of_the_exact_scores(policy: str, tau: float, seed: int) -> None:
    """End to end: right keys in row order, right queries, right sentences."""
    server = SyntheticServer()
    params = {"tau": tau} if policy == "skipkv" else {}
    call = served(server, kv_policy=policy, kv_params=params, seed=seed)
    topics = torch.randn(3, call.hidden.shape[1], generator=torch.Generator().manual_seed(seed))
    for i, (start, stop) in enumerate(sentences_of(call.tokens)):
        call.hidden[PROMPT + start : PROMPT + stop] *= 0.2
        call.hidden[PROMPT + start : PROMPT + stop] += topics[i % 3]
    for _ in range(100):
        before, done = call.positions.copy(), len(call.compactions)
        open_tokens = call.state.tracker
        server.decode(call)
        if len(call.compactions) > done:
            tail = WINDOW
            if policy == "skipkv":
                tail = max(WINDOW, min(open_tokens.open_tokens, BUDGET // 2))
            pinned = set(range(PROMPT)) | set(before[-tail:])
            check_choice(call, before, pinned, tau)
    assert len(call.compactions) == 4


def sentences_of(tokens: list[int]) -> list[tuple[int, int]]:
    stops = [i + 1 for i, token in enumerate(tokens) if token == DELIMITER]
    return list(zip([0, *stops], stops, strict=False))


def test_a_redundant_sentence_goes_whole_and_is_counted() -> None:
    """Sentences 0 and 2 say the same; the earlier one goes first, and the trace names it."""
    server = SyntheticServer()
    call = served(server, words(12, 15, 12, 13, 30))
    same = torch.ones(call.hidden.shape[1])
    call.hidden[PROMPT : PROMPT + 12] = call.hidden[PROMPT + 27 : PROMPT + 39] = same
    server.run(call, 60)
    assert [p for p in call.compactions[0] if PROMPT <= p < PROMPT + 12] == []
    server.run(call, 10)
    summary = server.finish(call)
    assert summary["evicted_sentences"] >= 1


def test_a_flag_outlives_the_sentence_that_raised_it() -> None:
    """1 repeats 0, then goes; 0 is still redundant at the next compaction."""
    server = SyntheticServer()
    call = served(server, words(6, 10, 40, 40), kv_params={"tau": 0.9})
    state, table = call.state, server.recorder.sentences
    call.hidden[PROMPT : PROMPT + 16] = torch.ones(call.hidden.shape[1])
    server.run(call, 52)
    plan = server.plan(call)
    assert state.table == [0, 1] and float(table.redundancy[state.slot, 0]) > 0.99
    # keep sentence 0, drop sentence 1 whole: as some other policy or budget might have
    drop = [call.positions.index(p) for p in range(PROMPT + 6, PROMPT + 16)]
    drop += [call.positions.index(p) for p in range(PROMPT + 20, PROMPT + 22)]
    commit_dropping(server, call, plan, drop)
    server.run(call, 12)
    server.plan(call)
    assert state.table[0] == 0 and 1 not in state.table
    assert float(table.redundancy[state.slot, 0]) > 0.99


def commit_dropping(server: SyntheticServer, call: Call, plan: Plan, drop: list[int]) -> None:
    """Commit a plan with another selection, and keep the books."""
    kept = [i for i in range(len(call.slots)) if i not in drop]
    selection = plan.selection._replace(kept=torch.tensor(kept), evicted=torch.tensor(drop))
    positions = torch.tensor([call.positions[i] for i in kept])
    changed = plan._replace(selection=selection, positions=positions)
    server.free_slots += server.runtime.commit(call.state, changed, server.req_to_token).tolist()
    call.slots = [call.slots[i] for i in kept]
    call.positions = positions.tolist()
    call.compactions.append(call.positions)


def test_dead_sentences_leave_the_table() -> None:
    server = SyntheticServer()
    call = served(server, words(6) * 20, kv_policy="streaming")
    server.run(call, 110)
    server.compact_if_due(call)
    state = call.state
    for sentence in state.alive:
        start, stop = state.tracker.closed[sentence]
        assert any(PROMPT + start <= p < PROMPT + stop for p in range(PROMPT + 150))
    summary = server.finish(call)
    spans = [(PROMPT + 6 * i, PROMPT + 6 * i + 6) for i in range(summary["sentences"])]
    gone = [s for s in spans if not any(s[0] <= p < s[1] for p in call.compactions[-1])]
    newer = [s for s in gone if s[0] > call.compactions[-1][-1]]
    assert summary["evicted_sentences"] == len(gone) - len(newer) > 0


@pytest.mark.parametrize(
    ("sink", "budget", "knobs"),
    [
        (20, 29, {}),
        (100, 109, {}),
        (100, 150, {}),
        (20, 29, {"protect_prompt": False}),
        (100, 109, {"protect_prompt": False, "count_prompt": True}),
    ],
)
def test_many_sinks_and_a_long_open_sentence_share_the_budget(
    sink: int, budget: int, knobs: dict[str, Any]
) -> None:
    """Every budget that is accepted can be kept; an error here would end the scheduler."""
    server = SyntheticServer()
    call = served(
        server, [WORD] * 290, prompt=[3], kv_budget=budget, kv_params={"sink": sink, **knobs}
    )
    server.run(call, 280)
    assert call.compactions
    for kept in call.compactions:
        assert set(range(sink)) <= set(kept)


# -- what comes back


def test_summary_counts() -> None:
    server = SyntheticServer()
    call = served(server, words(5) * 25, kv_policy="rkv")
    server.run(call, 100)
    summary = server.finish(call)
    assert summary == {
        "policy": "rkv",
        "kv_budget": BUDGET,
        "compactions": 4,
        "evicted_tokens": 48,
        "kv_tokens": 52,
        "peak_kv_tokens": 52,
        "full_kv_tokens": 100,
        "sentences": 20,
        "evicted_sentences": summary["evicted_sentences"],
    }
    runtime = server.runtime
    assert (runtime.total_compactions, runtime.total_evicted_tokens) == (4, 48)


def test_summary_counts_the_prompt_where_the_budget_does() -> None:
    server = SyntheticServer()
    knobs = {"count_prompt": True, "protect_prompt": False}
    call = served(server, kv_policy="streaming", kv_params=knobs)
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


def test_summary_of_a_call_that_ends_at_its_prefill() -> None:
    server = SyntheticServer()
    call = served(server)
    summary = server.finish(call)
    assert (summary["kv_tokens"], summary["full_kv_tokens"], summary["peak_kv_tokens"]) == (0, 0, 0)
    server.assert_idle()


def traced(tmp_path: Path) -> tuple[SyntheticServer, Path]:
    path = tmp_path / "trace.jsonl"
    return SyntheticServer(trace=TraceWriter(str(path))), path


def test_trace_of_a_call(tmp_path: Path) -> None:
    server, path = traced(tmp_path)
    call = served(server, words(5) * 25, kv_policy="streaming", rid="r-1")
    server.run(call, 60)
    assert read_trace(path) == [], "a compaction is written once its positions are on the CPU"
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
            "event": "compact",
            "rid": "r-1",
            "policy": "streaming",
            "prompt_tokens": PROMPT,
            "generated": 52 + 12 * i,
            "before": 62,
            "after": 50,
            "kept": kept,
            "evicted_sentences": gone,
        }
    assert (
        sum(len(event["evicted_sentences"]) for event in compactions)
        == (summary["evicted_sentences"])
    )
    assert finish == {
        "event": "finish",
        "rid": "r-1",
        "prompt_tokens": PROMPT,
        "output_ids": call.tokens[:101],
        "finish_reason": "stop",
        **summary,
    }


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
    assert call.state.evicted_tokens == 24 and call.state.slot
    server.retract(call)
    state = call.state
    assert (state.evicted_tokens, state.last, state.slot, state.row) == (0, None, 0, None)
    assert (state.alive, state.table, state.tracker.closed) == ([], [], [])
    server.assert_idle()
    server.prefill(call)
    assert call.positions == list(range(PROMPT + 71)) and state.slot
    server.run(call, 30)
    assert [len(kept) for kept in call.compactions[2:]] == [PROMPT + BUDGET] * 3
    summary = server.finish(call)
    assert (summary["compactions"], summary["evicted_tokens"]) == (5, 24 + 32 + 2 * 12)
    assert summary["kv_tokens"] == 101 - (32 + 24) and summary["peak_kv_tokens"] == 72
    server.assert_idle()


@pytest.mark.parametrize("generated", [0, 1, 30, 52, 55])
def test_retraction_at_any_time_and_twice(generated: int) -> None:
    server = SyntheticServer()
    call = served(server)
    for _ in range(2):
        server.run(call, generated)
        server.retract(call)
        server.assert_idle()
        server.prefill(call)
    server.run(call, 20)
    server.finish(call, reason="abort")
    server.assert_idle()


def test_a_call_that_never_got_a_row_holds_nothing() -> None:
    server = SyntheticServer()
    call = served(server, prefill=False)
    assert server.runtime.open_calls == 0 and server.runtime.opened_calls == 1
    server.runtime.close(call.state, 0, [], "abort")
    assert call.state.summary is not None and call.state.summary["kv_tokens"] == 0
    server.assert_idle()


def test_a_call_closed_after_its_retraction_gives_back_once() -> None:
    server = SyntheticServer(slots=2)
    call = served(server)
    server.run(call, 60)
    server.retract(call)
    server.runtime.close(call.state, 0, call.output_ids, "abort")
    assert server.recorder.slots.free_slots == 2
    server.assert_idle()


def test_chunks_of_a_prompt_admit_once() -> None:
    server = SyntheticServer(slots=2)
    call = served(server, prompt=[3] * 50, prefill=False)
    server.prefill(call, chunk=9)
    assert server.recorder.slots.free_slots == 1 and server.runtime.open_calls == 1
    server.finish(call)
    server.assert_idle()


def test_slots_bound_admission() -> None:
    """A slot is counted as soon as a call of the same step will take it."""
    server = SyntheticServer(slots=2)
    first, waiting = served(server), served(server, prefill=False)
    streaming = served(server, prefill=False, kv_policy="streaming")
    runtime = server.runtime
    assert runtime.can_admit(waiting.state, 0) and not runtime.can_admit(waiting.state, 1)
    assert runtime.can_admit(streaming.state, 5), "nothing is recorded for it"
    assert runtime.can_admit(first.state, 5), "it holds its slot"
    server.prefill(waiting)
    third = served(server, prefill=False)
    assert not runtime.can_admit(third.state, 0)
    server.finish(first)
    assert runtime.can_admit(third.state, 0)


def test_policies_that_record_nothing_take_no_slot() -> None:
    server = SyntheticServer(slots=1)
    calls = [served(server, kv_policy=name) for name in ("streaming", "random", "skipkv")]
    assert [bool(call.state.slot) for call in calls] == [False, False, True]
    server.decode(*calls)
    for call in calls:
        server.finish(call)
    server.assert_idle()


# -- what admission reserves


@pytest.mark.parametrize(("row", "left", "future"), [(10, 500, 53), (10, 20, 20), (62, 500, 1)])
def test_future_tokens(row: int, left: int, future: int) -> None:
    call = served(SyntheticServer())
    assert call.state.future_tokens(row, left) == future


def test_future_tokens_of_a_recomputed_call_past_its_bound() -> None:
    call = served(SyntheticServer())
    assert call.state.future_tokens(PROMPT + 200, 500) == 1
    assert call.state.future_tokens(PROMPT + 200, 0) == 0


@settings(REPEATABLE, max_examples=30)
@given(st.integers(13, 60), st.integers(8, 40), st.integers(1, 250), st.integers(0, 249))
def test_no_call_ever_grows_past_what_was_reserved(
    budget: int, interval: int, steps: int, at: int
) -> None:
    """At any moment, row + reserve covers every later length of the row."""
    server = SyntheticServer()
    call = served(
        server,
        words(5) * 51,
        kv_budget=budget,
        kv_params={"interval": interval},
        kv_policy="random",
    )
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


# -- broken content


@pytest.mark.parametrize("policy", ["skipkv", "rkv"])
@pytest.mark.parametrize("broken", ["keys", "queries"])
def test_scores_that_are_no_numbers_stop_the_compactions(policy: str, broken: str) -> None:
    """The prompt stays whole (others share it), and a known failure is the end of it."""
    server = SyntheticServer()
    call = served(server, kv_policy=policy)
    getattr(call, broken)[:, PROMPT + 30 :] = float("nan")
    known_at = None
    for _ in range(120):
        server.decode(call)
        assert call.positions[:PROMPT] == list(range(PROMPT))
        if call.state.failure is not None and known_at is None:
            known_at = len(call.compactions)
    assert known_at is not None and len(call.compactions) == known_at <= 2
    server.finish(call)
    server.assert_idle()


def test_a_sentence_that_is_no_number_is_like_no_other() -> None:
    server = SyntheticServer()
    call = served(server, kv_params={"tau": 0.0})
    call.hidden[PROMPT + 5 : PROMPT + 8] = float("nan")
    server.run(call, 100)
    server.finish(call)
    assert call.state.failure is None and len(call.compactions) == 4


def test_a_broken_call_does_not_touch_its_neighbour() -> None:
    alone, pair = SyntheticServer(), SyntheticServer()
    reference = served(alone, seed=1)
    alone.run(reference, 100)
    broken, sound = served(pair, seed=2), served(pair, seed=1)
    broken.keys[:] = float("nan")
    broken.hidden[:] = float("nan")
    for _ in range(100):
        pair.decode(broken, sound)
    assert sound.compactions == reference.compactions
    assert broken.state.failure is not None and sound.state.failure is None
