"""``skipkv steering``: its arguments, and what ``extract`` prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from sgl_skipkv.cli.files import read_lines
from sgl_skipkv.cli.prompts import named, prompt_text
from sgl_skipkv.cli.tables import Column, print_json, table_of
from sgl_skipkv.config import SettingError
from sgl_skipkv.recording.sentences import PRESETS


def add_steering(commands: Any, tables: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    steering = commands.add_parser("steering", help="create steering vectors")
    kinds = steering.add_subparsers(dest="kind", required=True)
    extract = kinds.add_parser(
        "extract", parents=[tables], help="extract a steering vector from traces"
    )
    extract.set_defaults(run=extract_steering)
    extract.add_argument("--model-path", required=True, help="folder or name")
    source = extract.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="JSONL, prompt, problem or messages per line")
    source.add_argument("--traces", type=Path, help="JSONL, prompt (as sent) and output per line")
    extract.add_argument("-o", "--out", type=Path, required=True, help="safetensors file to write")
    extract.add_argument("--layer", default="auto", help="number, or auto: best separation")
    extract.add_argument("--keywords", nargs="+", help="default: Wait Alternatively again")
    extract.add_argument(
        "--delimiters", default="math", choices=PRESETS, help="tokens that close a sentence"
    )
    extract.add_argument(
        "--thoughts",
        default="paragraph",
        choices=("paragraph", "line"),
        help="end at a blank line, or at every delimiter; default: %(default)s",
    )
    extract.add_argument(
        "--take",
        default="before",
        choices=("before", "after"),
        help="hidden state of the delimiter before or after a thought; default: %(default)s",
    )
    extract.add_argument(
        "--max-new-tokens", type=int, default=4096, help="per prompt; default: %(default)s"
    )
    extract.add_argument(
        "--work", type=Path, help="folder for results and resume; default: OUT.work"
    )
    extract.add_argument("--server-flags", nargs="*", default=[], help="as NAME=VALUE, without --")


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
        server_flags=arguments.server_flags,
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
        statistics = run.from_traces(
            [line.record for line in read_lines("traces", arguments.traces, "prompt", "output")]
        )
    else:
        prompts = []
        for line in read_lines("prompts", arguments.prompts):
            with named(line):
                prompts.append(prompt_text(run.tokenizer, line.record))
        statistics = run.from_prompts(prompts, arguments.max_new_tokens)
    nonexecution, execution = statistics.count.tolist()
    layers = run.report()
    best = max(layers, key=lambda layer: layer.separation)
    chosen = best if layer == "auto" else layers[int(layer)]
    run.vector(chosen).save(arguments.out)
    rows = [{**vars(layer), "written": layer is chosen} for layer in layers]
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
