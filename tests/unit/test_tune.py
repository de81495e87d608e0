"""``skipkv tune`` without a server: what the numbers carry, prompts, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.server_process import Endpoint, HTTPFailure
from sgl_skipkv.cli.tune import command, figure, grading
from sgl_skipkv.cli.tune.budgets import given_settings, least_tokens, shared_settings
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
    assert "prompts can show it" not in lossy  # a loss of 22 points is none of 10
    one = " ".join(sentences(report(40, [30, 1], 0.1)))
    assert "-2.5 [-13, +6] points" in one
    assert "about 44 prompts can show it: --policies distinct --budgets 200 --problems 44" in one
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


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(REASONER)


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts(tokenizer: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "p.jsonl", *({"prompt": f"{i} pens", "answer": i} for i in range(9)))
    found, repeated = read_prompts(file, tokenizer, 3)
    assert [one.answer for one in found] == [0, 3, 6] and repeated == 0
    assert len(read_prompts(file, tokenizer, 40)[0]) == 9
    text = prompt_text(tokenizer, {"problem": "3 pens"}, "!")
    assert "3 pens!" in text and text.endswith("<think>\n")
    chat = {"messages": [{"role": "user", "content": "3 pens"}]}
    assert prompt_text(tokenizer, chat, "!") == text
    ids = tokenizer(prompt_text(tokenizer, {"prompt": "3 pens"}), add_special_tokens=False)
    assert list(found[1].ids) == ids["input_ids"]
    keyless = written(tmp_path / "q.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert [one.answer for one in read_prompts(keyless, tokenizer, 2)[0]] == [None, None]


def test_the_same_prompt_counts_once(tokenizer: Any, tmp_path: Path) -> None:
    """Whatever form it is written in; of its lines the first counts."""
    chat = {"messages": [{"role": "user", "content": "3 pens"}], "answer": 4}
    lines = [{"prompt": "3 pens", "answer": 3}, {"problem": "5 pens", "answer": 5}, chat]
    file = written(tmp_path / "p.jsonl", *lines * 20)
    found, repeated = read_prompts(file, tokenizer, 40)
    assert [one.answer for one in found] == [3, 5] and repeated == 58


NO_ROLE = {"messages": [{"content": "x"}]}
HALF = {"messages": [{"role": "user", "content": "\ud800"}]}


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ([{"text": "x"}], "a prompt in every line"),
        ([{"prompt": "x", "answer": 1}, {"prompt": "y"}], "in all lines or none"),
        ([{"prompt": "x", "answer": [1]}], "text or a number"),
        ([{"messages": []}], "messages with role and content"),
        ([{"messages": [{"role": "user"}]}], "messages with role and content"),
        ([NO_ROLE], "messages with role and content"),
        ([{"messages": [{"role": 1, "content": "x"}]}], "messages with role and content"),
        ([{"prompt": "x"}, NO_ROLE], "role and content, got [^ ]+p.jsonl, line 2: "),
        ([{"prompt": "x", "answer": 1}, {"prompt": "y", "answer": " "}], "line 2: ' '"),
        ([{"prompt": "x"}, {"prompt": "a\ud800"}], "UTF-8 can encode, got [^ ]+, line 2: "),
        ([HALF], "UTF-8 can encode, got [^ ]+, line 1: "),
    ],
)
def test_wrong_prompts(tokenizer: Any, tmp_path: Path, lines: list[Any], field: str) -> None:
    with pytest.raises(SettingError, match=f"^prompts: .*{field}"):
        read_prompts(written(tmp_path / "p.jsonl", *lines), tokenizer, 9)


def test_what_a_chat_template_refuses(tmp_path: Path) -> None:
    strict = AutoTokenizer.from_pretrained(REASONER)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = written(tmp_path / "p.jsonl", {"prompt": "x"})
    with pytest.raises(SettingError, match=r"takes \(roles must alternate\), got .*, line 1: "):
        read_prompts(file, strict, 9)


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
        ("--figure /proc/x.svg", "figure"),
        (f"--figure {'x' * 300}.svg", "figure"),
        ('--budgets 14 --kv-params {"count_prompt":true}', "kv_budget"),
        pytest.param(f"--kv-params {'[' * 100_000}", "kv-params", id="kv-params, nested"),
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


def test_a_figure_that_can_be_written(tmp_path: Path) -> None:
    """The check leaves nothing behind, and an old file as it is."""
    old, folder = tmp_path / "old.svg", tmp_path / "folder.svg"
    old.write_text("old")
    folder.mkdir()
    figure.check_figure(tmp_path / "new.svg")
    figure.check_figure(old)
    assert {*tmp_path.iterdir()} == {old, folder} and old.read_text() == "old"
    with pytest.raises(SettingError, match=rf"got {folder}: Is a directory; choices"):
        figure.check_figure(folder)


def test_shares_below_the_smallest_budget() -> None:
    least = least_tokens("streaming", {}, 30)
    assert least == 13 and least_tokens("streaming", {"sink": 9}, 30) == 18
    leasts = {"distinct": 13, "streaming": 21}
    settings, notes = shared_settings(leasts, [0.5, 0.25, 0.24, 0.01], 80)
    names = ["distinct 19", "distinct 20", "distinct 40", "streaming 40"]
    assert [str(setting) for setting in settings] == names
    assert notes[0] == (
        "Left out: share 0.01 with kv_policy distinct, because 1 of 80 tokens (median) are below "
        "its smallest kv_budget, 13."
    )
    assert len(notes) == 4 and "share 0.25 with kv_policy streaming, because 20" in notes[3]
    with pytest.raises(SettingError, match=r"^shares: .* 13 tokens .* output of 40, got \[0.15\]"):
        shared_settings(leasts, [0.15], 40)


def test_budgets_below_what_a_counted_prompt_needs() -> None:
    counted = {"count_prompt": True}
    assert least_tokens("streaming", counted, 30) == 43
    assert given_settings(["streaming"], [43, 43], counted, 30) == [Setting("streaming", 43)]
    with pytest.raises(SettingError, match=r"^kv_budget: expected an integer in \[43, "):
        given_settings(["streaming"], [42], counted, 30)


class Answering(Endpoint):
    """A server whose every answer is right, and of so many tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__("http://127.0.0.1:9")
        self.tokens = tokens

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600) -> Any:
        if body is None:
            return ""
        params = body["sampling_params"]
        held = {"policy": params["kv_policy"], "kv_budget": params.get("kv_budget")}
        held |= {"mean_kv_tokens": 9.0, "peak_kv_tokens": 9, "compactions": 1}
        info = {"skipkv": held, "finish_reason": {"type": "stop"}}
        ids = [1] * self.tokens
        return {"text": "</think>\nAnswer: 7", "output_ids": ids, "meta_info": info}


def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> int | str | None:
    """Run the command with such a server of 80 tokens; its exit status."""
    monkeypatch.setattr(command, "_server", lambda *_: nullcontext(Answering(80)))
    lines = [{"prompt": f"{i % 4} pens", "answer": 7} for i in range(5)]
    given = ["--model-path", str(REASONER), "--prompts", str(written(tmp_path / "p", *lines))]
    try:
        return main(["tune", *given, "--policies", "streaming", *arguments])
    except SystemExit as end:
        return end.code


def test_what_was_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(monkeypatch, tmp_path, "--shares", "0.01", "0.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 4 and [row["kv_budget"] for row in found["rows"]] == [None, 40, None]
    assert f"Left out: 1 line of {tmp_path / 'p'} whose prompt is" in found["sentences"][-2]
    assert "Left out: share 0.01 with kv_policy streaming" in found["sentences"][-1]
    assert tuned(monkeypatch, tmp_path, "--shares", "0.01") == 2
    assert "error: shares: expected one that is 13 tokens or more" in capsys.readouterr().err


def test_an_error_while_drawing_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figure, "_try_to_write", lambda path: None)  # it was writable then
    path = tmp_path / "x.svg"
    path.mkdir()
    assert tuned(monkeypatch, tmp_path, "--figure", str(path)) == 2
    shown = capsys.readouterr()
    assert "full again" in shown.out and "No recommendation" in shown.out
    assert f"error: figure: expected a file that can be written, got {path}: Is a" in shown.err


def test_a_line_per_setting_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(monkeypatch, tmp_path, "--budgets", "20", "30", "--json") == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[:4] == [
        "full cache: 4 prompts",
        *(f"{name}, after 0 s" for name in ("streaming 20 (1 of 3)", "streaming 30 (2 of 3)")),
        "full cache (3 of 3), after 0 s",
    ]
    assert json.loads(shown.out)["prompts"] == 4


@pytest.mark.parametrize("kind", [RuntimeError, TimeoutError])
def test_a_server_that_does_not_start(
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The end of its log is printed, without a traceback."""

    class Ending(Endpoint):
        def wait_ready(self, timeout_s: float) -> None:
            log = "".join(f"line {i} [/x]\n" for i in range(99))
            raise kind(f"the server ended with 2:\n{log}")

    monkeypatch.setattr(command, "ServerProcess", lambda *_, **__: nullcontext(Ending("")))
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)
    file = written(tmp_path / "p.jsonl", {"prompt": "x"}, {"prompt": "y"})
    assert main(["tune", "--model-path", str(REASONER), "--prompts", str(file)]) == 1
    shown, *log = capsys.readouterr().out.splitlines()
    assert shown == "the server did not start: the server ended with 2:"
    assert log[-1] == "line 98 [/x]" and len(log) == 12


def test_the_defaults_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for default in ("distinct streaming", "4096", "40", "0.15 0.25 0.35 0.5", "10"):
        assert f"default: {default}" in shown, default
