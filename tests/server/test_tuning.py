"""``skipkv tune`` through a real server: its numbers are those of the requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from fleet import Fleet
from server_parts import REASONER

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.server_process import Endpoint
from sgl_skipkv.cli.tune import command

pytestmark = [pytest.mark.server, pytest.mark.slow]
PARAMS = {"interval": 32}
PROBLEMS = [json.loads(line) for line in (REASONER / "heldout.jsonl").read_text().splitlines()]
LINES = sorted(PROBLEMS, key=lambda line: len(line["prompt"]))[:2]
Tune = Callable[..., tuple[int, str]]


@pytest.fixture
def tune(
    fleet: Fleet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Tune:
    """Run the command on the two shortest problems; its exit status and what it printed."""
    server = fleet.ready("reasoner")
    # Where it starts a server of its own it gets the session's.
    monkeypatch.setattr(command, "ServerProcess", lambda *_, **__: nullcontext(server))
    monkeypatch.setattr(command, "exit_on_sigterm", lambda: None)

    def run(*arguments: str, keyed: bool = True) -> tuple[int, str]:
        file = tmp_path / "prompts.jsonl"
        fields = ("prompt", "answer") if keyed else ("prompt",)
        lines = [json.dumps({name: line[name] for name in fields}) + "\n" for line in LINES]
        file.write_text("".join(lines))
        given = ["--model-path", str(REASONER), "--prompts", str(file), "--policies", "streaming"]
        given += ["--kv-params", json.dumps(PARAMS), "--max-new-tokens", "600", *arguments]
        status = main(["tune", *given])
        return status, capsys.readouterr().out

    return run


def test_the_rows_are_what_the_requests_did(tune: Tune, fleet: Fleet, tmp_path: Path) -> None:
    server, drawn = fleet.ready("reasoner"), tmp_path / "tune.svg"
    status, printed = tune("--budgets", "40", "--json", "--figure", str(drawn))
    found = json.loads(printed)
    assert status == 0 and found["prompts"] == 2 and drawn.stat().st_size > 5000
    first, small, again = found["rows"]
    assert [row["kv_budget"] for row in found["rows"]] == [None, 40, None]
    assert first["score"] == again["score"] == 1 and again["equal_outputs"] == 2
    assert first["compactions"] == 0 and first["mean_kv_tokens"] < found["full_output_tokens_p50"]
    assert small["mean_kv_tokens"] < first["mean_kv_tokens"]
    assert small["peak_kv_tokens"] == 40 + 32 and small["compactions"] > 4
    assert all(row["tokens_per_s"] > 0 for row in found["rows"])
    rates = first["throughput_ratio"] + again["throughput_ratio"]
    assert rates == pytest.approx(2)
    # Two problems show nothing, so nothing is recommended.
    assert found["recommended"] is None and "give more prompts" in found["sentences"][0]

    keys = {"kv_policy": "streaming", "kv_budget": 40, "kv_params": PARAMS}
    held = []
    for line in LINES:
        chat = [{"role": "user", "content": line["prompt"]}]
        body = {"messages": chat, "model": "x", "max_tokens": 600, "temperature": 0, **keys}
        answer = server.post("/v1/chat/completions", {**body, "return_meta_info": True})
        held.append(answer["choices"][0]["meta_info"]["skipkv"]["mean_kv_tokens"])
    assert small["mean_kv_tokens"] == pytest.approx(fmean(held))


def test_without_a_key_and_on_a_running_server(tune: Tune, fleet: Fleet) -> None:
    url = fleet.ready("reasoner").url
    status, printed = tune(
        *("--shares", "0.15", "--max-new-tokens", "150", "--url", url, "--json"), keyed=False
    )
    found = json.loads(printed)
    first, small, again = found["rows"]
    assert status == 0 and found["score"] == "equal tokens"
    assert again["score"] == 1 and again["logprob_difference"] < 1e-3
    assert 0 < small["score"] < 1 and 0 < small["logprob_difference"] < 1
    assert small["kv_budget"] == round(0.15 * found["full_output_tokens_p50"])
    assert {row["tokens_per_s"] for row in found["rows"]} == {None}
    assert first["difference"] == 0 > small["difference"]


def test_what_a_server_refuses_or_drops(
    tune: Tune, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer of a server that cannot evict, and of a router that drops the keys, made from the
    real server's."""
    server = fleet.ready("reasoner")
    post = server.post

    def refusing(path: str, body: Any = None, **more: Any) -> Any:
        if path == "/generate":
            body = {**body, "sampling_params": {**body["sampling_params"], "kv_budget": 0}}
        return post(path, body, **more)

    monkeypatch.setattr(server, "post", refusing)
    status, printed = tune("--budgets", "200")
    assert status == 1 and "refused by the server" in printed and "kv_budget: expected" in printed

    def dropping(path: str, body: Any = None, **more: Any) -> Any:
        if path == "/generate":
            kept = {"temperature": 0, "max_new_tokens": 4}
            body = {**body, "sampling_params": kept}
        return post(path, body, **more)

    monkeypatch.setattr(server, "post", dropping)
    with pytest.raises(SystemExit):
        tune("--budgets", "200")
    assert "url: expected a server where full cache arrives" in capsys.readouterr().err

    def gone(path: str, body: Any = None, **more: Any) -> Any:
        if path == "/generate":
            return Endpoint("http://127.0.0.1:9").post(path, body, **more)
        return post(path, body, **more)

    monkeypatch.setattr(server, "post", gone)
    status, printed = tune("--budgets", "200")
    assert status == 1 and "no answer from the server: nothing listens there" in printed
