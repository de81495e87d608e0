"""Invariant 6: ready, unavailable, refused: servers that really start, or really do not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from hostile_bodies import OLLAMA, OPENAI, PATHS, plain_body
from hostile_client import refusal
from servers import HTTPFailure
from tiny_models import VOCAB_SIZE, prompt_ids

from sgl_skipkv import policy
from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.config import METRIC_PREFIX

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_refused_when_asked(fleet: Fleet) -> None:
    """The process ends at start, non-zero, with every reason, and leaves no process behind."""
    refused = fleet.started("refused")
    assert refused.wait_exit() != 0
    last = refused.log.strip().splitlines()[-1]
    assert last.startswith("sgl_skipkv: refused: ")
    assert "page size 8 (supported: 1, 16, 32, 64)" in last and "streaming sessions" in last
    assert "fired up" not in refused.log
    assert refused.wait_gone(20)


def test_ready_without_a_flag(fleet: Fleet) -> None:
    """Every policy: what it needs is allocated by the first request that asks for it."""
    server = fleet.ready("no flags")
    keys = {"kv_budget": 40, "kv_params": {"interval": 16}, "tokens": 80}
    calls = [
        {"input_ids": prompt_ids(i, 20), "kv_policy": name, **keys}
        for i, name in enumerate(policy.names())
    ]
    for call, answer in zip(calls, server.generate_all(calls), strict=True):
        evicts = policy.policy_class(call["kv_policy"]).evicts
        assert (answer["meta_info"]["skipkv"]["evicted_tokens"] > 0) == evicts, call
    server.assert_clean()


def test_weights_that_come_later_are_measured(fleet: Fleet, model_folder) -> None:
    """Each kept set is that of a server that has started with them."""
    calls = [
        {"input_ids": prompt_ids(i, 20), "tokens": 120, "kv_policy": name, **more}
        for i, name in enumerate(["distinct", "distinct", "triattention"])
        for more in [{"kv_budget": 40, "kv_params": {"interval": 16}, "rid": f"late {i}"}]
    ]
    late = fleet.ready("weights later")
    late.generate_all(calls)
    update = {"model_path": str(model_folder("qwen2")), "load_format": "auto"}
    assert late.post("/update_weights_from_disk", update)["success"]
    late.generate([5, 6, 7], 8)  # without a budget: nothing is measured for it
    assert "new weights measured" not in late.log
    found = [late.generate(**{**call, "rid": f"{call['rid']} again"}) for call in calls]
    assert late.log.count("new weights measured") == 1
    expected = fleet.ready("no flags").generate_all(calls)
    for one, other in zip(found, expected, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["meta_info"]["skipkv"] == other["meta_info"]["skipkv"]
    late.assert_clean()
    fleet.stop("weights later")


def test_without_a_tokenizer_in_sglang(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    """``--skip-tokenizer-init``: the plugin reads the vocabulary itself, so requests of token ids
    keep what they keep where SGLang has a tokenizer, whole sentences included."""
    servers = fleet.all_ready("no flags", "no tokenizer")
    without = servers["no tokenizer"]
    keys = {"kv_budget": 48, "kv_params": {"interval": 16}, "tokens": 100}
    calls = [
        {"input_ids": prompt_ids(i, 20), "kv_policy": name, **keys}
        for i, name in enumerate(("distinct", "skipkv", "triattention"))
    ]
    answers, expected = (one.generate_all(calls) for one in (without, servers["no flags"]))
    for answer, other in zip(answers, expected, strict=True):
        assert answer["output_ids"] == other["output_ids"] and "text" not in answer
        assert answer["meta_info"]["skipkv"] == other["meta_info"]["skipkv"]
        assert answer["meta_info"]["skipkv"]["evicted_tokens"] > 0
    assert answers[1]["meta_info"]["skipkv"]["sentences"] > 0
    by_default = without.generate(calls[0]["input_ids"], 100, stop_token_ids=[VOCAB_SIZE - 1])
    assert by_default["output_ids"] == answers[0]["output_ids"]
    for stream in (False, True):
        body = {"input_ids": [3, 4], "sampling_params": {"kv_budget": 0}, "stream": stream}
        assert "kv_budget: expected" in refusal(without, "/generate", body)
    (shown, *_) = without.get("/skipkv/trace?since=0")["requests"]
    assert shown["text"] is None and without.get("/skipkv")
    for server in servers.values():
        server.assert_clean()
    # In APIs that need a tokenizer SGLang itself fails, with a traceback in its log.
    assert main(["doctor", "--url", without.url]) == 0
    assert "budgets arrive in /generate (sampling_params)" in capsys.readouterr().out
    assert without.generate([3, 4, 5], 8)
    fleet.stop(*servers)


def test_several_tokenizer_workers(fleet: Fleet) -> None:
    """Each was told the schedulers' state: budgets, refusals, the explorer and metrics are those of
    one server, whoever answers."""
    server = fleet.ready("tokenizer workers")
    calls = [{"input_ids": prompt_ids(i, 20), "tokens": 80} for i in range(12)]
    own = {"kv_budget": 40, "kv_policy": "skipkv", "kv_params": {"interval": 16}}
    for keys, named in (({}, ("streaming", 48)), (own, ("skipkv", 40))):
        answers = server.generate_all([{**call, **keys} for call in calls])
        summaries = [answer["meta_info"]["skipkv"] for answer in answers]
        assert {(one["policy"], one["kv_budget"]) for one in summaries} == {named}
        assert all(one["evicted_tokens"] > 0 for one in summaries)
    chat = "/v1/chat/completions"
    body = {**plain_body(chat, own), "max_tokens": 80, "ignore_eos": True, "temperature": 0}
    answered = server.post(chat, {**body, "return_meta_info": True})["choices"][0]
    assert answered["meta_info"]["skipkv"]["kv_budget"] == 40
    paths = ("/generate", *OPENAI, *OLLAMA, "/v1/messages")
    for path in paths:
        for _ in range(3):
            with pytest.raises(HTTPFailure, match=r"400.*kv_budget: expected"):
                server.post(path, plain_body(path, {"kv_budget": 0}))
    refused = Scrape(server.get("/metrics")).by(f"{METRIC_PREFIX}refusals_total", "reason")
    assert refused["kv_budget"] == 3 * len(paths)
    for _ in range(4):
        shown = {one["rid"]: one for one in server.get("/skipkv/trace?since=0")["requests"]}
        assert all(shown[answer["meta_info"]["id"]]["text"] for answer in answers)
        info = server.get("/server_info")
        assert info["skipkv"]["reasons"] == [] and "skipkv" not in info["startup_time"]
    assert main(["doctor", "--url", server.url]) == 0
    server.assert_clean()
    fleet.stop("tokenizer workers")


def test_unavailable_when_not_asked(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts and serves; a request with one of our keys gets 400 with the reason."""
    unavailable = fleet.ready("unavailable")
    assert len(unavailable.generate([3, 4, 5], 8)["output_ids"]) == 8
    for keys in ({"kv_budget": 64}, {"kv_policy": "rkv"}, {"kv_params": {}}, {"steering": 1.0}):
        message = refusal(unavailable, "/generate", plain_body("/generate", keys))
        assert "cannot evict (" in message and "page size 8" in message
        assert next(iter(keys)) in message
    for path in (*OPENAI, *OLLAMA, "/v1/messages"):
        with pytest.raises(HTTPFailure, match=r"400.*kv_budget: .* cannot evict \(page size 8"):
            unavailable.post(path, plain_body(path, {"kv_budget": 64}))
        assert unavailable.post(path, plain_body(path, {}))
    assert len(unavailable.generate([3, 4, 5], 8)["output_ids"]) == 8
    assert "sgl_skipkv: unavailable: page size 8" in unavailable.log
    assert unavailable.get("/server_info")["skipkv"]["reasons"]
    metrics = Scrape(unavailable.get("/metrics"))
    states = metrics.by(f"{METRIC_PREFIX}state", "state")
    assert states == {"ready": 0, "unavailable": 1, "refused": 0}
    refused = metrics.by(f"{METRIC_PREFIX}refusals_total", "reason")
    counts = {reason: count for reason, count in refused.items() if count}
    assert counts == {"unavailable": 4 + len((*OPENAI, *OLLAMA, "/v1/messages"))}
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["doctor", "--url", unavailable.url]) == 1
    printed = capsys.readouterr().out
    assert printed.count("arrive, but the server cannot evict: page size 8") == 9
    assert "budgets arrive nowhere" in printed
    unavailable.assert_clean()


WITHOUT_REUSE = (
    "kv_reuse without the radix cache, which keeps the KV (disable_radix_cache)",
    "kv_reuse with KV events, which would publish private keys as token ids",
)


def test_kv_reuse_is_refused_when_asked(fleet: Fleet) -> None:
    refused = fleet.started("reuse refused")
    assert refused.wait_exit() != 0
    last = refused.log.strip().splitlines()[-1]
    assert last.startswith("sgl_skipkv: refused: ")
    assert all(reason in last for reason in WITHOUT_REUSE)
    assert "kv_params.drop_thoughts: the model's vocabulary has no </think>" in last
    assert refused.wait_gone(20)


def test_kv_reuse_is_refused_request_by_request(fleet: Fleet) -> None:
    """Where it is not supported, budgets are served and a request with ``kv_reuse`` gets 400."""
    server = fleet.ready("extracting")
    for mode in ("keep", "budget"):
        for path, stream in itertools.product(PATHS, (False, True)):
            body = plain_body(path, {"kv_budget": 64, "kv_reuse": mode}, stream=stream)
            message = refusal(server, path, body)
            assert message.startswith("kv_reuse: expected false on this server (")
            assert all(reason in message for reason in WITHOUT_REUSE)
    for keys in ({"kv_budget": 64}, {"kv_budget": 64, "kv_reuse": False}):
        info = server.generate([3, 4, 5], 8, **keys)["meta_info"]["skipkv"]
        assert info["kv_budget"] == 64 and "kv_reuse_miss" not in info
    reported = server.get("/server_info")["skipkv"]
    assert reported["reasons"] == [] and len(reported["limits"]["without_reuse"]) == 2
    server.assert_clean()
    fleet.stop("extracting")


ENGINE_SCRIPT = """
    import json, sys
    import sglang as sgl

    def main():
        engine = sgl.Engine(
            model_path=sys.argv[1], dtype="float32", max_total_tokens=2048, log_level="error",
        )
        params = {"max_new_tokens": 90, "temperature": 0, "ignore_eos": True}
        prompt = [5, 6, 7, 8, 9, 10, 11, 12]
        out = {"errors": []}
        def call(ids=prompt, **keys):
            answer = engine.generate(input_ids=ids, sampling_params={**params, **keys})
            return answer["meta_info"].get("skipkv")
        out["default"] = call()
        out["own"] = call(kv_budget=20, kv_policy="random")
        out["off"] = call(kv_policy="full")
        out["custom"] = call(custom_params={"kv_budget": 48})
        keys = ({"kv_budget": 0}, {"kv_budget": 513}, {"kv_policy": "x"}, {"steering": 1.0})
        for keys in (*keys, {"ids": [5, -1]}, {"ids": [5, 6.5]}, {"ids": [[5], [10**6]]}):
            try:
                call(**keys)
            except ValueError as error:
                out["errors"].append(str(error))
        out["after"] = call()
        engine.shutdown()
        print("RESULT " + json.dumps(out))

    if __name__ == "__main__":
        main()
"""


OTHER_ENGINES_SCRIPT = """
    import json, sys, threading
    import psutil
    import sglang as sgl

    def start(**arguments):
        return sgl.Engine(
            model_path=sys.argv[1], dtype="float32", max_total_tokens=2048, log_level="error",
            **arguments,
        )

    def main():
        engine = start(is_embedding=True)
        out = {"embedding": len(engine.encode("a")["embedding"])}
        engine.shutdown()
        refused = threading.Thread(target=start, kwargs={"page_size": 4})
        refused.start()
        refused.join()
        try:
            start(page_size=4)
        except SystemExit:
            out["refused"] = True
        children = psutil.Process().children(recursive=True)
        started = [one for one in children if one.name().startswith("sglang")]
        _, left = psutil.wait_procs(started, timeout=60)  # a killed process takes a while to end
        out["left"] = len(left)
        print("RESULT " + json.dumps(out))

    if __name__ == "__main__":
        main()
"""


def run_engines(script: str, model: Path, folder: Path, **settings: Any) -> tuple[Any, str]:
    """What a script with engines says, and its errors."""
    file = folder / "run_engines.py"
    file.write_text(textwrap.dedent(script))
    run = subprocess.run(
        [sys.executable, "-P", str(file), str(model)],
        cwd=folder,
        env={**os.environ, "SGL_SKIPKV_CONFIG": json.dumps(settings)},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-1000:] + run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT ")), run.stdout + run.stderr


def test_engines_that_cannot_evict(model_folder: Any, tmp_path: Path) -> None:
    """A trainer has others beside the one that the environment is for. One that is refused says so,
    in a thread too, and leaves no process: a thread's would end with it, the main thread's would
    not."""
    out, printed = run_engines(OTHER_ENGINES_SCRIPT, model_folder("qwen2"), tmp_path, kv_budget=32)
    assert out["embedding"] > 0 and out["left"] == 0
    assert out["refused"] and "sgl_skipkv: refused: page size 4 (supported: " in printed


def test_engine_takes_its_settings_from_the_environment(model_folder: Any, tmp_path: Path) -> None:
    """``sgl.Engine`` with a default budget in ``SGL_SKIPKV_CONFIG``: the third way to be ready."""
    settings = {"kv_budget": 32, "kv_policy": "streaming", "kv_interval": 8, "kv_budget_max": 512}
    out, _ = run_engines(ENGINE_SCRIPT, model_folder("qwen2"), tmp_path, **settings)
    assert out["default"] == out["after"]
    assert (out["default"]["policy"], out["default"]["kv_budget"]) == ("streaming", 32)
    assert out["default"]["compactions"] == (89 - 32) // 8
    assert (out["own"]["policy"], out["own"]["kv_budget"]) == ("random", 20)
    assert out["off"]["evicted_tokens"] == 0
    assert (out["custom"]["policy"], out["custom"]["kv_budget"]) == ("streaming", 48)
    fields = [message.split(":")[0] for message in out["errors"]]
    assert fields == ["kv_budget", "kv_budget", "kv_policy", "steering", *["input_ids"] * 3]
    assert all("expected" in m and ", got " in m and "choices" in m for m in out["errors"])
