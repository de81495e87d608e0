"""The ``skipkv`` command: doctor, top, trace, view, tune, report, steering."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sgl_skipkv.cli import report
from sgl_skipkv.cli.doctor import CHOICES, doctor
from sgl_skipkv.cli.files import read_json, read_lines
from sgl_skipkv.cli.tables import Column, print_json, table_of
from sgl_skipkv.cli.top import add_top
from sgl_skipkv.cli.trace_view import show_trace
from sgl_skipkv.cli.tune.arguments import add_tune
from sgl_skipkv.cli.view import add_view
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.recording.sentences import PRESETS

# What this package takes from SGLang's environment and does not install by itself.
_OF_SGLANG = ("sglang", "torch", "transformers", "triton", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="skipkv", description="A KV budget for SGLang requests.")
    commands = parser.add_subparsers(dest="command", required=True)
    tables = argparse.ArgumentParser(add_help=False)
    tables.add_argument("--json", action="store_true", help="print JSON instead of tables")
    checks = commands.add_parser(
        "doctor", parents=[tables], help="versions, platform, hooks and supported SGLang features"
    )
    checks.set_defaults(run=doctor)
    instead = checks.add_mutually_exclusive_group()
    instead.add_argument(
        "--url", help="check a running server or router instead: do budgets reach it?"
    )
    instead.add_argument(
        "--model", type=Path, help="check a model instead: its config.json or the folder"
    )
    checks.add_argument("--api-key", help="for --url, where the server asks for one")
    trace = commands.add_parser("trace", help="show a trace with evicted tokens struck through")
    trace.set_defaults(run=show_trace)
    trace.add_argument("file", help="written by --skipkv-trace")
    trace.add_argument("--model-path", required=True, help="folder with the model's tokenizer")
    trace.add_argument("--rid", help="request id; default: the last finished request")
    add_top(commands, tables)
    add_view(commands)
    add_tune(commands)
    reports = commands.add_parser("report", help="estimates for a budget, without a server")
    kinds = reports.add_subparsers(dest="kind", required=True)
    padding = kinds.add_parser(
        "padding", parents=[tables], help="budget left after padding in static batches"
    )
    padding.set_defaults(run=report_padding)
    padding.add_argument("file", type=Path, help=".json list of token counts, or .jsonl of prompts")
    padding.add_argument("--tokenizer", help="for .jsonl: folder or name")
    padding.add_argument("--field", default="problem", help="for .jsonl: field with the prompt")
    padding.add_argument("--batch", type=int, default=10, help="prompts per batch")
    padding.add_argument("--kv-budget", type=int, nargs="+", default=[768, 1024, 1260, 1536])
    capacity = kinds.add_parser(
        "capacity", parents=[tables], help="how many requests fit a KV pool"
    )
    capacity.set_defaults(run=report_capacity)
    capacity.add_argument("--model", type=Path, required=True, help="config.json or its folder")
    capacity.add_argument("--kv-memory-gib", type=float, required=True, help="size of the KV pool")
    capacity.add_argument("--kv-budget", type=int, nargs="+", required=True)
    capacity.add_argument("--interval", type=int, default=128)
    capacity.add_argument("--prompt-tokens", type=int, default=0, help="per request, not shared")
    capacity.add_argument("--output-tokens", type=int, default=16384, help="without a budget")
    capacity.add_argument("--kv-value-bytes", type=int, default=2, choices=(1, 2, 4))
    steering = commands.add_parser("steering", help="create steering vectors")
    kinds = steering.add_subparsers(dest="kind", required=True)
    extract = kinds.add_parser(
        "extract", parents=[tables], help="extract a steering vector from traces"
    )
    extract.set_defaults(run=extract_steering)
    extract.add_argument("--model-path", required=True, help="folder or name")
    source = extract.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="JSONL, prompt or problem per line")
    source.add_argument("--traces", type=Path, help="JSONL, prompt (as sent) and output per line")
    extract.add_argument("-o", "--out", type=Path, required=True, help="safetensors file to write")
    extract.add_argument("--layer", default="auto", help="number, or auto: best separation")
    extract.add_argument("--keywords", nargs="+", help="default: Wait Alternatively again")
    extract.add_argument(
        "--delimiters", default="math", choices=PRESETS, help="tokens that close a sentence"
    )
    extract.add_argument("--thoughts", default="paragraph", choices=("paragraph", "line"))
    extract.add_argument("--take", default="before", choices=("before", "after"))
    extract.add_argument("--max-new-tokens", type=int, default=4096)
    extract.add_argument(
        "--work", type=Path, help="folder for results and resume; default: OUT.work"
    )
    extract.add_argument("--server-flags", nargs="*", default=[], help="as NAME=VALUE, without --")
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments, Console(soft_wrap=False)) or 0
    except SettingError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OF_SGLANG:
            raise
        expected = f"the package {package}, which comes with SGLang"
        parser.error(
            str(SettingError(arguments.command, expected, "an environment without it", CHOICES))
        )


def extract_steering(arguments: argparse.Namespace, console: Console) -> None:
    """Extract a vector, and print its stability by layer."""
    from sgl_skipkv.cli import steering_extract

    run = steering_extract.Extraction(
        arguments.model_path,
        arguments.work or arguments.out.with_suffix(".work"),
        keywords=arguments.keywords or steering_extract.KEYWORDS,
        preset=arguments.delimiters,
        thoughts=arguments.thoughts,
        take=arguments.take,
        server_flags=[f"--{flag}" for flag in arguments.server_flags],
    )
    # Check the output options before a run of hours.
    layer = arguments.layer
    if layer != "auto" and not (layer.isdecimal() and int(layer) < run.layers):
        expected = f"auto or a number in [0, {run.layers - 1}]"
        raise SettingError("layer", expected, layer, "auto tries all of them")
    if not arguments.out.absolute().parent.is_dir():
        choices = "another path, or create the folder"
        raise SettingError("out", "a file in a folder that exists", str(arguments.out), choices)
    if arguments.traces is not None:
        statistics = run.from_traces(read_lines(arguments.traces, "prompt", "output"))
    else:
        lines = read_lines(arguments.prompts)
        prompts = [str(line.get("prompt") or line.get("problem") or "") for line in lines]
        if not all(prompts):
            expected, got = "prompt or problem in every line", str(arguments.prompts)
            raise SettingError("prompts", expected, got, '{"prompt": "..."}')
        statistics = run.from_prompts(prompts, arguments.max_new_tokens)
    nonexecution, execution = statistics.count.tolist()
    layers = run.report()
    best = max(layers, key=lambda layer: layer.separation)
    chosen = best if layer == "auto" else layers[int(layer)]
    run.vector(chosen).save(arguments.out)
    rows = [{**vars(one), "written": one is chosen} for one in layers]
    counts = {"execution_thoughts": execution, "nonexecution_thoughts": nonexecution}
    if arguments.json:
        print_json({"out": str(arguments.out), **counts, "layers": rows})
        return
    names = {"separation": "separation", "split_cosine": "cosine between halves", "norm": "norm"}
    table = table_of(
        f"{arguments.out}: {execution:,} execution and {nonexecution:,} non-execution thoughts",
        (
            Column("layer", "layer"),
            *(Column(name, heading, "{:.3f}".format) for name, heading in names.items()),
            Column("written", "written", lambda written: "*" if written else ""),
        ),
        rows,
    )
    fewest = min(execution, nonexecution)
    if fewest < steering_extract.FEW_THOUGHTS:
        table.caption = f"[yellow]warning[/]: a class has only {fewest} thoughts"
    console.print(table)


def report_padding(arguments: argparse.Namespace, console: Console) -> None:
    """Print valid budgets of static batches, in file order and sorted by length."""
    tokens = report.read_prompt_tokens(arguments.file, arguments.tokenizer, arguments.field)
    padding = report.padding(tokens, arguments.batch)
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
    token_bytes = report.kv_bytes_per_token(config, arguments.kv_value_bytes)
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
        recorded = sum(report.recorded_bytes(config, *sizes).values())
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
