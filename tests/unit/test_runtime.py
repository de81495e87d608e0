"""When a request compacts and what it keeps, end to end: Runtime and Recorder on made-up
content."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from budgets import budget_at
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

from sgl_skipkv.eviction import planner
from sgl_skipkv.eviction.compaction import Compaction
from sgl_skipkv.policy import Policy

WINDOW = 8
POLICIES = ("skipkv", "h2o", "rkv", "snapkv")


# -- when


def decoded(server: SyntheticServer, call: Call, steps: int) -> tuple[list[int], list[int]]:
    """Tokens fed at each compaction, and own KV tokens after each step."""
    at: list[int] = []
    own: list[int] = []
    for _ in range(steps):
        done, fed = len(call.compactions), call.generated
        server.decode(call)
        if len(call.compactions) > done:
            at.append(fed)
        own.append(len(call.slots) - PROMPT)
    return at, own


def test_a_compaction_is_due_when_the_call_grew_an_interval_past_its_budget() -> None:
    server = SyntheticServer()
    call = served(server)
    at, own = decoded(server, call, 110)
    assert at == [52, 64, 76, 88, 100]
    assert max(own) == BUDGET + INTERVAL and min(own[52:]) == BUDGET + 1
    assert call.state.report.peak_budgeted_tokens == BUDGET + INTERVAL


def test_requests_that_are_due_together_are_scored_together() -> None:
    """Once per policy and parameters; test_launches.py has that each keeps what it keeps alone."""
    server = SyntheticServer()
    names = ("rkv", "skipkv", "rkv", "streaming")
    calls = [
        served(server, seed=seed, kv_policy=name, kv_params={"sink": 2})
        for seed, name in enumerate(names)
    ]
    for _ in range(BUDGET + INTERVAL):
        server.decode(*calls)
    asked: list[list[str]] = []
    stock = Policy.scores_together

    def scores_together(policy: Policy, together: Any) -> Any:
        asked.append([policy.name for _ in together])
        return stock(policy, together)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "scores_together", scores_together)
        server.plans(calls)
    assert sorted(asked) == [["rkv", "rkv"], ["skipkv"], ["streaming"]]


@pytest.mark.parametrize(("name", "share"), [("h2o", 0.5), ("skipkv+", 0.5), ("distinct", 0.6)])
def test_the_recent_part_is_a_share_of_what_a_prompt_leaves(name: str, share: float) -> None:
    """A prompt of 120 tokens that counts and stays leaves 80 of 200."""
    server = SyntheticServer()
    parameters = {"count_prompt": True, "window": 8}
    keys = {"kv_policy": name, "kv_budget": 200, "kv_params": parameters}
    call = served(server, prompt=[3] * 120, **keys)
    (_, (start, stop)) = planner._protected(call.state, 328)
    assert (start, stop) == (328 - int(share * 80), 328)


def test_nothing_is_due_before_the_first_decode_step() -> None:
    """A counted prompt may be past the budget at once; its prefill may still be running."""
    server = SyntheticServer()
    parameters = {"protect_prompt": False, "count_prompt": True}
    call = served(server, prompt=[3] * 90, kv_params=parameters)
    assert server.compact_due(call) == []
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


SHARED = {"interval": INTERVAL, "fraction": 0.25}


def test_a_share_is_due_when_an_interval_is_past_it() -> None:
    """Every compaction evicts ``interval`` tokens once the share is more than the least budget."""
    server = SyntheticServer()
    call = served(server, words(4) * 130, kv_budget=60, kv_params=SHARED)
    at, own = decoded(server, call, 400)
    shares = [max(13, fed // 4) for fed in at]
    assert at[:9] == [25, 37, 49, 63, 79, 95, 111, 127, 143] and len(at) == 28
    assert [len(kept) - PROMPT for kept in call.compactions] == [min(60, one) for one in shares]
    bounds = [min(60, max(13, fed // 4)) + INTERVAL for fed in range(1, 401)]
    assert all(held <= bound + 1 for held, bound in zip(own, bounds, strict=True))
    assert {before - after for before, after in pairwise(own) if after < before} == {INTERVAL - 1}
    summary = server.finish(call)
    assert (summary["kv_budget"], summary["peak_kv_tokens"]) == (60, 72)
    assert summary["kv_tokens"] == own[-1] == 400 - summary["evicted_tokens"]


def test_a_share_below_the_least_budget_is_the_least_budget() -> None:
    server = SyntheticServer()
    call = served(server, kv_params={"fraction": 1e-6})
    decoded(server, call, 100)
    assert {len(kept) - PROMPT for kept in call.compactions} == {13}


@pytest.mark.parametrize("policy", ["skipkv", "rpc"])
def test_a_share_of_everything_changes_nothing(policy: str) -> None:
    server = SyntheticServer()
    calls = [served(server, kv_policy=policy, kv_params=one) for one in ({}, {"fraction": 1})]
    server.run(calls[0], 120)
    server.run(calls[1], 120)
    assert calls[0].compactions == calls[1].compactions != []


def test_a_budget_that_grows_stays_within_its_share() -> None:
    """RPC's own budgets are 13, 14, 17, 20 ... tokens."""
    server = SyntheticServer()
    for fraction, kept in ((1.0, [13, 14, 17, 20, 23]), (0.25, [13, 13, 13, 14, 18])):
        call = served(server, kv_policy="rpc", kv_params={"fraction": fraction})
        at, _ = decoded(server, call, 150)
        assert [len(one) - PROMPT for one in call.compactions][:5] == kept
        policy = call.state.settings.policy
        expected = [budget_at(policy, BUDGET, i, fed) for i, fed in enumerate(at, start=1)]
        assert [len(one) - PROMPT for one in call.compactions] == expected


def test_requests_of_several_shares_keep_in_a_batch_what_they_keep_alone() -> None:
    shares = (0.2, 0.5, 0.5, 1.0)
    servers = [SyntheticServer() for _ in range(2)]
    together, alone = (
        [
            served(server, seed=seed, kv_policy=policy, kv_params={"fraction": share})
            for seed, (share, policy) in enumerate(zip(shares, POLICIES, strict=True))
        ]
        for server in servers
    )
    for _ in range(150):
        servers[0].decode(*together)
    for call in alone:
        servers[1].run(call, 150)
    assert [call.compactions for call in together] == [call.compactions for call in alone]
    assert all(len(call.compactions) > 4 for call in together)


@pytest.mark.parametrize("policy", ["skipkv", "h2o", "rpc", "streaming"])
def test_a_recomputed_request_keeps_the_share_of_all_it_generated(policy: str) -> None:
    server = SyntheticServer()
    call = served(server, words(5) * 50, kv_budget=60, kv_policy=policy, kv_params=SHARED)
    server.run(call, 90)
    done = len(call.compactions)
    server.retract(call)
    server.prefill(call)
    assert len(call.slots) == PROMPT + 91 and len(call.compactions) == done
    server.run(call, 2)  # the first decode step may still be running beside the prefill
    assert len(call.compactions) == done + 1
    assert len(call.compactions[-1]) == PROMPT + 92 // 4
    server.run(call, 100)
    assert len(call.slots) - PROMPT <= 192 // 4 + INTERVAL + 1


@pytest.mark.parametrize("prefilled", [5, 60])
def test_admission_counts_with_the_share_of_the_longest_output(prefilled: int) -> None:
    """What a request holds never passes what was set aside for it."""
    server = SyntheticServer()
    call = served(server, words(4) * 130, kv_budget=60, kv_params=SHARED)
    server.run(call, prefilled)
    for steps in (4, 100, 300):
        left = call.state.future_tokens(len(call.slots), steps)
        share = max(13, min((prefilled + steps) // 4, 60))
        assert left == min(steps, share + INTERVAL + 1 - (len(call.slots) - PROMPT))
    own = []
    set_aside = len(call.slots) + call.state.future_tokens(len(call.slots), 200)
    for _ in range(200):
        server.decode(call)
        own.append(len(call.slots))
    assert max(own) <= set_aside


def test_a_budget_above_the_length_changes_nothing() -> None:
    server = SyntheticServer()
    call = served(server, kv_budget=500)
    server.run(call, 200)
    assert call.positions == list(range(PROMPT + 200)) and call.compactions == []
    assert server.finish(call)["evicted_tokens"] == 0


# -- what


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


def test_a_flag_outlives_the_sentence_that_raised_it() -> None:
    """1 repeats 0, then goes; 0 is still redundant at the next compaction."""
    server = SyntheticServer()
    call = served(server, words(6, 10, 40, 40), kv_params={"tau": 0.9})
    state, table = call.state, server.recorder.sentences
    call.hidden[PROMPT : PROMPT + 16] = torch.ones(call.hidden.shape[1])
    server.run(call, 52)
    plan = server.plan(call)
    assert plan.table is not None and plan.table.sentences == [0, 1]
    assert float(table.redundancy[state.held.track_id, 0]) > 0.99
    # keep sentence 0, drop sentence 1 whole: as some other policy or budget might have
    drop = [call.positions.index(p) for p in range(PROMPT + 6, PROMPT + 16)]
    drop += [call.positions.index(p) for p in range(PROMPT + 20, PROMPT + 22)]
    kept = [i for i in range(len(call.slots)) if i not in drop]
    selection = plan.selection._replace(kept=torch.tensor(kept), evicted=torch.tensor(drop))
    changed = plan._replace(selection=selection)
    compaction = Compaction([changed], server.req_to_token, server.recorder, check=True)
    compaction.apply()
    server.book([compaction], [call])
    server.run(call, 12)
    plan = server.plan(call)
    assert plan.table is not None and plan.table.sentences[0] == 0
    assert 1 not in plan.table.sentences
    assert float(table.redundancy[state.held.track_id, 0]) > 0.99


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
