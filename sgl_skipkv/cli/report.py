"""``skipkv report``: its arguments, and the tables that it prints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from sgl_skipkv.cli import report_estimates
from sgl_skipkv.cli.files import read_json
from sgl_skipkv.cli.tables import Column, print_json, table_of
from sgl_skipkv.config import ServerConfig, SettingError


def add_report(commands: Any, tables: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    reports = commands.add_parser("report", help="estimates for a budget, without a server")
    kinds = reports.add_subparsers(dest="kind", required=True)
    padding = kinds.add_parser(
        "padding", parents=[tables], help="budget left after padding in static batches"
    )
    padding.set_defaults(run=report_padding)
    padding.add_argument("file", type=Path, help=".json list of token counts, or .jsonl of prompts")
    padding.add_argument("--tokenizer", help="for .jsonl: folder or name")
    padding.add_argument(
        "--field", default="problem", help="for .jsonl: field with the prompt; default: %(default)s"
    )
    padding.add_argument(
        "--batch", type=int, default=10, help="prompts per batch; default: %(default)s"
    )
    padding.add_argument(
        "--kv-budget",
        type=int,
        nargs="+",
        default=[768, 1024, 1260, 1536],
        help="KV tokens of a request, its prompt included; default: 768 1024 1260 1536",
    )
    capacity = kinds.add_parser(
        "capacity", parents=[tables], help="how many requests fit a KV pool"
    )
    capacity.set_defaults(run=report_capacity)
    capacity.add_argument("--model", type=Path, required=True, help="config.json or its folder")
    capacity.add_argument("--kv-memory-gib", type=float, required=True, help="size of the KV pool")
    capacity.add_argument("--kv-budget", type=int, nargs="+", required=True, help="of a request")
    capacity.add_argument(
        "--interval",
        type=int,
        default=128,
        help="tokens between two compactions; default: %(default)s",
    )
    capacity.add_argument(
        "--prompt-tokens", type=int, default=0, help="per request, not shared; default: %(default)s"
    )
    capacity.add_argument(
        "--output-tokens", type=int, default=16384, help="without a budget; default: %(default)s"
    )
    capacity.add_argument(
        "--kv-value-bytes",
        type=int,
        default=2,
        choices=(1, 2, 4),
        help="of one number in the KV cache; default: %(default)s",
    )


def report_padding(arguments: argparse.Namespace, console: Console) -> None:
    """Print valid budgets of static batches, in file order and sorted by length."""
    tokens = report_estimates.read_prompt_tokens(
        arguments.file, arguments.tokenizer, arguments.field
    )
    padding = report_estimates.padding(tokens, arguments.batch)
    headings = {"kv_budget": "kv_budget", "file_order": "in file order"}
    headings |= {"sorted": "sorted by length", "paged": "paged (no padding)"}
    rows = [
        dict(zip(headings, (budget, *padding.valid_budgets(budget), budget), strict=True))
        for budget in arguments.kv_budget
    ]
    if arguments.json:
        print_json({**vars(padding), "batch": arguments.batch, "budgets": rows})
        return
    title = (
        f"{padding.prompts} prompts, batches of {arguments.batch}: mean padding "
        f"{padding.unsorted_tokens:.2f} tokens in file order, {padding.sorted_tokens:.2f} sorted"
    )
    console.print(table_of(title, (Column(*pair) for pair in headings.items()), rows))


def report_capacity(arguments: argparse.Namespace, console: Console) -> None:
    """Print how many requests fit in a KV pool, with each budget and without one: ``pool / row``.

    A row is the most that a request ever holds: its prompt, unless it is shared in the radix cache,
    and ``kv_budget + interval + 1``, or its full output without a budget.
    """
    path = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    config = read_json("model", path, dict, "a model's config.json")
    token_bytes = report_estimates.kv_bytes_per_token(config, arguments.kv_value_bytes)
    pool_tokens = 0
    if 0 < arguments.kv_memory_gib < math.inf:
        pool_tokens = int(arguments.kv_memory_gib * 2**30) // token_bytes
    if pool_tokens < 1:
        expected, got = f"room for a token of {token_bytes:,} bytes", arguments.kv_memory_gib
        raise SettingError("kv-memory-gib", expected, got, "the memory of the KV pool")
    for least, name, *values in (
        (1, "kv-budget", *arguments.kv_budget),
        (8, "interval", arguments.interval),
        (0, "prompt-tokens", arguments.prompt_tokens),
        (1, "output-tokens", arguments.output_tokens),
    ):
        for value in values:
            if value < least:
                raise SettingError(name, f"an integer of {least} or more", value, "tokens")
    rows: list[dict[str, Any]] = []
    for kv_budget in arguments.kv_budget:
        row_tokens = arguments.prompt_tokens + kv_budget + arguments.interval + 1
        fit = pool_tokens // row_tokens
        # With a one-byte KV cache, queries and sentence vectors have the model's type.
        sizes = fit, ServerConfig(), max(arguments.kv_value_bytes, 2)
        recorded = sum(report_estimates.recorded_bytes(config, *sizes).values())
        rows.append({"kv_budget": kv_budget, "kv_tokens": row_tokens, "requests": fit})
        rows[-1] |= {"recorded_bytes": recorded}
    row_tokens = arguments.prompt_tokens + arguments.output_tokens
    rows.append({"kv_budget": None, "kv_tokens": row_tokens, "requests": pool_tokens // row_tokens})
    rows[-1] |= {"recorded_bytes": 0}
    for row in rows:
        row["share"] = row["recorded_bytes"] / (pool_tokens * token_bytes)
    if arguments.json:
        print_json({"pool_tokens": pool_tokens, "token_bytes": token_bytes, "budgets": rows})
        return
    columns = (
        Column("kv_budget", "kv_budget", lambda budget: str(budget or "none")),
        Column("kv_tokens", "KV tokens of a request", "{:,}".format),
        Column("requests", "requests at once", "{:,}".format),
        Column("recorded_bytes", "recording and workspace, MiB", lambda n: f"{n / 2**20:,.0f}"),
        Column("share", "of the pool", "{:.1%}".format),
    )
    title = f"{arguments.kv_memory_gib} GiB: {pool_tokens:,} KV tokens of {token_bytes:,} bytes"
    console.print(table_of(title, columns, rows))
