"""Servers under load: the load is what was asked for, and rows and figures are of it."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Fleet

from bench.lib import pairs
from bench.lib.trace import read_trace
from bench.serving import __main__ as serving
from bench.serving import figure as serving_figure
from bench.serving import latency, steady


@pytest.mark.server
def test_a_round_under_pressure(fleet: Fleet) -> None:
    """The load is what was asked for, and the numbers are read from the server's own log."""
    server = fleet.ready("reasoner")
    arguments = serving.parser().parse_args(
        ["--calls", "6", "--tokens", "120", "--prompt-tokens", "20", "--interval", "32"]
    )
    for kv_budget in (None, 32):
        traced = len(read_trace(server.trace_path))
        rate, running, retracted = serving.round_of(server, arguments, kv_budget, 1)
        assert rate > 0 and 3 <= running <= 6 and retracted == 0
        events = read_trace(server.trace_path)[traced:]
        compacted = [event for event in events if event["event"] == "compact"]
        assert len(compacted) == (6 * 2 if kv_budget else 0)  # at 64 and 96 of 120 tokens


def test_lines_of_a_steady_state() -> None:
    """By hand: 20 steps of 10 requests in 0.1 s, then of 30 in 0.2 s, are 800 tokens in 0.3 s."""
    log = "".join(
        f"Decode batch, #running-req: {running}, #token: 9, token usage: 0.50, cuda graph: True, "
        f"gen throughput (token/s): {rate:.2f}, #queue-req: {waiting}\n"
        for running, rate, waiting in ((10, 2000.0, 4), (30, 3000.0, 2))
    )
    lines = steady.decode_lines(f"Prefill batch, #new-seq: 1\n{log}")
    assert [(one.running, one.waiting) for one in lines] == [(10, 4), (30, 2)]
    assert steady.tokens_per_s(lines) == pytest.approx(800 / 0.3)


def test_how_many_requests_of_every_age_fit() -> None:
    arguments = serving.parser().parse_args(
        ["--prompt-tokens", "100", "--tokens", "1000", "--interval", "49"]
    )
    assert steady.fitting(arguments, None, 6000) == 10  # of 600 tokens on average
    assert steady.fitting(arguments, 150, 6000) == 20  # of 100 and 200
    assert steady.fitting(arguments, 700, 6000) == 10


@pytest.mark.server
def test_a_steady_state_is_full_and_ends(fleet: Fleet) -> None:
    """Six callers, who begin at different ages; nothing runs afterwards."""
    server = fleet.ready("reasoner")
    arguments = serving.parser().parse_args(
        ["--tokens", "400", "--prompt-tokens", "20", "--warm-up-s", "3", "--seconds", "3"]
    )
    for kv_budget in (None, 64):
        log = steady.measured_log(server, arguments, kv_budget, 6)
        lines = steady.decode_lines(log)
        assert lines and max(line.running for line in lines) == 6
        assert steady.tokens_per_s(lines) > 0
        server.wait_idle()


def test_the_price_of_a_compaction() -> None:
    """Against steps of 10 ms, one of which takes 34, wherever near the compaction that is."""
    for shift in range(-2, 3):
        gaps = [10.0] * 60
        gaps[30 + shift] = 34.0
        gaps[10] = 500.0  # somebody else's
        assert latency.cost_and_step(gaps, 30) == (24.0, 10.0)
    assert latency.cost_and_step([10.0] * 60, 30) == (0.0, 10.0)


def test_the_serving_figure_is_drawn_from_the_rows(drawn: Any) -> None:
    times = {"p50_ms": "5.0", "p99_ms": "9.0", "longest_ms": "12.0"}
    gaps = [{"calls": "8", "neighbours": "no budget", **times}]
    pressure = [
        [
            {
                **{"kv_budget": kv_budget, "tokens_per_s_p50": rate, "peak_running": "4"},
                **{"fits_by_arithmetic": "5", "calls": "8", "pool_tokens": "999"},
                **{"ratio_low": "1.0", "ratio_high": "1.1", "rounds": "2"},
            }
            for kv_budget in ("", "64")
        ]
        for rate in ("100.0", "100.0", "101.0")
    ]
    files = drawn(lambda rows, path: serving_figure.draw(rows, gaps, path), *pressure)
    assert files[0] == files[1] != files[2]


def test_the_interval_of_paired_rounds() -> None:
    """Around the median, within the ratios; the same way against itself is exactly 1."""
    rates = [90.0, 100.0, 104.0, 110.0, 120.0] * 9
    found = pairs.paired_ratio(rates, [100.0] * 45)
    assert found["ratio_p50"] == 1.04 and 1.0 <= found["ratio_low"] < 1.04 < found["ratio_high"]
    assert found["ratio_high"] <= 1.1
    assert set(pairs.paired_ratio(rates, rates).values()) == {1.0}
