"""The servers and the problems of an accuracy experiment, and the flags that choose them."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from bench.lib.sweep import Problem, Sweep
from sgl_skipkv.cli.files import read_lines
from sgl_skipkv.cli.prompts import prompt_text
from sgl_skipkv.cli.report_estimates import kv_bytes_per_token
from sgl_skipkv.cli.server_process import Endpoint, ServerProcess, exit_on_sigterm, server_flags

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "examples" / "reasoner"
#: parameters for the bundled model: its traces are a tenth of a real model's, so compactions come
#: more often, and ``tau`` is where its repetitions begin (bench/rows/similarity.csv)
BUNDLED_PARAMS: dict[str, dict[str, Any]] = {"*": {"interval": 32}, "skipkv": {"tau": 0.85}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that every experiment shares."""
    parser.add_argument("--model-path", default=str(BUNDLED), help="folder or name of a model")
    parser.add_argument(
        "--problem-file",
        type=Path,
        default=BUNDLED / "heldout.jsonl",
        help="JSONL: prompt (or problem), answer, and perhaps id, family and level",
    )
    parser.add_argument("--suffix", default="", help="put after every prompt")
    parser.add_argument("--levels", nargs="+", help="of the problem file; default: all of them")
    parser.add_argument("--problems", type=int, default=200, help="at most, per level")
    parser.add_argument("--max-new-tokens", type=int, default=2000)
    parser.add_argument("--parallel", type=int, default=64, help="calls in flight per server")
    parser.add_argument("--servers", type=int, default=1, help="processes, each with the model")
    parser.add_argument("--server-flags", nargs="*", default=[], help="as NAME=VALUE, without --")
    parser.add_argument("--url", nargs="+", help="running servers to use instead")
    parser.add_argument("--rows", help="file of rows; default: this script's name")


def read_problems(arguments: argparse.Namespace) -> dict[str, list[Problem]]:
    """Problems by level, FAMILY-LEVEL where there are families, as prompts of the model's template.

    Raises:
        ValueError: a level that the file does not have.
    """
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_path)
    levels: dict[str, list[Problem]] = defaultdict(list)
    for number, (_, record) in enumerate(read_lines("problem-file", arguments.problem_file)):
        level = str(record.get("level", arguments.problem_file.stem))
        if "family" in record:
            level = f"{record['family']}-{level}"
        text = prompt_text(tokenizer, record, arguments.suffix)
        identity = str(record.get("id", record.get("unique_id", number)))
        if len(levels[level]) < arguments.problems:
            levels[level].append(Problem(identity, level, text, record["answer"]))
    chosen = arguments.levels or sorted(levels)
    if missing := set(chosen) - set(levels):
        raise ValueError(f"--levels: expected some of {sorted(levels)}, got {sorted(missing)}")
    return {level: levels[level] for level in chosen}


def prompts_of(path: Path, level: str, count: int) -> list[str]:
    """Prompts of the first problems of a level, as the file has them."""
    records = (line.record for line in read_lines("problem-file", path))
    return [record["prompt"] for record in records if record.get("level") == level][:count]


def is_bundled(model_path: str) -> bool:
    """Whether it is one of the small models of this repository."""
    return Path(model_path).resolve().parent == BUNDLED.parent


def bytes_per_token(model_path: str) -> int:
    """KV cache of one token on this machine, in bytes."""
    config = AutoConfig.from_pretrained(model_path)
    # Without a GPU the servers of these scripts run in float32 (sgl_skipkv.cli.server_process).
    value_bytes = config.dtype.itemsize if torch.cuda.is_available() else 4
    return kv_bytes_per_token(config.to_dict(), value_bytes)


@contextlib.contextmanager
def sweep_over(arguments: argparse.Namespace, name: str, **options: Any) -> Iterator[Sweep]:
    """A sweep of the problems that the flags name, with its servers ready.

    Args:
        name: of the file of rows, where no flag names another.
        options: of ``Sweep``.
    """
    name, problems = arguments.rows or name, read_problems(arguments)
    labels: dict[str, str | int] = {
        "model": Path(arguments.model_path).name,
        "problem_file": arguments.problem_file.name,
        "kv_bytes_per_token": bytes_per_token(arguments.model_path),
    }
    with servers(arguments) as running:
        yield Sweep(
            name,
            running,
            arguments.parallel,
            problems,
            arguments.max_new_tokens,
            log=ROOT / ".sweep" / f"{name}.jsonl",
            labels=labels,
            **options,
        )


@contextlib.contextmanager
def servers(arguments: argparse.Namespace) -> Iterator[Sequence[Endpoint]]:
    """The servers that the flags name, ready."""
    if arguments.url:
        yield [Endpoint(url) for url in arguments.url]
        return
    flags = ["--max-running-requests", str(arguments.parallel), "--kv-policy", "distinct"]
    if is_bundled(arguments.model_path):
        flags += ["--max-total-tokens", str(2048 * arguments.parallel)]
    flags += server_flags(arguments.server_flags)
    exit_on_sigterm()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = [
            stack.enter_context(
                ServerProcess(
                    arguments.model_path,
                    folder / str(number),
                    [*flags, "--random-seed", str(number)],
                )
            )
            for number in range(arguments.servers)
        ]
        yield [server.wait_ready() for server in started]
