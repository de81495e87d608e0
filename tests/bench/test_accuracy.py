"""Accuracy: figures, and a sweep that goes on after a stop."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from servers import Server

from bench.accuracy import figure
from bench.lib import record, sweep
from bench.lib import serving as lib_serving
from bench.lib.forced import ForcedModel
from bench.lib.sweep import Cell, Sweep
from bench.reasoner.vocabulary import prompt_text


def sweep_of(server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: int = 4) -> Any:
    monkeypatch.setenv(record.FOLDER, str(folder))
    arguments = ["--levels", "easy", "--problems", "2", "--max-new-tokens", "600"]
    parser = argparse.ArgumentParser()
    lib_serving.add_arguments(parser)
    problems = lib_serving.read_problems(parser.parse_args(arguments))
    return Sweep(
        "trial", [server], parallel, problems, 600, folder / "trial.jsonl", {"model": "reasoner"}
    )


class Counting:
    """A real server, and how often it was asked; it goes away after ``limit`` answers."""

    def __init__(self, server: Server, limit: int) -> None:
        self.server, self.limit, self.enabled = server, limit, 0

    def post(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        self.enabled += 1
        if self.enabled > self.limit:
            raise ConnectionError("the server went away")
        return self.server.post(path, body, timeout)


@pytest.mark.server
@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        Cell("easy", "full"),
        Cell("easy", "streaming", 64, '{"interval": 32}'),
        Cell("easy", "skipkv+", 64, '{"interval": 32, "tau": 0.85}', "sampled", 2),
    ]
    first = Counting(fleet.ready("reasoner"), limit=5)
    with pytest.raises(ConnectionError):
        sweep_of(first, tmp_path, monkeypatch, parallel=1).run(cells)
    (tmp_path / "trial.jsonl").open("a").write('{"key": "cut off in the mid')
    second = Counting(fleet.ready("reasoner"), limit=99)
    sweep_of(second, tmp_path, monkeypatch).run(cells)
    assert second.enabled == 2 + 2 + 4 - 5

    third = Counting(fleet.ready("reasoner"), limit=0)
    sweep_of(third, tmp_path, monkeypatch).run(cells)
    assert third.enabled == 0
    rows = {row["policy"]: row for row in record.recorded("trial")}
    assert len(rows) == 3
    assert [rows[p]["answers"] for p in ("full", "streaming", "skipkv+")] == ["2", "2", "4"]
    full, streaming = rows["full"], rows["streaming"]
    assert full["right"] == "2" and full["compactions"] == full["evicted_sentences"] == "0"
    assert float(full["peak_kv_tokens"]) == float(full["output_tokens"])
    assert int(streaming["compactions"]) > 8 and int(streaming["peak_kv_tokens_max"]) <= 64 + 33
    assert 64 < float(streaming["mean_kv_tokens"]) < 64 + 32

    # Every number of a row comes from the logged answers.
    answers = sweep_of(third, tmp_path, monkeypatch)._logged()
    tokens = [one["output_tokens"] for key, one in answers.items() if "|streaming|" in key]
    assert float(streaming["output_tokens"]) == pytest.approx(sum(tokens) / 2, abs=0.05)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(("skipkv+", {}), ("rkv", {"coverage": 0.9}), ("h2o", {"fraction": 0.2}), ("rpc", {})),
        *(("vase", {}), ("triattention", {}), ("expected", {})),
    ],
)
def test_a_forced_trace_is_compacted_as_on_a_server(
    fleet: Fleet, name: str, more: dict[str, Any]
) -> None:
    """A server's greedy answer, given to ``bench.lib.forced`` as the right trace: the same kept
    sets, and no token that it would not have written."""
    forced, server = ForcedModel(lib_serving.BUNDLED), fleet.ready("reasoner")
    line = (lib_serving.BUNDLED / "heldout.jsonl").read_text().splitlines()[-1]
    prompt = forced.tokenizer.encode(prompt_text(json.loads(line)["prompt"])).ids
    parameters = {"interval": 32, **more}
    keys = {"kv_budget": 200, "kv_policy": name, "kv_params": parameters}
    answer = server.generate(prompt, 700, rid=f"forced-{name}", **keys)
    found = forced.run([*prompt, *answer["output_ids"]], len(prompt), keys)
    events = server.events(f"forced-{name}")
    kept = [event["kept"] for event in events if event["event"] == "compact"]
    assert len(kept) > 8 and found.kept == kept and found.wrong == []
    held = answer["meta_info"]["skipkv"]["mean_kv_tokens"]
    assert found.mean_kv_tokens == pytest.approx(held, abs=1)


class Answering:
    """A server that answers at once, and how often it was asked."""

    asked = 0

    def post(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        self.asked += 1
        held = {"mean_kv_tokens": 3, "peak_kv_tokens": 5, "compactions": 0, "evicted_sentences": 0}
        counts = {"prompt_tokens": 7, "completion_tokens": 5}
        info = {"finish_reason": {"type": "stop"}, **counts, "skipkv": held}
        return {"text": "Answer: 1", "meta_info": info}


def test_a_sweep_uses_no_answers_of_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted rows come back from the log, but not where a policy has changed since."""
    server, rows = Answering(), tmp_path / "trial.csv"
    package = tmp_path / "sgl_skipkv"
    (package / "policy").mkdir(parents=True)
    monkeypatch.setattr(sweep, "PACKAGE", package)
    asked = []
    for file in ("policy/one.py", "cli.py", "policy/one.py"):
        (package / file).write_text(f"changed = {len(asked)}")
        sweep.code.cache_clear()
        sweep_of(server, tmp_path, monkeypatch).run([Cell("easy", "full")])
        asked.append(server.asked)
        rows.unlink()
    sweep.code.cache_clear()
    assert asked == [2, 2, 4]


def test_a_setting_that_changed_is_another_cell() -> None:
    one = Cell("easy", "rkv", 64)
    assert len({one, dataclasses.replace(one, kv_budget=65), dataclasses.replace(one)}) == 2


def test_a_figure_has_the_cell_with_the_most_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each share of the trace; a title says where there were fewer, and who ran alone."""
    monkeypatch.setenv(record.FOLDER, str(tmp_path))
    same = {"model": "one", "sampling": "greedy", "level": "chains-long"}
    for problems, policy, kv_budget, tokens in (
        *((20, "full", "", 1000), (20, "rkv", 150, 990), (20, "rkv", 250, 990)),
        *((200, "full", "", 1010), (200, "rkv", 253, 990)),
    ):
        sizes = {"problems": problems, "kv_budget": kv_budget, "output_tokens": tokens}
        record.append_row("trial", {**same, **sizes, "policy": policy})
    full, *rows = sorted(
        figure.selected("trial", "one", "greedy"), key=lambda row: row["kv_budget"]
    )
    assert [full["problems"], *(row["kv_budget"] for row in rows)] == ["200", "150", "253"]
    assert figure.title("chains-long", full, rows, policies=2) == (
        "chains-long, only rkv\n200 problems (20 at 15%),\nmean trace 1,010 tokens"
    )
    assert figure.title("chains-long", full, rows[1:], policies=1) == (
        "chains-long\n200 problems, mean trace 1,010 tokens"
    )


def test_figures_are_drawn_from_the_rows(drawn: Any) -> None:
    """Two drawings of the same rows are the same file; another number gives another one."""
    rows = figure.selected("accuracy", "reasoner", "greedy")
    changed = [dict(row, accuracy="0.01") if row["policy"] == "rkv" else row for row in rows]
    how = {"x": figure.share, "y": figure.percent, "x_label": "budget", "y_label": "right"}
    draw = functools.partial(figure.figure, **how, interval=True)
    files = drawn(draw, rows, rows, changed)
    assert files[0] == files[1] != files[2]
    with pytest.raises(ValueError, match="no rows"):
        figure.selected("accuracy", "no-such-model", "greedy")
