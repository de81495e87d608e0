"""What a compaction keeps, end to end: Runtime and Recorder on made-up content. When it comes:
``test_runtime.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import cosine_matrix, rkv_scores
from synthetic import (
    BUDGET,
    DELIMITER,
    HEAD_DIM,
    INTERVAL,
    PROMPT,
    WORD,
    Call,
    SyntheticServer,
    served,
    words,
)

from sgl_skipkv.eviction.compaction import Compaction
from sgl_skipkv.request.state import RequestState

WINDOW = 8


def exact_scores(call: Call, positions: list[int], redundant: dict[int, float]) -> list[float]:
    """Z of each cached token from the request's own content, in fp64 loops; lambda by position."""
    queries = call.queries[:, positions[-1] + 1 - WINDOW : positions[-1] + 1]
    total = rkv_scores(queries, call.keys[:, positions], HEAD_DIM**-0.5)
    return [z - redundant.get(p, 0.0) for z, p in zip(total, positions, strict=True)]


def redundant_positions(call: Call, tau: float) -> dict[int, float]:
    """lambda of every token of a sentence that resembles a sentence closed later."""
    spans = call.state.sentences.tracker.closed
    means = [call.hidden[PROMPT + a : PROMPT + b].double().mean(dim=0).tolist() for a, b in spans]
    likeness = cosine_matrix(means) if means else []
    found = {}
    for i, (start, stop) in enumerate(spans):
        best = max((likeness[i][j] for j in range(i + 1, len(spans))), default=-1.0)
        if best > tau and stop - start > 1:
            found.update(dict.fromkeys(range(PROMPT + start, PROMPT + stop), best))
    return found


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
    for before in server.compacting(call, 100):
        tail = WINDOW
        if policy == "skipkv":
            tail = max(WINDOW, min(call.state.sentences.tracker.open_tokens, BUDGET // 2))
        pinned, kept = {*range(PROMPT), *before[-tail:]}, set(call.compactions[-1])
        redundant = redundant_positions(call, tau) if tau < 1 else {}
        scores = dict(zip(before, exact_scores(call, before, redundant), strict=True))
        free = [p for p in before if p not in pinned]
        chosen = [scores[p] for p in free if p in kept]
        dropped = [scores[p] for p in free if p not in kept]
        assert pinned <= kept and len(dropped) == INTERVAL
        assert min(chosen, default=1.0) >= max(dropped, default=-1.0) - 1e-6  # rounding
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


def redundancy_of(state: RequestState, sentence: int) -> float:
    known = state.sentences.redundancy
    assert known is not None
    return float(known.values[known.sentences.index(sentence)])


def test_a_flag_outlives_the_sentence_that_raised_it() -> None:
    """1 repeats 0, then goes; 0 is still redundant at the next compaction."""
    server = SyntheticServer()
    call = served(server, words(6, 10, 40, 40), kv_params={"tau": 0.9})
    state = call.state
    call.hidden[PROMPT : PROMPT + 16] = torch.ones(call.hidden.shape[1])
    server.run(call, 52)
    plan = server.plan(call)
    assert plan.table is not None and plan.table.sentences == [0, 1]
    assert redundancy_of(state, 0) > 0.99
    # keep sentence 0, drop sentence 1 whole: as some other policy or budget might have
    drop = [call.positions.index(p) for p in range(PROMPT + 6, PROMPT + 16)]
    drop += [call.positions.index(p) for p in range(PROMPT + 20, PROMPT + 22)]
    kept = [i for i in range(len(call.slots)) if i not in drop]
    selection = plan.selection._replace(kept=torch.tensor(kept), evicted=torch.tensor(drop))
    changed = plan._replace(selection=selection, table=plan.table._replace(kept=[0]))
    parts = [changed], server.req_to_token, server.recorder
    compaction = Compaction(*parts, page_tokens=1, buffers=(), check=True)
    compaction.apply()
    server.book([compaction], [call])
    server.run(call, 12)
    plan = server.plan(call)
    assert plan.table is not None and plan.table.sentences[0] == 0
    assert 1 not in plan.table.sentences
    assert redundancy_of(state, 0) > 0.99


@pytest.mark.parametrize("policy", ["skipkv", "skipkv+"])
def test_a_full_table_forgets_no_flag_and_no_ending(policy: str) -> None:
    """Sentences that have left it score as if it had room for all, in the next turn too."""
    kept = []
    for capacity in (24, 4096):
        server = SyntheticServer(max_sentences=capacity)
        call = served(
            *(server, words(4) * 60),
            **{"kv_policy": policy, "kv_budget": 80, "kv_params": {"interval": 8}},
        )
        call.hidden[PROMPT : PROMPT + 4 * 12] = torch.ones(call.hidden.shape[1])
        server.run(call, 200)
        tracked = {*call.state.sentences.live} - {*call.state.sentences.table}
        assert bool(tracked) == (capacity == 24), "some have left the smaller table"
        kept.append(call.compactions)
    assert kept[0] == kept[1] and len(kept[0]) > 12


def test_an_open_sentence_has_no_share_of_a_prompt_that_may_go() -> None:
    """Half of ``kv_budget`` is protected, though a prompt that does not count is kept on top."""
    server = SyntheticServer()
    call = served(
        *(server, [WORD] * 160),
        **{"prompt": [3] * 300, "kv_budget": 40},
        kv_params={"protect_prompt": False, "interval": 100},
    )
    (before,) = server.compacting(call, 150)
    stayed = [position in set(call.compactions[0]) for position in before]
    assert len(call.compactions[0]) == 340 and all(stayed[-20:])
    assert not all(stayed[-140:])


def test_the_open_sentence_stays_up_to_half_the_budget() -> None:
    """A policy without sentences drops some of it."""
    stayed = {}
    for policy in ("skipkv", "rkv"):
        server = SyntheticServer()
        call = served(server, words(20) + [WORD] * 200, kv_policy=policy)
        stayed[policy] = [
            set(before[-BUDGET // 2 :]) <= set(call.compactions[-1])
            for before in server.compacting(call, 150)
        ]
    assert all(stayed["skipkv"]) and len(stayed["skipkv"]) > 5 and not all(stayed["rkv"])


def test_dead_sentences_leave_the_table() -> None:
    server = SyntheticServer()
    call = served(server, words(6) * 20, kv_policy="streaming")
    server.run(call, 110)
    server.compact_due(call)
    state, read_back = call.state, call.compactions[-2]
    known = {*read_back, *range(read_back[-1] + 1, PROMPT + 111)}
    assert len(state.sentences.live) < len(state.sentences.tracker.closed)
    for sentence in state.sentences.live:
        start, stop = state.sentences.tracker.closed[sentence]
        # What the last compaction kept is read at the next one.
        assert any(PROMPT + start <= p < PROMPT + stop for p in known)
    summary = server.finish(call)
    spans = [(PROMPT + 6 * i, PROMPT + 6 * i + 6) for i in range(summary["sentences"])]
    gone = [s for s in spans if not any(s[0] <= p < s[1] for p in call.compactions[-1])]
    newer = [s for s in gone if s[0] > call.compactions[-1][-1]]
    assert summary["evicted_sentences"] == len(gone) - len(newer) > 0


@pytest.mark.parametrize(
    ("sink", "budget", "parameters"),
    [
        (20, 29, {}),
        (100, 109, {}),
        (100, 150, {}),
        (20, 29, {"protect_prompt": False}),
        (100, 109, {"protect_prompt": False, "count_prompt": True}),
    ],
)
def test_many_sinks_and_a_long_open_sentence_share_the_budget(
    sink: int, budget: int, parameters: dict[str, Any]
) -> None:
    """Every budget that is accepted can be kept; an error here would end the scheduler."""
    server = SyntheticServer()
    call = served(
        server, [WORD] * 290, prompt=[3], kv_budget=budget, kv_params={"sink": sink, **parameters}
    )
    server.run(call, 280)
    assert call.compactions
    for kept in call.compactions:
        assert set(range(sink)) <= set(kept)


def test_a_budget_that_grows_begins_with_many_sinks() -> None:
    """RPC's first compaction waits until there are as many tokens as it must keep."""
    server = SyntheticServer()
    sinks = {"interval": 8, "sink": 100}
    call = served(server, prompt=[3], kv_budget=120, kv_policy="rpc", kv_params=sinks)
    server.run(call, 200)
    assert call.state.failure is None
    assert [len(kept) - 1 for kept in call.compactions][:2] == [109, 109]


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


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("prompts", [(10, 10, 10), (70, 5, 60)], ids=["alike", "unlike"])
def test_a_broken_call_does_not_touch_its_neighbours(broken: int, prompts: tuple[int, ...]) -> None:
    """They are due in the same steps, and rows of any lengths are laid side by side."""
    lives = []
    for breaks in (False, True):
        server = SyntheticServer()
        calls = [served(server, seed=i, prompt=[3] * n) for i, n in enumerate(prompts)]
        if breaks:
            calls[broken].keys[:, 20:] = calls[broken].hidden[20:] = float("nan")
        for _ in range(100):
            server.decode(*calls)
        lives.append(calls)
    for i, (sound, found) in enumerate(zip(*lives, strict=True)):
        assert (found.state.failure is not None) == (i == broken)
        assert i == broken or found.compactions == sound.compactions


def test_which_sentences_users_wrote() -> None:
    """Those that begin in their text, its first one too; of the live ones."""
    state = served(SyntheticServer(), kv_policy="distinct").state
    state.sentences.tracker.closed = [(0, 3), (3, 5), (5, 9), (9, 12), (12, 14), (14, 20)]
    state.sentences.live = [0, 1, 3, 4, 5]
    state.reuse.input_spans = [(PROMPT + 3, PROMPT + 9), (PROMPT + 12, PROMPT + 14)]
    assert state.input_sentences() == {1, 3}


def test_dropping_thoughts_keeps_the_statistics_of_the_rest() -> None:
    server = SyntheticServer()
    call = served(server, kv_policy="h2o", kv_reuse="budget")
    server.run(call, 70)
    server.read_back([call])
    server.runtime.compactor.follow([server.due(call)])
    received, span = call.state.kv.statistics["received"], (call.prompt_tokens + 3, 50)
    kept = [i for i, position in enumerate(call.positions) if not span[0] <= position < span[1]]
    dropped = server.runtime.compactor.drop(server.due(call), span, server.req_to_token)
    assert dropped is not None and 0 < len(call.positions) - len(kept)
    assert torch.equal(call.state.kv.statistics["received"], received[kept])
