"""Every policy in one table: properties that all of them share, and the scores of each by itself.

A new policy is one file, one line in the registry and one line in ``POLICIES`` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import importance, redundancy
from synthetic import BUDGET, DELIMITER, INTERVAL, WORD, Call, SyntheticServer, served, words
from torch import Tensor

import sgl_skipkv.policy
from sgl_skipkv.config import SettingError
from sgl_skipkv.policy import Policy, make_policy, names, policy_class
from sgl_skipkv.policy.base import ScoreInput, Sentences
from sgl_skipkv.policy.skipkv import sentence_penalty

REPEATABLE = settings(deadline=None, derandomize=True)
TOLERANCE = 2e-6

# name, knobs
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("skipkv", {}),
    ("skipkv", {"tau": 0.0, "window": 3, "sink": 0}),
    ("rkv", {}),
    ("rkv", {"sigma": 0.9, "kernel": 1, "threshold": 0.0, "window": 16}),
    ("streaming", {}),
    ("streaming", {"sink": 0, "window": 1}),
    ("random", {}),
    ("random", {"seed": 5}),
    ("full", {}),
]
EVICTING = [case for case in POLICIES if policy_class(case[0]).evicts]


def case_id(case: tuple[str, dict[str, Any]]) -> str:
    return case[0] + "".join(f"-{name}={value}" for name, value in case[1].items())


def serve(server: SyntheticServer, case: tuple[str, dict[str, Any]], **call: Any) -> Call:
    return served(server, kv_policy=case[0], kv_params=case[1], **call)


# -- the registry


def test_the_table_holds_every_policy_and_every_file_is_registered() -> None:
    assert set(names()) == {name for name, _ in POLICIES}
    assert names()[0] == "skipkv"
    folder = Path(sgl_skipkv.policy.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert files == set(names())


@pytest.mark.parametrize("name", names())
def test_a_policy_knows_its_name_and_what_it_needs(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, Policy) and policy.name == name
    assert policy.min_budget_tokens == policy.params.sink + policy.params.window + 1 == 13
    assert not policy.needs_sentences or policy.needs_queries
    with pytest.raises(SettingError, match="a known name"):
        make_policy(name, no_such_knob=1)


@pytest.mark.parametrize("name", ["", "SKIPKV", "nope", None, 3, ["rkv"]])
def test_unknown_policy(name: Any) -> None:
    with pytest.raises(SettingError, match=", ".join(names())):
        make_policy(name)


# -- properties of all


def repeat(call: Call) -> None:
    """Overwrite the call's content: every key, query and hidden state the same."""
    call.keys[:] = call.keys[:, :1].clone()
    call.queries[:] = call.queries[:, :1].clone()
    call.hidden[:] = call.hidden[:1].clone()


def zero(call: Call) -> None:
    for table in (call.keys, call.queries, call.hidden):
        table.zero_()


def zero_every_third(call: Call) -> None:
    call.keys[:, ::3] = 0.0
    call.hidden[::3] = 0.0


def huge(call: Call) -> None:
    call.keys.mul_(1e4)
    call.hidden.mul_(1e15)


SCENES: dict[str, tuple[list[int], Any]] = {
    "sentences": (words(5, 3, 7, 4, 9) * 10, lambda call: None),
    "one giant sentence": ([WORD] * 260, lambda call: None),
    "delimiters only": ([DELIMITER] * 260, lambda call: None),
    "one-token sentences": (words(1, 2) * 90, lambda call: None),
    "all equal": (words(5, 3, 7, 4, 9) * 10, repeat),
    "all zero": (words(5, 3, 7, 4, 9) * 10, zero),
    "some zero": (words(5, 3, 7, 4, 9) * 10, zero_every_third),
    "huge": (words(5, 3, 7, 4, 9) * 10, huge),
}
PROMPTS: dict[str, dict[str, Any]] = {
    "pinned": {},
    "short prompt": {"prompt": [3]},
    "evictable": {"protect_prompt": False},
    "counted": {"protect_prompt": False, "count_prompt": True},
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("case", EVICTING, ids=case_id)
def test_every_compaction_keeps_its_promises(
    case: tuple[str, dict[str, Any]], scene: str, prompt: str
) -> None:
    """The count is exact, pinned tokens stay, order stays, scores are finite, nothing is lost."""
    tokens, change = SCENES[scene]
    knobs = {name: value for name, value in PROMPTS[prompt].items() if name != "prompt"}
    server = SyntheticServer()
    opening = {"prompt": PROMPTS[prompt].get("prompt", [3] * 10), "prefill": False}
    call = served(server, tokens, kv_policy=case[0], kv_params={**case[1], **knobs}, **opening)
    change(call)
    server.prefill(call)
    params, settings = call.state.settings.policy.params, call.state.settings
    keep = settings.keep_tokens(call.prompt_tokens)
    for _ in range(120):
        before, compactions = call.positions.copy(), len(call.compactions)
        server.decode(call)
        assert settings.own_tokens(len(call.slots), call.prompt_tokens) <= BUDGET + INTERVAL + 1
        if len(call.compactions) == compactions:
            continue
        kept = call.compactions[-1]
        assert len(kept) == keep and kept == sorted(set(kept)) and set(kept) <= set(before)
        pinned = set(before[-params.window :]) | set(range(params.sink)) & set(before)
        if params.protect_prompt:
            pinned |= set(range(call.prompt_tokens))
        assert pinned <= set(kept)
    assert len(call.compactions) >= 5 and call.state.failure is None
    summary = server.finish(call)
    assert summary["evicted_tokens"] == len(call.compactions) * INTERVAL
    server.assert_idle()


@pytest.mark.parametrize("case", EVICTING, ids=case_id)
def test_a_call_alone_keeps_what_it_keeps_in_a_batch(case: tuple[str, dict[str, Any]]) -> None:
    """Neighbours with other lengths, budgets and policies, arriving and leaving in between."""
    alone_server, crowd = SyntheticServer(), SyntheticServer()
    alone = serve(alone_server, case, seed=1)
    alone_server.run(alone, 100)

    first = serve(crowd, ("random", {}), seed=7, kv_budget=20)
    crowd.run(first, 30)
    call = serve(crowd, case, seed=1)
    other = serve(crowd, ("skipkv", {}), seed=9, prompt=[3] * 33, kv_budget=64)
    for step in range(100):
        if step == 50:
            crowd.finish(first)
        batch = [call, other] if step >= 50 else [first, call, other]
        crowd.decode(*(batch if step % 3 else batch[::-1]))
    assert call.compactions == alone.compactions and len(alone.compactions) >= 4
    assert other.compactions and other.compactions != call.compactions


@pytest.mark.parametrize("case", EVICTING, ids=case_id)
def test_scores_depend_on_the_input_alone(case: tuple[str, dict[str, Any]]) -> None:
    """Twice the same, and nothing that was handed in is changed."""
    policy = make_policy(case[0], **case[1])
    inputs = score_input(seed=3, window=policy.params.window)
    copies = [table.clone() for table in (inputs.positions, inputs.queries, ALL_KEYS(inputs))]
    first = policy.scores(inputs)
    assert torch.equal(first, policy.scores(inputs))
    assert first.dtype == torch.float32 and first.shape == inputs.positions.shape
    for table, copy in zip(
        (inputs.positions, inputs.queries, ALL_KEYS(inputs)), copies, strict=True
    ):
        assert torch.equal(table, copy)


def test_full_evicts_nothing_and_needs_nothing() -> None:
    server = SyntheticServer()
    call = serve(server, ("full", {}))
    server.run(call, 120)
    assert call.compactions == [] and call.state.slot == 0
    assert server.finish(call)["kv_tokens"] == 120


# -- the scores of each


def score_input(
    seed: int,
    *,
    n: int = 60,
    window: int = 8,
    layers: int = 3,
    sentences: Sentences | None = None,
    compaction_seed: int = 11,
) -> ScoreInput:
    """Keys in clusters, so that redundancy has something to find; positions with gaps."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(layers, 4, 2, 8, generator=draw)
    of = torch.randint(4, (n,), generator=draw)
    keys = centres[:, of] + 0.5 * torch.randn(layers, n, 2, 8, generator=draw)
    none = torch.zeros(0, dtype=torch.int64)
    return ScoreInput(
        positions=torch.randperm(3 * n, generator=draw)[:n].sort().values,
        prompt_tokens=10,
        layers=layers,
        keys=lambda layer: keys[layer],
        queries=torch.randn(layers, window, 4, 8, generator=draw),
        scale=0.3,
        sentences=sentences or Sentences(none, none, torch.zeros(0)),
        seed=compaction_seed,
    )


def ALL_KEYS(inputs: ScoreInput) -> Tensor:
    return torch.stack([inputs.keys(layer) for layer in range(inputs.layers)])


def rkv_scores(
    inputs: ScoreInput, sigma: float = 0.1, kernel: int = 7, threshold: float = 0.5
) -> list[float]:
    """Z = sigma I - (1 - sigma) R, mean over heads, then layers; 0 for the window."""
    assert inputs.queries is not None
    n, window = len(inputs.positions), inputs.queries.shape[1]
    total = [0.0] * n
    for layer in range(inputs.layers):
        keys = inputs.keys(layer)
        important = importance(inputs.queries[layer], keys, kernel, inputs.scale)
        redundant = redundancy(keys, threshold)
        heads = len(important)
        for i in range(n - window):
            z = sum(sigma * important[h][i] - (1.0 - sigma) * redundant[h][i] for h in range(heads))
            total[i] += z / heads / inputs.layers
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "knobs", [{}, {"sigma": 0.0}, {"sigma": 1.0}, {"kernel": 1, "threshold": 0.2, "sigma": 0.5}]
)
def test_rkv_scores(seed: int, knobs: dict[str, Any]) -> None:
    inputs = score_input(seed)
    found = make_policy("rkv", **knobs).scores(inputs).double()
    exact = torch.tensor(rkv_scores(inputs, **knobs), dtype=torch.float64)
    assert (found - exact).abs().max() <= TOLERANCE
    assert not found[-8:].any()


def penalties(inputs: ScoreInput, tau: float) -> list[float]:
    """lambda of the sentence that holds each token, where it is redundant and longer than one."""
    assert inputs.sentences is not None
    found = [0.0] * len(inputs.positions)
    spans = zip(
        inputs.sentences.starts.tolist(),
        inputs.sentences.stops.tolist(),
        inputs.sentences.redundancy.tolist(),
        strict=True,
    )
    for start, stop, likeness in spans:
        if likeness > tau and stop - start > 1:
            for i, position in enumerate(inputs.positions.tolist()):
                if start <= position < stop:
                    found[i] = likeness
    return found


def some_sentences(*spans: tuple[int, int, float]) -> Sentences:
    starts, stops, likeness = zip(*spans, strict=True)
    return Sentences(torch.tensor(starts), torch.tensor(stops), torch.tensor(likeness))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tau", [0.95, 0.99, 0.0])
def test_skipkv_scores(seed: int, tau: float) -> None:
    sentences = some_sentences(
        (20, 45, 0.97), (45, 46, 0.999), (50, 90, 0.2), (90, 120, 0.9951), (120, 160, -1.0)
    )
    inputs = score_input(seed, sentences=sentences)
    found = make_policy("skipkv", tau=tau).scores(inputs).double()
    parts = zip(rkv_scores(inputs), penalties(inputs, tau), strict=True)
    exact = torch.tensor([z - lost for z, lost in parts], dtype=torch.float64)
    assert (found - exact).abs().max() <= TOLERANCE
    assert any(penalties(inputs, tau))


def test_redundant_sentences_go_whole_and_first() -> None:
    inputs = score_input(4, sentences=some_sentences((20, 60, 0.96), (60, 100, 0.3)))
    scores = make_policy("skipkv").scores(inputs)
    inside = (inputs.positions >= 20) & (inputs.positions < 60)
    inside[-8:] = False
    assert inside.any() and scores[inside].max() < -0.9
    assert scores[~inside].abs().max() < 0.1


def test_similarity_at_tau_is_not_redundant() -> None:
    positions = torch.arange(6)
    sentences = some_sentences((0, 3, 0.5), (3, 6, 0.75))
    assert sentence_penalty(positions, sentences, 0.5).tolist() == [0, 0, 0, 0.75, 0.75, 0.75]


def test_a_sentence_of_one_token_is_never_penalised() -> None:
    positions = torch.arange(4)
    sentences = some_sentences((0, 1, 0.99), (1, 3, 0.98), (3, 4, 0.97))
    found = sentence_penalty(positions, sentences, 0.9)
    assert torch.equal(found, torch.tensor([0, 0.98, 0.98, 0]))


def test_tokens_outside_every_sentence_are_not_penalised() -> None:
    positions = torch.tensor([0, 4, 5, 8, 9, 12])
    sentences = some_sentences((4, 6, 0.99), (9, 11, 0.98))
    found = sentence_penalty(positions, sentences, 0.9)
    assert torch.equal(found, torch.tensor([0, 0.99, 0.99, 0, 0.98, 0]))


def test_streaming_scores_are_positions() -> None:
    inputs = score_input(5)
    found = make_policy("streaming").scores(inputs)
    assert found.tolist() == [float(p) for p in inputs.positions.tolist()]


def test_streaming_keeps_the_sinks_and_the_most_recent() -> None:
    server = SyntheticServer()
    call = serve(server, ("streaming", {"protect_prompt": False, "count_prompt": True}))
    server.run(call, 100)
    for kept in call.compactions:
        assert kept == [0, 1, 2, 3, *range(kept[-1] + 1 - (BUDGET - 4), kept[-1] + 1)]
    assert len(call.compactions) >= 4


def test_random_draws() -> None:
    """By prompt, compaction and seed; not by content, order of calls or the global generator."""
    first = make_policy("random").scores(score_input(1))
    torch.manual_seed(99)
    assert torch.equal(first, make_policy("random").scores(score_input(2)))
    again = make_policy("random").scores(score_input(1, compaction_seed=12))
    seeded = make_policy("random", seed=1).scores(score_input(1))
    assert not torch.equal(first, again) and not torch.equal(first, seeded)
    assert not torch.equal(again, seeded)
    assert (first >= 0).all() and (first < 1).all() and first.unique().numel() > 55


def test_random_keeps_the_same_set_for_the_same_prompt_whoever_asks() -> None:
    server = SyntheticServer()
    same = [serve(server, ("random", {}), rid=rid, seed=seed) for rid, seed in (("a", 1), ("b", 2))]
    other = serve(server, ("random", {}), prompt=[3] * 9 + [2])
    for call in (*same, other):
        server.run(call, 80)
    assert same[0].compactions == same[1].compactions != other.compactions


def test_random_draws_anew_at_every_compaction() -> None:
    server = SyntheticServer()
    call = serve(server, ("random", {}))
    drawn = []  # row entries, which the same draw would choose again
    for _ in range(100):
        before, done = call.positions.copy(), len(call.compactions)
        server.decode(call)
        if len(call.compactions) > done:
            drawn.append(tuple(before.index(p) for p in call.compactions[-1]))
    assert len(set(drawn)) == len(drawn) == 4


# -- logical positions against the paper's range monitoring (eqs 9-11)


class RangeMonitor:
    """Start and end of every sentence in cache coordinates, inclusive, as the paper moves them.

    ``edge`` is where the last known sentence ends, kept also when that sentence is gone: eq. 10
    starts the next one behind it.
    """

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[int, int]] = {}
        self.edge = -1

    def append(self, spans: Sequence[tuple[int, int]], known: int, cached: int, made: int) -> None:
        """Eqs 9 and 10: sentences closed since the last compaction, in order.

        Args:
            spans: all closed sentences in generation space, inclusive. known: how many of them the
                last compaction knew. cached, made: cache length and generation length now.
        """
        for i in range(known, len(spans)):
            end = cached - (made - spans[i][1])
            self.ranges[i] = (self.edge + 1, end)
            self.edge = end

    def evict(self, survivors: Sequence[int]) -> None:
        """Eq. 11: first survivor not before the start, last survivor not behind the end."""

        def moved(start: int, end: int) -> tuple[int, int]:
            first = [k for k, p in enumerate(survivors) if p >= start]
            last = [k for k, p in enumerate(survivors) if p <= end]
            return min(first, default=len(survivors)), max(last, default=-1)

        new = {i: moved(*span) for i, span in self.ranges.items()}
        self.ranges = {i: (b, e) for i, (b, e) in new.items() if b <= e}
        self.edge = moved(0, self.edge)[1]


@settings(REPEATABLE, max_examples=150)
@given(st.data())
def test_logical_positions_equal_the_papers_ranges(data: st.DataObject) -> None:
    """The sentence of every cached token, through random evictions, by both methods."""
    monitor = RangeMonitor()
    positions: list[int] = []
    spans: list[tuple[int, int]] = []  # inclusive
    made, known = 0, 0
    for _ in range(data.draw(st.integers(1, 5))):
        before = made
        for length in data.draw(st.lists(st.integers(2, 6), max_size=4)):
            start = spans[-1][1] + 1 if spans else 0
            made = max(start + length, made + 1)  # the first may finish a sentence that was open
            spans.append((start, made - 1))
        made += data.draw(st.integers(0, 3))
        positions += range(before, made)
        monitor.append(spans, known, len(positions), made)
        known = len(spans)

        by_ranges = [-1] * len(positions)
        for i, (start, end) in monitor.ranges.items():
            by_ranges[start : end + 1] = [i] * (end + 1 - start)
        assert owners(positions, spans) == by_ranges

        stays = data.draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
        survivors = [k for k, stay in enumerate(stays) if stay]
        monitor.evict(survivors)
        positions = [positions[k] for k in survivors]
        assert set(monitor.ranges) == {
            i for i, (b, e) in enumerate(spans) if any(b <= p <= e for p in positions)
        }


def owners(positions: list[int], spans: list[tuple[int, int]]) -> list[int]:
    """The sentence of each token by ``sentence_penalty``: every sentence has its own likeness."""
    if not spans:
        return [-1] * len(positions)
    likeness = [0.9 + 0.001 * i for i in range(len(spans))]
    sentences = some_sentences(
        *[(b, e + 1, value) for (b, e), value in zip(spans, likeness, strict=True)]
    )
    found = sentence_penalty(torch.tensor(positions, dtype=torch.int64), sentences, 0.5)
    return [-1 if value == 0 else round((value - 0.9) / 0.001) for value in found.tolist()]
