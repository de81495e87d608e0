"""A server with the policy of another package, and one that cannot be used beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hostile_client import refusal
from packages import install, install_example
from servers import Server
from tiny_models import LINE_END_IDS, prompt_ids

from sgl_skipkv.config import METRIC_PREFIX

pytestmark = [pytest.mark.server, pytest.mark.slow]

BUDGET, INTERVAL, OPENING = 40, 16, 2
PARAMETERS = {"interval": INTERVAL, "opening": OPENING, "window": 1, "delimiters": "any-newline"}


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("own-policy")
    packages = folder / "packages"
    packages.mkdir()
    install_example(packages, folder)
    install(packages, "broken", {"own": "broken:Own"}, "raise SystemError('of another package')")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(packages)])
    flags = ["--kv-policy", "openings", "--enable-metrics"]
    run = Server(model_folder("qwen2"), folder / "run", flags, env={"PYTHONPATH": path})
    with run as started:
        yield started.wait_ready(400)


def test_it_evicts_as_its_formula_says(server: Server, oracle) -> None:
    """Several at once: each kept set by hand, and every token under the masking oracle."""
    calls = [
        {
            **{"rid": f"own-{i}", "input_ids": prompt_ids(i, 30 + i), "tokens": 150},
            **{"kv_budget": BUDGET, "kv_params": PARAMETERS},
        }
        for i in range(4)
    ]
    compactions = openings_kept = 0
    for call, answer in zip(calls, server.generate_all(calls), strict=True):
        events = server.events(call["rid"])
        verdict = oracle("qwen2").judge(call["input_ids"], answer["output_ids"], events)
        assert verdict.wrong == [] and answer["meta_info"]["skipkv"]["policy"] == "openings"
        prompt, row = len(call["input_ids"]), [*range(len(call["input_ids"]))]
        for event in (one for one in events if one["event"] == "compact"):
            row += range(row[-1] + 1, prompt + event["generated"])
            ids = answer["output_ids"]
            openings = openings_of(prompt, ids[: event["generated"]]) & {*row}
            *others, newest = row[prompt:]  # the window of one token
            ranked = sorted(others, key=lambda p: (p in openings, p), reverse=True)
            best = {*ranked[: BUDGET - 1], newest}
            assert event["kept"] == [*range(prompt), *sorted(best)]
            openings_kept += len(openings & best)
            row, compactions = event["kept"], compactions + 1
    assert compactions >= 20 and openings_kept >= 40


def openings_of(prompt_tokens: int, output_ids: list[int]) -> set[int]:
    """Positions of the first tokens of closed sentences. A sentence takes in the delimiters behind
    the one that closes it."""
    found, start, closed = set[int](), 0, False
    for i, token in enumerate(output_ids):
        ends = token in LINE_END_IDS
        if closed and not ends:
            start, closed = i, False
        if ends:
            found |= {*range(start, min(start + OPENING, i + 1))}
            closed = True
    return {prompt_tokens + i for i in found}


def test_one_that_cannot_be_used_is_refused_by_name(server: Server) -> None:
    """Its traceback is logged once; the server serves on."""
    for _ in range(3):
        sampling = {"kv_budget": 64, "kv_policy": "own"}
        text = refusal(server, "/generate", {"input_ids": [3, 4], "sampling_params": sampling})
        assert "broken:Own of package broken fails to import, SystemError; see the log" in text
    assert server.log.count("SystemError: of another package") == 1
    assert server.generate([3, 4, 5], 8, kv_budget=64, kv_policy="rkv")["output_ids"]


def test_metrics_know_it(server: Server) -> None:
    server.generate(prompt_ids(9, 20), 80, kv_budget=BUDGET, kv_params=PARAMETERS)
    text = server.get("/metrics")
    assert f"{METRIC_PREFIX}evicted_tokens_total" in text
    line = next(
        line for line in text.splitlines() if "evicted_tokens" in line and "openings" in line
    )
    assert float(line.rpartition(" ")[2]) > 0
