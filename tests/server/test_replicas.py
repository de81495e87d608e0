"""Data parallelism, and the real router in front of two real servers of the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import requests
from fleet import Fleet
from hostile_client import refusal
from metric_counts import counts_of_metrics, counts_of_trace, differences
from routers import router
from server_parts import REASONER
from servers import Server

from bench.lib.trace import read_trace
from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.patches.limits import ServerLimits

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROBLEM = json.loads((REASONER / "heldout.jsonl").read_text().splitlines()[0])["prompt"]
TOKENS = 80
DEFAULT_BUDGET = 64  # of the server with two replicas; the other server has none
BUDGET, INTERVAL = 40, 8
KEYS = {"kv_budget": BUDGET, "kv_policy": "streaming", "kv_params": {"interval": INTERVAL}}
METADATA = {name: v if isinstance(v, str) else json.dumps(v) for name, v in KEYS.items()}
GREEDY = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(fleet: Fleet) -> Iterator[dict[str, Server]]:
    running = fleet.all_ready("replicas", "reasoner")
    yield running
    for server in running.values():
        server.assert_clean()
    fleet.stop("replicas")


@pytest.fixture(scope="module")
def replicas(servers: dict[str, Server]) -> Server:
    return servers["replicas"]


@pytest.fixture(scope="module")
def routed(servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    urls = [server.url for server in servers.values()]
    with router(urls, tmp_path_factory.mktemp("router")) as url:
        yield url


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = requests.post(url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def events_of(rid: str, *servers: Server) -> dict[str, list[dict[str, Any]]]:
    """The lines of one request in the trace files that have any, by the files' names."""
    lines = {file: read_trace(file) for server in servers for file in server.trace_files}
    found = {file.name: [one for one in all if one["rid"] == rid] for file, all in lines.items()}
    return {name: events for name, events in found.items() if events}


def chat_body(**keys: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROBLEM}]
    body = {"model": str(REASONER), "messages": messages, "max_tokens": TOKENS, "temperature": 0}
    return {**body, "ignore_eos": True, **keys}


def assert_kept(events: list[dict[str, Any]], budget: int) -> None:
    """Every compaction left the budget, and the last line is the request's end."""
    *compactions, finish = events
    assert finish["event"] == "finish" and finish["kv_budget"] == budget
    assert len(compactions) == finish["compactions"] == (TOKENS - 1 - budget) // INTERVAL
    assert {one["after"] - one["prompt_tokens"] for one in compactions} == {budget}


def test_a_replica_has_its_own_trace_and_metrics(servers: dict[str, Server]) -> None:
    replicas, single = servers["replicas"], servers["reasoner"]
    reported = replicas.get("/server_info")["skipkv"]
    limits = asdict(ServerLimits(has_thoughts=True)) | {"without_reuse": []}
    given = {"kv_budget": 64, "kv_policy": "streaming", "kv_interval": 8, "explorer": True}
    assert reported.pop("settings") == {**given, "trace": str(replicas.trace_path)}
    assert reported == {"reasons": [], "limits": limits}
    names = [file.name for file in replicas.trace_files]
    assert names == ["trace.dp0.jsonl", "trace.dp1.jsonl"]
    body = {"text": PROBLEM, "sampling_params": {**GREEDY, **KEYS}}
    expected = single.post("/generate", body)["output_ids"]
    for rank in (0, 0, 1):
        answer = replicas.post("/generate", {**body, "routed_dp_rank": rank})
        assert answer["output_ids"] == expected
        ((name, events),) = events_of(answer["meta_info"]["id"], replicas).items()
        assert name == f"trace.dp{rank}.jsonl"
        assert_kept(events, BUDGET)
    compactions = {0: 0.0, 1: 0.0}
    for line in replicas.get("/metrics").splitlines():
        if line.startswith("sglang:skipkv_compactions_total{"):
            (rank,) = (rank for rank in compactions if f'dp_rank="{rank}"' in line)
            compactions[rank] += float(line.split()[-1])
    assert compactions[0] == 2 * compactions[1] > 0


def test_top_adds_up_replicas(
    servers: dict[str, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """And they count what their traces do. The other server was started without metrics."""
    replicas, single = servers["replicas"], servers["reasoner"]
    replicas.wait_idle()
    counts = counts_of_metrics(Scrape(replicas.get("/metrics")))
    assert differences(counts_of_trace(replicas.trace_files), counts) == [] and counts
    command = ["top", "--once", "--json", "--interval", "0.2", "--url"]
    assert main([*command, replicas.url]) == 0
    look = json.loads(capsys.readouterr().out)
    assert look["states"] == {"ready": 2}
    with pytest.raises(SystemExit):
        main([*command, single.url])
    assert "start it with --enable-metrics" in capsys.readouterr().err


def test_the_explorer_shows_all_replicas(replicas: Server) -> None:
    body = {"text": PROBLEM, "sampling_params": {**GREEDY, **KEYS}}
    answers = {
        f"dp{rank}": replicas.post("/generate", {**body, "routed_dp_rank": rank}) for rank in (0, 1)
    }
    assert "<title>KV cache explorer</title>" in replicas.get("/skipkv")
    shown = replicas.get("/skipkv/trace?since=0,0")
    for source, answer in answers.items():
        rid = answer["meta_info"]["id"]
        (request,) = [one for one in shown["requests"] if one["rid"] == rid]
        assert request["source"] == source and request["ids"] == answer["output_ids"]
        assert "".join(request["text"]).strip() == answer["text"].strip()
        assert len(request["steps"]) == answer["meta_info"]["skipkv"]["compactions"] > 0
    assert replicas.get(f"/skipkv/trace?since={shown['cursor']}")["requests"] == []


def test_replicas_check_keys_and_give_defaults(replicas: Server) -> None:
    body = {"text": PROBLEM, "sampling_params": GREEDY}
    wrong = {**body, "sampling_params": {**GREEDY, "kv_budget": 0}}
    assert refusal(replicas, "/generate", wrong).startswith("kv_budget: expected ")
    for rank in (0, 1):
        answer = replicas.post("/generate", {**body, "routed_dp_rank": rank})
        assert answer["meta_info"]["skipkv"]["kv_budget"] == DEFAULT_BUDGET


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_metadata_passes_the_router(servers: dict[str, Server], routed: str, path: str) -> None:
    body = chat_body()
    if path == "/v1/responses":
        # Without ``stream`` the router sends null, which SGLang refuses. SGLang keeps two tokens.
        body = {"model": str(REASONER), "input": PROBLEM, "max_output_tokens": TOKENS + 2}
        body |= {"temperature": 0, "stream": False}
    places = set()
    for _ in range(2):  # one for each server
        rid = post(routed, path, {**body, "metadata": METADATA})["id"]
        ((name, events),) = events_of(rid, *servers.values()).items()
        assert_kept(events, BUDGET)
        places.add(name.partition(".")[2].startswith("dp"))
    assert places == {True, False}


def test_the_router_drops_keys_elsewhere_and_defaults_act(
    servers: dict[str, Server], routed: str
) -> None:
    """As docs/distributed.md says: in /generate a server's default is what acts."""
    for path, body in (
        ("/generate", {"text": PROBLEM, "sampling_params": {**GREEDY, **KEYS}}),
        ("/v1/chat/completions", chat_body(**KEYS)),
    ):
        found = []
        for _ in range(2):
            answer = post(routed, path, body)
            rid = answer["id"] if "id" in answer else answer["meta_info"]["id"]
            found.append(events_of(rid, *servers.values()))
        (events,) = (events for one in found for events in one.values())
        assert_kept(events, DEFAULT_BUDGET)


def test_doctor_tells_apart_where_budgets_arrive(
    servers: dict[str, Server],
    routed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def rows(url: str) -> dict[str, str]:
        assert main(["doctor", "--url", url]) == 0
        printed = capsys.readouterr().out
        cells = [[c.strip() for c in line.split("│")[1:-1]] for line in printed.splitlines()]
        return {f"{row[0]} {row[1]}": row[2] for row in cells if row}

    direct = rows(servers["replicas"].url)
    assert len(direct) == 9 and set(direct.values()) == {"arrive"}
    chat, responses = "/v1/chat/completions", "/v1/responses"
    for found in (rows(routed), rows(routed)):
        dropped = {place for place, text in found.items() if text.startswith("dropped")}
        assert dropped == {
            "/generate sampling_params",
            f"{chat} top level",
            f"{responses} top level",
        }
        assert found[f"{chat} metadata"] == found[f"{responses} metadata"] == "arrive"
        assert found["/api/chat options"] == "not served"
        default = f"with the server's default of {DEFAULT_BUDGET}"
        assert found["/generate sampling_params"].endswith((default, "without a budget"))
