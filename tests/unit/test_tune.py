"""``skipkv tune`` without a server: what answers are worth, and what the numbers carry."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sgl_skipkv.cli.prompts import Prompt
from sgl_skipkv.cli.server_process import Endpoint, HTTPFailure
from sgl_skipkv.cli.tune import figure, grading
from sgl_skipkv.cli.tune.compare import Comparison, Row, acceptable, equal_tokens, recommended
from sgl_skipkv.cli.tune.intervals import paired_interval, quantile, wilson
from sgl_skipkv.cli.tune.runs import FULL, Output, Run, Runner, Setting
from sgl_skipkv.cli.tune.show import Report, sentences, table

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
Z = quantile(0.975)


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
def test_grading(text: str, answer: Any, right: bool) -> None:
    assert grading.is_right(text, answer) is right


def test_an_error_waits_for_no_other_answer() -> None:
    """The first request is refused while the second one has no answer yet."""
    over, order = threading.Event(), itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if next(order):
                over.wait(60)
            self.send_response(400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}")
        prompts = [Prompt((1,), 7)] * 2
        runner = Runner(endpoint, False, prompts, {}, 8, parallel=2, logprobs=False)
        start = time.monotonic()
        with pytest.raises(HTTPFailure, match="400"):
            runner.run(FULL, lambda _: None)
        assert time.monotonic() - start < 30
        over.set()
        server.shutdown()


def test_equal_tokens() -> None:
    assert equal_tokens([1, 2, 3], [1, 2, 4, 5]) == 2
    assert equal_tokens([1, 2], [1, 2, 3]) == 2 and equal_tokens([], [1]) == 0


def output(right: bool, ids: Sequence[int] = (1, 2, 3, 4), **more: Any) -> Output:
    fields = {"cut_off": False, "mean_kv_tokens": 50.0, "peak_kv_tokens": 90, "compactions": 2}
    text = f"</think>\nAnswer: {7 if right else 8}"
    return Output(text, ids, [-0.5] * len(ids), **{**fields, **more})


def full(n: int, seconds: float = 1.0, right: bool = True) -> Run:
    held = {"mean_kv_tokens": 200.0, "peak_kv_tokens": 400, "compactions": 0}
    return Run(FULL, [output(right, **held) for _ in range(n)], seconds)


def report(
    n: int, lost: Sequence[int], tolerance: float, right: bool = True, **more: Any
) -> Report:
    """Budgets of 100, 200, ... of one policy, each with so many answers lost; ``right`` is whether
    the full cache's are."""
    prompts = [Prompt((1,), 7)] * n
    runs = [
        Run(
            Setting("distinct", 100 * i),
            [output(k >= count, **{"mean_kv_tokens": 50.0 * i, **more}) for k in range(n)],
            0.5,
        )
        for i, count in enumerate(lost, start=1)
    ]
    first, second = (full(n, seconds, right) for seconds in (1.0, 1.25))
    comparison = Comparison(prompts, first, second, 2, timed=True)
    rows = [comparison.row(run) for run in (comparison.first, *runs, comparison.second)]
    return Report(comparison, rows, 400, tolerance)


def test_a_row_is_what_the_outputs_say() -> None:
    (row,) = report(40, [3], 0.1).settings
    assert row.score == pytest.approx(37 / 40) and row.difference == pytest.approx(-3 / 40)
    assert (row.score_low, row.score_high) == wilson(37, 40)
    assert (row.difference_low, row.difference_high) == paired_interval(3, 0, 40, Z)
    assert row.compactions == 80 and row.equal_outputs == 40 and row.logprob_difference == 0
    assert row.tokens_per_s == 320 and row.throughput_ratio == pytest.approx(320 / 144)
    (limited,) = report(40, [0], 0.1, cut_off=True).settings
    assert limited.score == 0 and limited.length_limited == 40


def test_without_a_key_a_score_is_a_share_of_tokens() -> None:
    """And what two full caches do not share is no loss."""
    prompts = [Prompt((1,), None)] * 4
    first = full(4)
    noisy = [replace(one, ids=(1, 2, 3, 9)) for one in first.outputs]
    early = [replace(one, ids=(1, 9), logprobs=[-0.25, -3]) for one in first.outputs]
    comparison = Comparison(prompts, first, replace(first, outputs=noisy), 1, timed=False)
    row = comparison.row(Run(Setting("streaming", 9), early, 1.0))
    assert row.score == 0.25 and row.difference == pytest.approx(-0.5)
    assert row.logprob_difference == pytest.approx(0.25) and row.throughput_ratio is None
    same = comparison.row(Run(Setting("streaming", 9), noisy, 1.0))
    assert same.score == 0.75 and same.difference == 0


def test_a_budget_counts_only_if_every_larger_one_does() -> None:
    found = report(200, [0, 60, 1, 0], 0.1)
    assert [row.kv_budget for row in acceptable(found.settings, 0.1)] == [400, 300]
    chosen = recommended(found.settings, 0.1)
    assert chosen is not None and chosen.kv_budget == 300
    other = [replace(row, policy="streaming", mean_kv_tokens=1.0) for row in found.settings[2:]]
    both: list[Row] = [*found.settings, *other]
    best = recommended(both, 0.1)
    assert best is not None and best.policy == "streaming"


def test_what_evicts_nothing_is_not_recommended() -> None:
    found = report(200, [0, 0], 0.1, compactions=0)
    assert len(acceptable(found.settings, 0.1)) == 2 and found.chosen is None
    assert "only budgets that evict nothing" in " ".join(sentences(found))


def test_the_sentences() -> None:
    """A recommendation says what it does not know; without one there is a reason."""
    text = " ".join(sentences(report(40, [30, 0], 0.1)))
    assert "Recommended: kv_policy distinct, kv_budget 200. 40 of 40 answers right" in text
    assert "no loss was seen, and up to 8.8 points are possible (95%" in text
    assert "cannot tell a loss of up to 8.8 points from none" in text and "189 could" in text
    assert "80 tokens/s" not in text and "128 and 160 tokens/s" in text
    few = " ".join(sentences(report(40, [0], 0.02)))
    assert "No recommendation: keep the full cache, or give more prompts" in few
    assert "2 points (--tolerance-points) takes 189 or more" in few
    lossy = " ".join(sentences(report(40, [30, 9], 0.1)))
    assert "because every budget may lose more than 10 points" in lossy
    assert "nearest is kv_policy distinct, kv_budget 200: 31 of 40 answers right" in lossy
    assert "can show it" not in lossy  # a loss of 22 points is none of 10
    one = " ".join(sentences(report(40, [30, 1], 0.1)))
    assert "-2.5 [-13, +6] points" in one
    assert "about 44 prompts that are not among these can show it: --policies distinct" in one
    assert "--budgets 200 --problems 44" in one
    seen = " ".join(sentences(report(200, [60, 1], 0.1)))
    assert "0.5 points were lost, and up to 2.8 points are possible" in seen


def test_a_full_cache_without_right_answers_shows_nothing() -> None:
    """No budget can lose what the full cache does not have."""
    wrong = report(40, [40], 0.1, right=False)
    assert recommended(wrong.settings, 0.1) is not None and wrong.chosen is None
    text = " ".join(sentences(wrong))
    assert "No recommendation: the full cache itself has 0 of 40 answers right" in text
    assert "check the answers, --suffix and --max-new-tokens" in text
    assert "begins at 0.0%, and a loss of 10 points is tolerated" in text
    assert wilson(7, 40)[0] < 0.1 < wilson(8, 40)[0]
    for k in (7, 8):
        run = replace(full(40), outputs=[output(i < k) for i in range(40)])
        comparison = Comparison([Prompt((1,), 7)] * 40, run, run, 1, timed=True)
        row = comparison.row(replace(run, setting=Setting("distinct", 100)))
        found = Report(comparison, [comparison.row(run), row, row], 400, 0.1)
        assert (found.chosen is row) is (k == 8)


def printed(found: Report, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(found))
    return console.export_text()


def test_the_table() -> None:
    """It fits 80 columns, with and without a key, and nothing of it is cut off."""
    text = printed(report(40, [30, 1], 0.1), 80)
    assert "distinct" in text and "full again" in text and "97.5 [87, 100]" in text
    assert "200  50%" in text and "-2.5 [-13, +6]" in text and "…" not in text
    keyless = Comparison([Prompt((1,), None)] * 40, full(40), full(40), 1, timed=True)
    row = keyless.row(Run(Setting("streaming", 9), full(40).outputs, 1.0))
    rows = [keyless.row(keyless.first), row, keyless.row(keyless.second)]
    text = printed(Report(keyless, rows, 100, 0.1), 80)
    assert "0.0000" in text and "streaming" in text and "…" not in text


def test_the_figure(tmp_path: Path) -> None:
    """The same numbers give the same file, other numbers another one."""
    drawn = []
    for i, lost in enumerate(([9, 0], [9, 0], [9, 3])):
        path = tmp_path / f"{i}.png"
        figure.draw(report(40, lost, 0.1), path)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]
