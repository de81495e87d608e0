"""Windowed replay: the statistics of h2o, raas and lazy are those of every decode step, exactly.

The books here follow every step as it happens, in float64 and by position; the runtime sees a few
queries at a time and rows that compact.
"""

from __future__ import annotations

import pytest
import torch
from synthetic import Call, SyntheticServer, served

ALPHA = 0.02
PARAMETERS = {"h2o": {}, "raas": {"alpha": ALPHA}, "lazy": {"alpha": ALPHA}}


class Books:
    """What each token has received, by position, one step after the other."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.received: dict[int, float] = {}
        self.last_active: dict[int, float] = {}
        self.longest_gap: dict[int, float] = {}

    def step(self) -> None:
        """The decode step that fed the row's last token."""
        positions, step = self.call.positions, self.call.positions[-1]
        shares = self.call.attention(step, positions).tolist()
        for position, got in zip(positions, shares, strict=True):
            self.received[position] = self.received.get(position, 0.0) + got
            last = self.last_active.setdefault(position, float(position))
            longest = self.longest_gap.setdefault(position, 0.0)
            if got > ALPHA and step > position:
                self.longest_gap[position] = max(longest, step - last)
                self.last_active[position] = step


@pytest.mark.parametrize("query_window", [1, 3, 5, 12, 16])
@pytest.mark.parametrize("name", PARAMETERS)
def test_statistics_are_those_of_every_step(name: str, query_window: int) -> None:
    server = SyntheticServer(query_window=query_window)
    call = served(server, kv_policy=name, kv_params=PARAMETERS[name])
    books, seen = Books(call), 0
    for _ in range(150):
        done = len(call.compactions)
        server.compact_due(call)
        for statistic, values in call.state.kv.statistics.items():
            expected = [getattr(books, statistic)[p] for p in call.positions[: len(values)]]
            if call.state.kv.followed_tokens == call.positions[-1] + 1:
                assert values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6), statistic
                seen += 1
        assert len(call.compactions) - done <= 1
        server.decode(call)
        books.step()
    assert len(call.compactions) >= 5 and seen >= 10
    assert call.state.kv.followed_tokens >= call.positions[-1] + 1 - query_window
    server.finish(call)
    server.assert_idle()


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_was_needed_least_goes(name: str) -> None:
    """Every kept set is the best by the books' own scores, ties and pinned tokens aside."""
    server = SyntheticServer(query_window=6)
    call = served(server, kv_policy=name, kv_params=PARAMETERS[name])
    books, policy = Books(call), call.state.settings.policy
    for _ in range(120):
        before = call.positions.copy()
        server.compact_due(call)
        if call.positions != before:
            now, kept = before[-1], set(call.positions)
            scores = {p: score_of(name, books, p, now) for p in before}
            gone = [scores[p] for p in before if p not in kept]
            tail = policy.protected_tail(40)
            free = [scores[p] for p in before[call.prompt_tokens : -tail] if p in kept]
            assert max(gone) <= min(free, default=float("inf")) + 1e-6
        server.decode(call)
        books.step()
    assert len(call.compactions) >= 5


def score_of(name: str, books: Books, position: int, now: int) -> float:
    """The papers' scores, from the books; the sigmoids of ``lazy`` are of its authors' program."""
    if name == "h2o":
        return books.received[position]
    if name == "raas":
        return books.last_active[position]
    sigmoid = lambda x: float(torch.sigmoid(torch.tensor(x, dtype=torch.float64)))  # noqa: E731
    gap, waits = books.longest_gap[position], now - books.last_active[position]
    return 2 * sigmoid(-1 - waits / gap) + 2 * sigmoid(1 - gap) if gap else 0.0


def test_a_recomputation_starts_the_statistics_anew() -> None:
    server = SyntheticServer(query_window=4)
    call = served(server, kv_policy="h2o")
    server.run(call, 60)
    server.retract(call)
    assert call.state.kv.statistics == {}
    server.prefill(call)
    assert call.state.kv.followed_tokens == call.prompt_tokens + call.generated
    server.run(call, 60)
    assert call.state.failure is None and len(call.state.kv.statistics["received"]) > 0
    server.finish(call)
    server.assert_idle()
