"""``skipkv tune`` without a server: what the numbers carry, prompts, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.server_process import Endpoint, HTTPFailure
from sgl_skipkv.cli.tune import figure, grading
from sgl_skipkv.cli.tune.compare import Comparison, Row, acceptable, equal_tokens, recommended
from sgl_skipkv.cli.tune.intervals import paired_interval, quantile, wilson
from sgl_skipkv.cli.tune.prompts import Prompt, prompt_text, read_prompts
from sgl_skipkv.cli.tune.runs import FULL, Output, Run, Runner, Setting
from sgl_skipkv.cli.tune.show import Report, sentences, table
from sgl_skipkv.config import SettingError

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


def report(n: int, lost: Sequence[int], tolerance: float, **more: Any) -> Report:
    """Budgets of 100, 200, ... of one policy, each with so many answers lost."""
    prompts = [Prompt((1,), 7)] * n
    runs = [
        Run(
            Setting("distinct", 100 * i),
            [output(k >= count, **{"mean_kv_tokens": 50.0 * i, **more}) for k in range(n)],
            0.5,
        )
        for i, count in enumerate(lost, start=1)
    ]
    comparison = Comparison(prompts, full(n, 1.0), full(n, 1.25), 2, timed=True)
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
    assert "prompts can show it" not in lossy  # a loss of 22 points is none of 10
    one = " ".join(sentences(report(40, [30, 1], 0.1)))
    assert "-2.5 [-13, +6] points" in one
    assert "about 44 prompts can show it: --policies distinct --budgets 200 --problems 44" in one
    seen = " ".join(sentences(report(200, [60, 1], 0.1)))
    assert "0.5 points were lost, and up to 2.8 points are possible" in seen


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


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(REASONER)


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts(tokenizer: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "p.jsonl", *({"prompt": f"{i} pens", "answer": i} for i in range(9)))
    found = read_prompts(file, tokenizer, 3)
    assert [one.answer for one in found] == [0, 3, 6]
    assert len(read_prompts(file, tokenizer, 40)) == 9
    text = prompt_text(tokenizer, {"problem": "3 pens"}, "!")
    assert "3 pens!" in text and text.endswith("<think>\n")
    chat = {"messages": [{"role": "user", "content": "3 pens"}]}
    assert prompt_text(tokenizer, chat, "!") == text
    ids = tokenizer(prompt_text(tokenizer, {"prompt": "3 pens"}), add_special_tokens=False)
    assert list(found[1].ids) == ids["input_ids"]
    keyless = written(tmp_path / "q.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert [one.answer for one in read_prompts(keyless, tokenizer, 2)] == [None, None]


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ([{"text": "x"}], "a prompt in every line"),
        ([{"prompt": "x", "answer": 1}, {"prompt": "y"}], "in all lines or none"),
        ([{"prompt": "x", "answer": [1]}], "text or a number"),
        ([{"messages": []}], "messages with role and content"),
        ([{"messages": [{"role": "user"}]}], "messages with role and content"),
    ],
)
def test_wrong_prompts(tokenizer: Any, tmp_path: Path, lines: list[Any], field: str) -> None:
    with pytest.raises(SettingError, match=field):
        read_prompts(written(tmp_path / "p.jsonl", *lines), tokenizer, 9)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("--problems 1", "problems"),
        ("--parallel 0", "parallel"),
        ("--tolerance-points 0", "tolerance-points"),
        ("--shares 0.5 1.5", "shares"),
        ("--policies none-such", "kv_policy"),
        ("--policies full", "policies"),
        ("--policies rkv rkv", "policies"),
        ("--budgets 2", "kv_budget"),
        ("--kv-params [] ", "kv-params"),
        ("--kv-params {", "kv-params"),
        ('--kv-params {"tau":0.9} --policies distinct', "kv_params.tau"),
        ("--server-flags tp-size", "server-flags"),
        ("--figure x.gif", "figure"),
        ("--figure no/such/folder/x.svg", "figure"),
        ("--url http://127.0.0.1:9", "url"),
    ],
)
def test_wrong_arguments(
    arguments: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named before a server starts."""
    file = written(tmp_path / "p.jsonl", {"prompt": "x"}, {"prompt": "y"})
    command = ["tune", "--model-path", str(REASONER), "--prompts", str(file), *arguments.split()]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert f"error: {field}: expected" in printed, printed


def test_a_figure_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figure, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="sgl-skipkv\\[bench\\]"):
        figure.check_figure(tmp_path / "x.svg")
