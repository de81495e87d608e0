"""Shows a trace in the terminal: the generated text with evicted tokens struck through."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from sgl_skipkv.cli.files import load_tokenizer
from sgl_skipkv.explorer.text import pieces
from sgl_skipkv.request.trace import read_trace


def add_trace(commands: Any) -> None:
    """Add the command to the parser."""
    trace = commands.add_parser("trace", help="show a trace with evicted tokens struck through")
    trace.set_defaults(run=show_trace)
    trace.add_argument("file", help="written by --skipkv-trace")
    trace.add_argument("--model-path", required=True, help="folder with the model's tokenizer")
    trace.add_argument("--rid", help="request id; default: the last finished request")


def show_trace(arguments: Namespace, console: Console) -> int:
    """Print one finished request of a trace file; returns 1 if there is none."""
    events, rid = read_trace(arguments.file), arguments.rid
    finished = [event["rid"] for event in events if event["event"] == "finish"]
    if not finished or rid not in (None, *finished):
        known = ", ".join(finished[-10:]) or "none"
        console.print(f"rid: expected a finished request, got {rid}; choices: {known}")
        return 1
    chosen = finished[-1] if rid is None else rid
    of_request = [event for event in events if event["rid"] == chosen]
    show(console, of_request, load_tokenizer("model-path", arguments.model_path))
    return 0


def show(console: Console, events: Sequence[dict[str, Any]], tokenizer: Any) -> None:
    """Print a request's text and its eviction summary."""
    styled = console.is_terminal and not console.no_color
    console.print(render(events, tokenizer, mark="" if styled else "~~"))
    finish = events[-1]
    legend = (
        f"[{finish['policy']}, kv_budget {finish.get('kv_budget')}: "
        f"{finish['evicted_tokens']} of {finish['full_kv_tokens']} tokens evicted, struck through; "
        f"{finish['evicted_sentences']} of {finish['sentences']} sentences whole, "
        f"peak {finish['peak_kv_tokens']} KV tokens]"
    )
    console.print(Text(legend, style="italic"))


def evicted_positions(events: Sequence[dict[str, Any]]) -> set[int]:
    """Generated tokens, counted from 0, whose KV was evicted when the request finished."""
    evicted: set[int] = set()
    for event in events:
        if event["event"] == "recompute":
            evicted.clear()
        elif event["event"] == "compact":
            prompt, kept = event["prompt_tokens"], set(event["kept"])
            evicted = {i for i in range(event["generated"]) if i + prompt not in kept}
    return evicted


def render(events: Sequence[dict[str, Any]], tokenizer: Any, *, mark: str = "") -> Text:
    """The generated text of one request: evicted tokens dim and struck through, each run of them
    in one line between two ``mark``, for output without styles.
    """
    finish = next(event for event in reversed(events) if event["event"] == "finish")
    evicted = evicted_positions(events)
    text = Text()
    by_token = enumerate(pieces(tokenizer, finish["output_ids"]))
    for is_evicted, run in groupby(by_token, lambda at: at[0] in evicted):
        words = "".join(piece for _, piece in run)
        if is_evicted:
            # Line by line: who reads a file sees where a line's first mark opens.
            marked = re.sub("[^\n]+", lambda line: mark + line[0] + mark, words)
            text.append(marked, style="dim strike")
        else:
            text.append(words)
    return text
