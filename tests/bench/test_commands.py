"""Every script of ``bench/`` runs from its command line to its end, with its smallest arguments.

Where a script starts servers of its own it gets one that the session has: its load is real.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from release import gpu

from bench.lib import device_clock, record
from bench.lib import serving as lib_serving
from bench.lib.serving import ROOT
from bench.serving import latency, off_cost
from examples import demo
from sgl_skipkv.cli import server_process

# A script is run anew although tests have imported it.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning"),
]
Run = Callable[..., int]
#: {out} is an empty folder, {traces} a file of one trace
ALONE = {
    "accuracy.figure": "--out {out}",
    "accuracy.forced": "--model-path {reasoner} --families chains --sizes short --problems 1 "
    "--policies streaming rkv --shares 0.5 --workers 1",
    "accuracy.heads": "--levels easy --problems 1 --workers 1",
    "accuracy.signals": "--problems 1",
    "accuracy.parts": "--models reasoner --variants 'no endings' --problems 1 --workers 1",
    "accuracy.layers": "--traces {traces} --kv-budget 64 --every 64",
    "accuracy.needed_tokens": "--problems 1",
    "conversation.figure": "--out {out}/conversation.svg",
    "decode": "--device cpu --lengths 64 --measurements 1 --memory-gib 0.0004",
    "decode.figure": "--out {out}/decode.svg",
    "decode.floors": "--copy-tb-per-s 1 --bf16-tflop-per-s 500 --size tiny --lengths 100 "
    "--kv-budgets 24 --interval 16 --batches 3 6",
    "kernels": "--device cpu --shapes tiny --repeats 2",
    "kernels.compile": "--kernels ring_write --architectures 90",
    "kernels.floors": "--copy-tb-per-s 2 --bf16-tflop-per-s 500 --fp32-tflop-per-s 50",
    "public.forced": "--model-path {reasoner} --kinds prose --policies streaming --kv-budgets 512 "
    "--workers 1",
    "reasoner.check_families": "--model-path {reasoner} --families chains --sizes short "
    "--problems 2",
    "reasoner.similarity": "--problems 1",
    "reasoner.steering_prompts": "--problems 1",
    "reasoner.unseen": "",
    "reasoner.train": "--out {out} --steps 1 --batch-tokens 1024 --start {reasoner} "
    "--learn conversations",
    "report": "--check",
    "report.packages": "--out {out}/packages.svg",
    "serving.compaction_cost": "--policies streaming tova --kv-budget 64 --rounds 2",
    "serving.figure": "--out {out}/serve.svg",
    "serving.shapes": "{out}/model",
    "steering.figure": "--out {out}",
    "steering.without_checks": "--problems 1 --model-path {reasoner}",
}
_FEW = "--levels easy --problems 1 --max-new-tokens 100 --url {url}"
_PAIRS = "--rounds 2 --calls 2 --tokens 8"
SERVED = {
    "accuracy": f"{_FEW} --policies streaming --shares 0.5 --sampling greedy",
    "accuracy.ablations": f"{_FEW} --only interval",
    "accuracy.batch_size": f"{_FEW} --trace {{trace}}",
    "accuracy.demo": "--problems 1",
    "accuracy.peer": f"{_FEW} --peer-python {{peer}} --budgets 64",
    "accuracy.tune": "--url {url} --problems 2 --policies streaming --shares 0.5 "
    "--max-new-tokens 60",
    "conversation": "--conversations 2 --turns 2 --policies streaming --kv-budgets 48 --crowd 2 "
    "--max-new-tokens 8 --rounds 2 --reply-tokens 8 --pressure-rounds 2",
    "serving": "--only pressure latency compaction ample --calls 2 --parallel 2 --tokens 120 "
    "--rounds 2 --kv-budgets 48 --interval 16 --compaction-budget 48 --compaction-calls 2",
    "serving.off_cost": f"--model-path {{reasoner}} {_PAIRS}",
    "steering.cost": f"--model-path {{wanderer}} {_PAIRS}",
    "steering": f"{_FEW} --model-path {{wanderer}} --compared 1 --only strength "
    "--alphas 0.1 --gammas 0",
}
#: what cannot even start here, and why
ELSEWHERE = {
    "explorer": "needs a browser: tests/explorer/test_in_browser.py runs it",
    "explorer.figure": "needs a browser: tests/explorer/test_in_browser.py runs it",
    "accuracy.parity": "compares with kvpress itself: no stand-in can have its scores",
    "accuracy.parity_kvpress": "run by accuracy.parity in an environment that has kvpress",
    "accuracy.peer_kvpress": "run by accuracy.peer in an environment that has kvpress",
    "public.model": "needs a GGUF file: tests/bench/test_public.py writes one and runs it",
}
#: reads the rows of the repository
READERS = ("accuracy.figure", "conversation.figure", "report", "serving.figure", "steering.figure")
#: stands in for kvpress: as many answers as there are jobs
PEER = """#!/bin/sh
cat > /dev/null
for job in none SnapKVPress KnormPress; do
    echo '{"answers": ["</think> Answer: 7"], "tokens": 9, "seconds": 1.0}'
done
"""


def test_every_script_is_run() -> None:
    """Modules below ``bench`` that run by themselves."""
    folder = ROOT / "bench"
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if '\nif __name__ == "__main__":' in path.read_text()
    }
    scripts = {name.removesuffix(".__main__") for name in found}
    assert scripts == {*ALONE, *SERVED, *ELSEWHERE}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script in this process, to its exit status; what it writes goes to a folder apart."""
    monkeypatch.setitem(device_clock.SIZES, "cpu", (1 << 20, 64))
    monkeypatch.setattr(lib_serving, "ROOT", tmp_path)
    examples = {name: ROOT / "examples" / name for name in ("reasoner", "wanderer")}

    def script(name: str, arguments: str, **places: object) -> int:
        if name in READERS:
            monkeypatch.delenv(record.FOLDER, raising=False)
        else:
            monkeypatch.setenv(record.FOLDER, str(tmp_path))
        given = shlex.split(arguments.format(out=tmp_path / "out", **examples, **places))
        monkeypatch.setattr(sys, "argv", [name, *given])
        try:
            runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return script


@pytest.mark.parametrize("name", ALONE)
def test_a_script_runs(run: Run, tmp_path: Path, name: str) -> None:
    ids = [token % 50 + 5 for token in range(200)]
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt_ids": ids[:9], "output_ids": ids}))
    if name == "decode.figure":
        run("decode", ALONE["decode"])
    assert run(name, ALONE[name], traces=traces) == 0


def test_what_make_gpu_asks_of_scripts(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU's time is for a flag that does not exist, or a test file that was renamed."""
    flags: dict[str, set[str]] = {}
    for _, (python, *command) in gpu.STEPS.values():
        for part in command:
            assert not part.startswith("tests/") or (ROOT / part).is_file(), part
        if python == "python" and command[1].startswith("bench."):
            module = command[1].removeprefix("bench.")
            flags.setdefault(module, set()).update(re.findall(r" (--\S+)", " ".join(command)))
    assert {*flags} == {"kernels", "decode", "serving", "serving.off_cost"}
    for module, asked in flags.items():
        assert run(module, "--help") == 0
        known = {*re.findall(r"--[a-z-]+", capsys.readouterr().out)}
        assert asked <= known, (module, asked - known)


@pytest.mark.server
@pytest.mark.parametrize("name", SERVED)
def test_a_script_with_a_server_runs(
    run: Run, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server = fleet.ready("wanderer" if name.startswith("steering") else "reasoner")

    def lent(*_: object, **__: object) -> Any:
        return nullcontext(server)

    for module in (server_process, off_cost, latency):
        monkeypatch.setattr(module, "ServerProcess", lent)
    traced = nullcontext((server, server.trace_path))
    monkeypatch.setattr(latency, "_traced_server", lambda *_: traced)
    monkeypatch.setattr(demo, "BUDGETS", (256,))
    peer = tmp_path / "peer"
    peer.write_text(PEER)
    peer.chmod(0o755)
    places = {"url": server.url, "trace": server.trace_path, "peer": peer}
    assert run(name, SERVED[name], **places) == 0
    assert list(tmp_path.glob("*.csv")), "no rows"
