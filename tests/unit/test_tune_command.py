"""The command ``skipkv tune`` without a server: arguments, budgets, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from json_lines import written

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.server_process import Endpoint
from sgl_skipkv.cli.tune import command, figure
from sgl_skipkv.cli.tune.budgets import given_settings, least_tokens, shared_settings
from sgl_skipkv.cli.tune.runs import Setting
from sgl_skipkv.config import SettingError

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"


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
    assert re.sub(r"after \d+ s", "after 0 s", shown.err).splitlines()[:4] == [
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
