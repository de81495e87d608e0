"""Servers under load: the load is what was asked for, and rows and figures are of it."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import Fleet

from bench.lib import pairs
from bench.serving import __main__ as serving
from bench.serving import figure as serving_figure
from bench.serving import latency
from sgl_skipkv.request.trace import read_trace


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


def test_the_price_of_a_compaction() -> None:
    """Against steps of 10 ms, one of which takes 34, wherever near the compaction that is."""
    for shift in range(-2, 3):
        gaps = [10.0] * 60
        gaps[30 + shift] = 34.0
        gaps[10] = 500.0  # somebody else's
        assert latency.cost_and_step(gaps, 30) == (24.0, 10.0)
    assert latency.cost_and_step([10.0] * 60, 30) == (0.0, 10.0)


def test_the_serving_figure_is_drawn_from_the_rows(drawn: Any) -> None:
    gaps = [{"calls": "8", "neighbours": "no budget", "p50_ms": "5.0", "p99_ms": "9.0"}]
    pressure = [
        [
            {
                **{"kv_budget": kv_budget, "tokens_per_s_p50": rate, "peak_running": "4"},
                **{"fits_by_arithmetic": "5", "calls": "8", "pool_tokens": "999"},
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
