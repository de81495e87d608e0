"""What the plugin costs a server that nobody asked to evict: throughput with it over without it.

    python -m bench.serving.off_cost --model-path examples/reasoner

Two servers of the same configuration run side by side, one with the plugin and one where SGLang
never loads it; the same load goes to the one and the other in turn, so both see the same machine.
The row holds the median of the paired ratios and its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.pairs import START_S, load, measure, parser_of
from sgl_skipkv.cli.server_process import ServerProcess, server_flags


def arguments_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--server-flags", nargs="*", default=[], help="as NAME=VALUE, without --")
    return parser.parse_args(given)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and append the row."""
    flags = ["--max-total-tokens", "16384", *server_flags(arguments.server_flags)]
    model = Path(arguments.model_path).resolve()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        servers = {
            way: stack.enter_context(
                ServerProcess(model, Path(name) / way, flags, environment, captures=True)
            ).wait_ready(START_S)  # one after the other: each sees what memory is left
            for way, environment in (("with", {}), ("without", {"SGLANG_PLUGINS": "none"}))
        }
        ways = {way: load(server, arguments) for way, server in servers.items()}
        metric = "throughput with the plugin loaded and no budget over without the plugin"
        return measure("off_cost", metric, ways, arguments)


if __name__ == "__main__":
    print(run(arguments_of()))
