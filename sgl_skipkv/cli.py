"""``skipkv doctor`` and ``skipkv trace``."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from importlib import metadata

from rich.console import Console
from rich.table import Table

_PACKAGES = ("sgl-skipkv", "sglang", "torch", "triton", "transformers", "flashinfer-python")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="skipkv", description="A KV budget for SGLang calls.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, platform, seams and what eviction works with")
    trace = commands.add_parser("trace", help="show a trace with evicted tokens struck through")
    trace.add_argument("file", help="written by --skipkv-trace")
    trace.add_argument("--model-path", required=True, help="folder with the model's tokenizer")
    trace.add_argument("--rid", help="request id; default: the last finished request")
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=False)
    if arguments.command == "doctor":
        return doctor(console)
    from sgl_skipkv.viewer import show_trace

    return show_trace(console, arguments.file, arguments.model_path, arguments.rid)


def doctor(console: Console) -> int:
    """Print versions, platform, seams and the capability matrix; 0 if every seam fits."""
    console.print(_versions())
    problems = _seams(console)
    console.print(_capabilities())
    if problems:
        console.print("[bold red]unavailable[/]: " + "; ".join(problems))
        console.print("A server starts and serves; calls with a budget get HTTP 400.")
        return 1
    console.print(
        "[bold green]ready[/] as far as one can tell without a server: each server checks its own "
        "configuration at start and reports it in /server_info and in the log."
    )
    return 0


def _versions() -> Table:
    table = Table(title="versions", title_justify="left", show_header=False)
    for name in _PACKAGES:
        try:
            table.add_row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    table.add_row("python", platform.python_version())
    table.add_row("SGLANG_PLATFORM", os.environ.get("SGLANG_PLATFORM") or "not set")
    from sgl_skipkv.patches.capabilities import platform_name

    table.add_row("platform", platform_name())
    return table


def _seams(console: Console) -> list[str]:
    from sgl_skipkv.patches import seams

    seams.load()
    table = Table("seam", "hook", "state", "why", title="seams", title_justify="left")
    problems = seams.problems()
    for seam in seams.SEAMS:
        own = [problem for problem in problems if f"seam {seam.target} " in problem]
        state = "[red]" + own[0].removeprefix(f"seam {seam.target} ") + "[/]" if own else "ok"
        table.add_row(seam.target, seam.kind, state, seam.why)
    console.print(table)
    return problems


def _capabilities() -> Table:
    from sgl_skipkv.patches.capabilities import CAPABILITIES

    colours = {"yes": "green", "no": "red", "per call": "yellow"}
    table = Table("beside a budget", "supported", "why", title="capabilities", title_justify="left")
    for row in CAPABILITIES:
        table.add_row(row.name, f"[{colours[row.supported]}]{row.supported}[/]", row.why)
    return table
