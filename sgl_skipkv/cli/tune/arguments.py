"""The arguments of ``skipkv tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

#: of the median output of the full cache
SHARES = (0.15, 0.25, 0.35, 0.5)
POLICIES = ("distinct", "streaming")


def add_tune(commands: Any) -> None:
    """Add the command to the parser."""
    tune = commands.add_parser(
        "tune", help="compare policies and budgets on your own prompts, and recommend one"
    )
    tune.set_defaults(run=run_tune)
    tune.add_argument(
        "--model-path",
        required=True,
        help="a model's folder or name; with --url for its tokenizer",
    )
    tune.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help="JSONL: prompt (or problem, or messages), and the right answer, if known",
    )
    tune.add_argument(
        "--problems",
        type=int,
        default=40,
        help="prompts to take, spread evenly over the file; default: %(default)s",
    )
    tune.add_argument("--suffix", default="", help="put after every prompt")
    tune.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        default=list(POLICIES),
        help=f"to compare; default: {' '.join(POLICIES)}",
    )
    sizes = tune.add_mutually_exclusive_group()
    sizes.add_argument("--budgets", nargs="+", type=int, help="in KV tokens")
    sizes.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=list(SHARES),
        help="budgets as shares of the full cache's median output; default: "
        + " ".join(map(str, SHARES)),
    )
    tune.add_argument("--kv-params", default="{}", help="JSON object, for every policy")
    tune.add_argument(
        "--max-new-tokens",
        type=int,
        default=4096,
        help="of one output; default: %(default)s",
    )
    tune.add_argument(
        "--tolerance-points",
        type=float,
        default=10,
        help="most points that a recommended budget may lose, by its interval; default: 10",
    )
    tune.add_argument("--parallel", type=int, help="requests in flight; default: all prompts")
    place = tune.add_mutually_exclusive_group()
    place.add_argument(
        "--server-flags", nargs="*", default=[], help="of the server, as NAME=VALUE, without --"
    )
    place.add_argument("--url", help="a server that runs already; no tokens/s are compared")
    tune.add_argument("--api-key", help="for --url, where the server asks for one")
    tune.add_argument("--figure", type=Path, help="file to draw: .svg, .png or .pdf")
    tune.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_tune(arguments: argparse.Namespace, console: Console) -> int:
    """Compare, print, draw; 1 if the server refused a request or went away."""
    from sgl_skipkv.cli.tune import command  # policies need torch

    return command.run_tune(arguments, console)
