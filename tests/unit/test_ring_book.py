"""Rings of recent queries that requests take turns on: nobody waits for long, nobody sees the
other's.

The book is checked against a plain simulation of who records in which step; the runtime against the
same requests with a ring each.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import INTERVAL, Call, SyntheticServer, served, words

from sgl_skipkv.config import ServerConfig
from sgl_skipkv.eviction.ring_book import RingBook
from sgl_skipkv.eviction.ring_loans import RingLoans

REPEATABLE = settings(deadline=None, derandomize=True)
WINDOW = 8  # of a policy that is not told otherwise


def recorded_in(due: int, interval: int, window: int, until: int) -> set[int]:
    """Steps, one by one, before every compaction from ``due`` on."""
    return {last - back for last in range(due, until, interval) for back in range(window)}


@REPEATABLE
@given(st.integers(1, 70), st.integers(0, 200), st.integers(1, 90), st.integers(1, 20))
def test_recording_steps_cover_every_step_and_no_other(
    cycle: int, due: int, interval: int, window: int
) -> None:
    steps = RingBook(1, cycle).recording_steps(due, interval, window)
    until = due + interval * cycle + 1  # then the pattern repeats
    expected = {step % cycle for step in recorded_in(due, interval, window, until)}
    assert {bit for bit in range(cycle) if steps >> bit & 1} == expected
    assert steps < 1 << cycle


@pytest.mark.parametrize(
    ("cycle", "interval", "window", "calls"),
    [(128, 128, 8, 16), (128, 256, 8, 16), (128, 64, 8, 8), (128, 96, 8, 4), (128, 127, 8, 1)],
)
def test_how_many_calls_one_ring_serves(cycle: int, interval: int, window: int, calls: int) -> None:
    book = RingBook(1, cycle)
    taken = 0
    for due in range(0, cycle):
        steps = book.recording_steps(due, interval, window)
        if book.fits(steps):
            assert book.take(steps) == 1
            taken += 1
    assert taken == calls


@REPEATABLE
@given(st.integers(1, 5), st.lists(st.integers(0, 127), min_size=1, max_size=60), st.data())
def test_what_is_taken_never_overlaps_and_comes_back(
    rings: int, dues: list[int], data: st.DataObject
) -> None:
    book, held = RingBook(rings, 32), []
    for due in dues:
        steps = book.recording_steps(due, data.draw(st.sampled_from([8, 32, 64])), 5)
        if book.fits(steps):
            held.append((book.take(steps), steps))
        else:
            assert len(held) >= rings, "a ring that nobody has takes anyone"
            with pytest.raises(LookupError, match="no ring is free"):
                book.take(steps)
        for ring in range(1, rings + 1):
            used = [steps for number, steps in held if number == ring]
            assert sum(steps.bit_count() for steps in used) == _union(used).bit_count()
        if held and data.draw(st.booleans()):
            book.give_back(*held.pop(data.draw(st.integers(0, len(held) - 1))))
    for one in held:
        book.give_back(*one)
    assert book.free_rings == rings


@REPEATABLE
@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40))
def test_fits_sees_who_comes_first(before: list[int], due: int) -> None:
    book, other = RingBook(2, 16), RingBook(2, 16)
    earlier = []
    for one in before:
        steps = book.recording_steps(one, 16, 5)
        if book.fits(steps, earlier):
            earlier.append(steps)
            other.take(steps)
    steps = book.recording_steps(due, 16, 5)
    assert book.fits(steps, earlier) == other.fits(steps)
    assert book.free_rings == 2, "asking takes nothing"


def _union(parts: list[int]) -> int:
    union = 0
    for part in parts:
        union |= part
    return union


# -- the runtime


WINDOWED = ("rkv", "skipkv", "snapkv")
#: policies, and the entries of a ring; few entries, so that whoever else writes there destroys one
MIXES = {"windowed": (WINDOWED, 2), "and one that always records": ((*WINDOWED, "h2o"), 24)}


def drawn_calls(server: SyntheticServer, count: int, policies: tuple[str, ...]) -> list[Call]:
    """The same requests on every server of one configuration."""
    calls = []
    for i in range(count):
        prompt = [3] * (4 + i % 3)
        parameters = {"interval": (INTERVAL, 2 * INTERVAL, 8)[i % 3], "window": 1 + i % 2}
        budget = 14 + i % 7
        calls.append(
            served(
                server,
                words(5, 3, 7) * 12,
                prompt=prompt,
                prefill=False,
                seed=i,
                kv_budget=budget,
                kv_policy=policies[i % len(policies)],
                kv_params=parameters,
            )
        )
    return calls


def run_all(rings: int, seed: int, mix: str) -> tuple[dict[int, list[list[int]]], int]:
    """What each request kept, and how often one had to wait for a ring."""
    policies, entries = MIXES[mix]
    server = SyntheticServer(
        rows=8, slots=8, query_rings=rings, query_window=entries, kv_interval=INTERVAL
    )
    draw, waited = random.Random(seed), 0
    waiting = list(enumerate(drawn_calls(server, 14, policies)))
    running: list[tuple[int, Call]] = []
    kept: dict[int, list[list[int]]] = {}
    retracted: set[int] = set()
    while waiting or running:
        if waiting and server.free_rows and draw.random() < 0.5:
            number, call = waiting[0]
            tokens = call.prompt_tokens + (len(call.output_ids) if call.generated else 0)
            if server.runtime.has_slot(call.state) and server.runtime.rings.fits(
                call.state, tokens
            ):
                running.append(waiting.pop(0))
                server.prefill(call, chunk=draw.randrange(3, 200))
            else:
                waited += 1
        if running:
            server.decode(*(call for _, call in running))
        for number, call in list(running):
            if call.generated >= 90 + number:
                running.remove((number, call))
                kept[number] = call.compactions
                assert call.state.failure is None
                server.finish(call)
            elif number % 4 == 3 and call.generated == 40 + number and number not in retracted:
                running.remove((number, call))
                server.retract(call)
                retracted.add(number)
                waiting.insert(0, (number, call))
    server.assert_idle()
    return kept, waited


@pytest.mark.parametrize("mix", MIXES)
def test_sharing_rings_changes_nothing_but_when_a_call_starts(mix: str) -> None:
    """Exactly the same kept sets with 3 rings as with one for each of 8."""
    expected, waited = run_all(8, 1, mix)
    assert waited == 0 and sum(map(len, expected.values())) > 60
    for seed in range(3):
        found, waited = run_all(3, seed, mix)
        assert waited > 0 and found == expected


def test_rings_lent_for_other_steps_change_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the test above can fail."""
    expected, _ = run_all(8, 1, "windowed")
    right = RingLoans.recording_steps
    with monkeypatch.context() as patch:
        patch.setattr(
            RingLoans, "recording_steps", lambda self, state, tokens: right(self, state, 0)
        )
        assert run_all(3, 0, "windowed")[0] != expected


def test_a_call_that_stood_still_is_stopped() -> None:
    """Its queries would lie in steps that belong to somebody else."""
    server = SyntheticServer()
    call, other = served(server), served(server, seed=1)
    server.decode(call, other)
    assert call.state.failure is None
    server.decode(other)
    server.decode(call, other)
    assert call.state.failure is not None and "did not advance" in call.state.failure
    assert other.state.failure is None


@pytest.mark.parametrize(("slots", "asked", "rings"), [(4, None, 4), (200, None, 50), (64, 9, 9)])
def test_how_many_rings_a_server_has(slots: int, asked: int | None, rings: int) -> None:
    assert ServerConfig(query_rings=asked).rings(slots) == rings
    assert ServerConfig().rings(100) == 32 and ServerConfig(query_rings=999).rings(5) == 5
