"""Every command where SGLang, and what comes with it, is not installed: it works, or says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
# Fresh, because this process has imported all of it; None is a module that cannot be found.
CODE = """
import sys
sys.modules.update(dict.fromkeys(("sglang", "torch", "transformers", "triton", "safetensors")))
from sgl_skipkv.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
MISSING = "expected the package {}, which comes with SGLang, got 'an environment without it'"


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit status, and what was printed."""
    command = [sys.executable, "-P", "-c", CODE, *map(str, arguments)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    counts = ("evicted_tokens", "full_kv_tokens", "evicted_sentences", "sentences")
    numbers = dict.fromkeys((*counts, "peak_kv_tokens"), 0)
    event = {"event": "finish", "rid": "r", "output_ids": [1], "policy": "rkv", **numbers}
    event["prompt_tokens"] = 1
    path.write_text(json.dumps(event) + "\n")
    return path


def test_what_works() -> None:
    status, printed = run("doctor")
    assert status == 1 and "sgl-skipkv[sglang]" in printed
    assert "│ sgl-skipkv │" in printed and "unavailable: no SGLang here" in printed
    capacity = ("capacity", "--model", REASONER, "--kv-memory-gib", "1", "--kv-budget", "256")
    status, printed = run("report", *capacity)
    assert status == 0 and "1.0 GiB: 524,288 KV tokens" in printed


def test_what_says_that_it_needs_it(trace: Path) -> None:
    extract = ("--model-path", REASONER, "--prompts", trace, "-o", trace.with_name("x.safetensors"))
    for package, *command in (
        ("torch", "doctor", "--model", REASONER),
        ("transformers", "trace", trace, "--model-path", REASONER),
        ("safetensors", "steering", "extract", *extract),
        ("torch", "tune", "--model-path", REASONER, "--prompts", trace),
    ):
        status, printed = run(*command)
        assert status == 2, printed
        assert f"{command[0]}: {MISSING.format(package)}; choices: the env" in printed
        assert "Traceback" not in printed
