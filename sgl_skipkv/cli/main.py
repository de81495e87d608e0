"""The ``skipkv`` command: doctor, trace, view, tune, report, steering."""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sgl_skipkv.cli import report
from sgl_skipkv.cli.endpoint import check_endpoint
from sgl_skipkv.cli.files import read_json, read_lines
from sgl_skipkv.cli.model_view import show_model
from sgl_skipkv.cli.trace_view import show_trace
from sgl_skipkv.cli.tune.arguments import add_tune
from sgl_skipkv.cli.view import add_view
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.recording.sentences import PRESETS

_PACKAGES = ("sgl-skipkv", "sglang", "torch", "triton", "transformers", "flashinfer-python")
# What this package takes from SGLang's environment and does not install by itself.
_OF_SGLANG = ("sglang", "torch", "transformers", "triton", "safetensors")
_CHOICES = "the environment of your server, or pip install 'sgl-skipkv[sglang]'"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="skipkv", description="A KV budget for SGLang requests.")
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser(
        "doctor", help="versions, platform, hooks and supported SGLang features"
    )
    checks.set_defaults(run=doctor)
    instead = checks.add_mutually_exclusive_group()
    instead.add_argument(
        "--url", help="ask this running server or router instead whether budgets arrive there"
    )
    instead.add_argument(
        "--model", type=Path, help="say of this config.json, or its folder, what would work"
    )
    checks.add_argument("--api-key", help="for --url, where the server asks for one")
    trace = commands.add_parser("trace", help="show a trace with evicted tokens struck through")
    trace.set_defaults(run=show_trace)
    trace.add_argument("file", help="written by --skipkv-trace")
    trace.add_argument("--model-path", required=True, help="folder with the model's tokenizer")
    trace.add_argument("--rid", help="request id; default: the last finished request")
    add_view(commands)
    add_tune(commands)
    reports = commands.add_parser("report", help="estimates for a budget, without a server")
    kinds = reports.add_subparsers(dest="kind", required=True)
    padding = kinds.add_parser("padding", help="budget left after padding in static batches")
    padding.set_defaults(run=report_padding)
    padding.add_argument("file", type=Path, help=".json list of token counts, or .jsonl of prompts")
    padding.add_argument("--tokenizer", help="for .jsonl: folder or name")
    padding.add_argument("--field", default="problem", help="for .jsonl: field with the prompt")
    padding.add_argument("--batch", type=int, default=10, help="prompts per batch")
    padding.add_argument("--kv-budget", type=int, nargs="+", default=[768, 1024, 1260, 1536])
    capacity = kinds.add_parser("capacity", help="how many requests fit a KV pool")
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
    extract = kinds.add_parser("extract", help="extract a steering vector from traces")
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
            str(SettingError(arguments.command, expected, "an environment without it", _CHOICES))
        )


def _table(title: str, *columns: str, **options: Any) -> Table:
    return Table(*columns, title=title, title_justify="left", **options)


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
    table = _table(
        f"{arguments.out}: {execution:,} execution and {nonexecution:,} non-execution thoughts",
        *("layer", "separation", "cosine between halves", "norm", "written"),
    )
    for one in layers:
        numbers = (f"{n:.3f}" for n in (one.separation, one.split_cosine, one.norm))
        table.add_row(str(one.layer), *numbers, "*" if one is chosen else "")
    fewest = min(execution, nonexecution)
    if fewest < steering_extract.FEW_THOUGHTS:
        table.caption = f"[yellow]warning[/]: a class has only {fewest} thoughts"
    console.print(table)


def report_padding(arguments: argparse.Namespace, console: Console) -> None:
    """Print valid budgets of static batches, in file order and sorted by length."""
    tokens = report.read_prompt_tokens(arguments.file, arguments.tokenizer, arguments.field)
    padding = report.padding(tokens, arguments.batch)
    table = _table(
        f"{padding.prompts} prompts, batches of {arguments.batch}: mean padding "
        f"{padding.unsorted_tokens:.2f} tokens in file order, {padding.sorted_tokens:.2f} sorted",
        *("kv_budget", "in file order", "sorted by length", "paged (no padding)"),
    )
    for kv_budget in arguments.kv_budget:
        table.add_row(*map(str, (kv_budget, *padding.valid_budgets(kv_budget), kv_budget)))
    console.print(table)


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
    table = _table(
        f"{arguments.kv_memory_gib} GiB: {pool_tokens:,} KV tokens of {token_bytes:,} bytes",
        *("kv_budget", "KV tokens of a request", "requests at once"),
        *("recording and workspace, MiB", "of the pool"),
    )
    for kv_budget in arguments.kv_budget:
        row_tokens = arguments.prompt_tokens + kv_budget + arguments.interval + 1
        fit = pool_tokens // row_tokens
        # With a one-byte KV cache, queries and sentence vectors have the model's type.
        sizes = fit, ServerConfig(), max(arguments.kv_value_bytes, 2)
        recorded = sum(report.recorded_bytes(config, *sizes).values())
        share = recorded / (pool_tokens * token_bytes)
        cells = f"{recorded / 2**20:,.0f}", f"{share:.1%}"
        table.add_row(str(kv_budget), f"{row_tokens:,}", f"{fit:,}", *cells)
    row_tokens = arguments.prompt_tokens + arguments.output_tokens
    table.add_row("none", f"{row_tokens:,}", f"{pool_tokens // row_tokens:,}", "0", "0.0%")
    console.print(table)


def doctor(arguments: argparse.Namespace, console: Console) -> int:
    """Print versions, platform, hooks and the capability matrix; 0 if every hook applies.

    With a URL: whether budgets arrive there. With a model: whether eviction can work with it.
    """
    if arguments.url is not None:
        return check_endpoint(arguments.url, arguments.api_key, console)
    if arguments.model is not None:
        return show_model(arguments.model, console)
    table = _table("versions", show_header=False)
    for name in _PACKAGES:
        try:
            table.add_row(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    table.add_row("python", platform.python_version())
    table.add_row("SGLANG_PLATFORM", os.environ.get("SGLANG_PLATFORM") or "not set")
    if find_spec("sglang") is None:
        console.print(table)
        console.print(f"[bold red]unavailable[/]: no SGLang here; choices: {escape(_CHOICES)}")
        return 1
    from sgl_skipkv.patches import registry
    from sgl_skipkv.patches.startup.capabilities import CAPABILITIES, platform_name
    from sgl_skipkv.patches.startup.hook_bodies import hook_states

    table.add_row("platform", platform_name())
    console.print(table)

    states, problems = hook_states()
    table = _table("hooks", "hook", "kind", "state", "why")
    for hook, state, text in states:
        cell = Text(text, {"ok": "", "changed": "yellow", "wrong": "red"}[state])
        table.add_row(hook.target, hook.kind, cell, hook.why)
    console.print(table)

    colours = {"yes": "green", "no": "red", "per request": "yellow"}
    table = _table("capabilities", "feature", "supported", "why")
    for row in CAPABILITIES:
        table.add_row(row.name, f"[{colours[row.supported]}]{row.supported}[/]", row.why)
    console.print(table)

    if (untested := registry.opened_for(metadata.version("sglang"))) is not None:
        console.print(f"[bold yellow]warning[/]: {untested}")
    if problems:
        console.print("[bold red]unavailable[/]: " + "; ".join(problems))
        console.print("A server still starts; requests with a budget get HTTP 400.")
        return 1
    console.print(
        "[bold green]ready[/] as far as can be checked without a server: each server checks its "
        "configuration at start and reports its state in /server_info and in the log."
    )
    return 0
