"""The experiments: grading, intervals, figures, and a sweep that goes on after a stop."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_modules import BENCH, bench_module
from fleet import Fleet
from servers import Server

from sgl_skipkv.policy import names
from sgl_skipkv.request.trace import read_trace

MODULES = (
    "accuracy.__main__",
    "report.accuracy_tables",
    "accuracy.figure",
    "lib.grading",
    "lib.record",
    "serving.__main__",
    "serving.figure",
    "serving.latency",
    "lib.serving",
    "steering.__main__",
    "lib.sweep",
)


@pytest.fixture(scope="module")
def bench() -> dict[str, ModuleType]:
    """The scripts' shared modules; they import each other by bare names."""
    return {name: bench_module(name) for name in MODULES}


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("4 + 3 = 7.\n</think>\nAnswer: 7", 7, True),
        ("4 + 3 = 7.\n</think>\nAnswer: 8", 7, False),
        ("Answer: 7.\n</think>\nAnswer: 8", 7, False),  # a thought is not an answer
        ("x\n</think>\nAnswer: -7", -7, True),
        ("so</think> The value is $\\boxed{\\frac{1}{2}}$.", "0.5", True),
        ("so</think> The value is $\\boxed{\\frac{1}{3}}$.", "0.5", False),
        ("so</think> \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3, \\pi/2)", True),
        ("", 7, False),
        ("no number at all", "\\frac{1}{2}", False),
    ],
)
def test_grading(bench: Any, text: str, answer: Any, right: bool) -> None:
    assert bench["lib.grading"].is_right(text, answer) is right


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # from the closed form by hand, p = 1/2: 1/2 -+ z/2 sqrt((1 + z^2/n)/n) / (1 + z^2/n)
    [(5, 10, 0.23659, 0.76341), (0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0)],
)
def test_wilson(bench: Any, right: int, n: int, low: float, high: float) -> None:
    found = bench["lib.grading"].wilson(right, n)
    assert found == pytest.approx((low, high), abs=1e-4)


def sweep_of(
    bench: Any, server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: int = 4
) -> Any:
    monkeypatch.setattr(bench["lib.record"], "ROWS", folder)
    monkeypatch.setattr(bench["lib.sweep"], "ROWS", folder)
    arguments = ["--levels", "easy", "--problems", "2", "--max-new-tokens", "600"]
    parser = bench["lib.serving"].argparse.ArgumentParser()
    bench["lib.serving"].add_arguments(parser)
    problems = bench["lib.serving"].read_problems(parser.parse_args(arguments))
    return bench["lib.sweep"].Sweep(
        "trial", [server], parallel, problems, 600, folder / "trial.jsonl", {"model": "reasoner"}
    )


class Counting:
    """A real server, and how often it was asked; it goes away after ``limit`` answers."""

    def __init__(self, server: Server, limit: int) -> None:
        self.server, self.limit, self.enabled = server, limit, 0

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        self.enabled += 1
        if self.enabled > self.limit:
            raise ConnectionError("the server went away")
        return self.server.post(path, body)


@pytest.mark.server
def test_a_sweep_goes_on_where_it_was(
    bench: Any, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = bench["lib.sweep"].Cell
    cells = [
        cell("easy", "full"),
        cell("easy", "streaming", 64, '{"interval": 32}'),
        cell("easy", "skipkv+", 64, '{"interval": 32, "tau": 0.85}', "sampled", 2),
    ]
    first = Counting(fleet.ready("reasoner"), limit=5)
    with pytest.raises(ConnectionError):
        sweep_of(bench, first, tmp_path, monkeypatch, parallel=1).run(cells)
    (tmp_path / "trial.jsonl").open("a").write('{"key": "cut off in the mid')
    second = Counting(fleet.ready("reasoner"), limit=99)
    sweep_of(bench, second, tmp_path, monkeypatch).run(cells)
    assert second.enabled == 2 + 2 + 4 - 5

    third = Counting(fleet.ready("reasoner"), limit=0)
    sweep_of(bench, third, tmp_path, monkeypatch).run(cells)
    assert third.enabled == 0
    with (tmp_path / "trial.csv").open(newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert len(rows) == 3
    assert [rows[p]["answers"] for p in ("full", "streaming", "skipkv+")] == ["2", "2", "4"]
    full, streaming = rows["full"], rows["streaming"]
    assert full["right"] == "2" and full["compactions"] == full["evicted_sentences"] == "0"
    assert float(full["peak_kv_tokens"]) == float(full["output_tokens"])
    assert int(streaming["compactions"]) > 8 and int(streaming["peak_kv_tokens_max"]) <= 64 + 33
    assert 64 < float(streaming["mean_kv_tokens"]) < 64 + 32

    # Every number of a row comes from the logged answers.
    answers = sweep_of(bench, third, tmp_path, monkeypatch)._logged()
    tokens = [one["output_tokens"] for key, one in answers.items() if "|streaming|" in key]
    assert float(streaming["output_tokens"]) == pytest.approx(sum(tokens) / 2, abs=0.05)


def test_a_setting_that_changed_is_another_cell(bench: Any) -> None:
    one = bench["lib.sweep"].Cell("easy", "rkv", 64)
    assert len({one, dataclasses.replace(one, kv_budget=65), dataclasses.replace(one)}) == 2


def test_every_policy_has_its_place_in_the_comparison(bench: Any) -> None:
    scored = set(names()) - {"full"}
    orders = (
        bench["accuracy.__main__"].ORDER,
        bench["accuracy.figure"].STYLE,
        bench["report.accuracy_tables"].POLICIES,
    )
    assert all(set(order) == scored for order in orders)


def test_what_a_trace_is_made_of(bench: Any) -> None:
    """Two of five sentences hold a keyword; two repeat an earlier one, in another context."""
    steering, model = bench["steering.__main__"], str(BENCH.parent / "examples" / "wanderer")
    problem = bench["lib.sweep"].Problem("p", "hard", "How many pens does Ann have?\n", 7)
    step, other = "1. Ann: it is given, so Ann = 7.\n\n", "2. This is not about pens.\n\n"
    text = f"{step}Wait, let me check Ann again.\n{step}{other}Wait, let me check Ann again.\n"
    measured = steering.Measures(model, ["p"])(problem, text)
    assert measured["nonexecution_share"] == 2 / 5
    assert 1 / 5 <= measured["similar_share"] <= 2 / 5
    assert steering.Measures(model, [])(problem, text) == {"nonexecution_share": 2 / 5}


def test_a_steered_cell_says_how_strongly(bench: Any) -> None:
    cell = bench["steering.__main__"].SteeredCell
    asked = [cell("hard", "full", steering=s).sampling_params(9, 0)["steering"] for s in (None, 0)]
    assert asked == [False, 0] and asked[1] is not False


def test_figures_are_drawn_from_the_rows(bench: Any, tmp_path: Path) -> None:
    """Two drawings of the same rows are the same file; another number gives another one."""
    figures = bench["accuracy.figure"]
    rows = figures.selected("accuracy", "reasoner", "greedy")
    changed = [dict(row, accuracy="0.01") if row["policy"] == "rkv" else row for row in rows]
    drawn = []
    for number, these in enumerate((rows, rows, changed)):
        figures.plt.rcParams.update(figures.STYLE_PARAMETERS)
        path = tmp_path / f"{number}.svg"
        budget = {"x_label": "budget", "y_label": "right", "interval": True}
        figures.figure(these, path, x=figures.share, y=figures.percent, **budget)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ValueError, match="no rows"):
        figures.selected("accuracy", "no-such-model", "greedy")


@pytest.mark.server
def test_a_round_under_pressure(bench: Any, fleet: Fleet) -> None:
    """The load is what was asked for, and the numbers are read from the server's own log."""
    server = fleet.ready("reasoner")
    arguments = (
        bench["serving.__main__"]
        .parser()
        .parse_args(
            ["--calls", "6", "--tokens", "120", "--prompt-tokens", "20", "--interval", "32"]
        )
    )
    for kv_budget in (None, 32):
        traced = len(read_trace(server.trace_path))
        rate, running, retracted = bench["serving.__main__"].round_of(
            server, arguments, kv_budget, 1
        )
        assert rate > 0 and 3 <= running <= 6 and retracted == 0
        events = read_trace(server.trace_path)[traced:]
        compacted = [event for event in events if event["event"] == "compact"]
        assert len(compacted) == (6 * 2 if kv_budget else 0)  # at 64 and 96 of 120 tokens


def test_the_price_of_a_compaction(bench: Any) -> None:
    """Against steps of 10 ms, one of which takes 34, wherever near the compaction that is."""
    cost_and_step = bench["serving.latency"].cost_and_step
    for shift in range(-2, 3):
        gaps = [10.0] * 60
        gaps[30 + shift] = 34.0
        gaps[10] = 500.0  # somebody else's
        assert cost_and_step(gaps, 30) == (24.0, 10.0)
    assert cost_and_step([10.0] * 60, 30) == (0.0, 10.0)


def test_the_serving_figure_is_drawn_from_the_rows(bench: Any, tmp_path: Path) -> None:
    figure, drawn = bench["serving.figure"], []
    latency = [{"calls": "8", "neighbours": "no budget", "p50_ms": "5.0", "p99_ms": "9.0"}]
    for number, rate in enumerate(("100.0", "100.0", "101.0")):
        pressure = [
            {
                **{"kv_budget": kv_budget, "tokens_per_s_p50": rate, "peak_running": "4"},
                **{"fits_by_arithmetic": "5", "calls": "8", "pool_tokens": "999"},
            }
            for kv_budget in ("", "64")
        ]
        figure.plt.rcParams.update(figure.STYLE_PARAMETERS)
        figure.draw(pressure, latency, tmp_path / f"{number}.svg")
        drawn.append((tmp_path / f"{number}.svg").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]
