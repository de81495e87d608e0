"""``skipkv trace``: the generated text in the terminal, with evicted tokens struck through."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from sgl_skipkv.cli.files import load_tokenizer
from sgl_skipkv.config import SettingError, brief, name_of, printable
from sgl_skipkv.explorer.events import Compact, Finish
from sgl_skipkv.explorer.text import pieces
from sgl_skipkv.explorer.trace_file import TraceFile


@dataclass(frozen=True)
class FinishedRequest:
    """What is shown of a request.

    Attributes:
        compact: its last compaction that no recomputation undid; None: there is none.
    """

    finish: Finish
    compact: Compact | None

    @property
    def evicted(self) -> set[int]:
        """Generated tokens, counted from 0, whose KV was evicted when the request finished."""
        if self.compact is None:
            return set()
        prompt, kept = self.compact.prompt_tokens, set(self.compact.kept)
        return {i for i in range(self.compact.generated) if i + prompt not in kept}


def add_trace(commands: Any) -> None:
    """Add the command to the parser."""
    trace = commands.add_parser("trace", help="show a trace with evicted tokens struck through")
    trace.set_defaults(run=show_trace)
    trace.add_argument("file", help="written by --skipkv-trace")
    trace.add_argument("--model-path", required=True, help="folder with the model's tokenizer")
    trace.add_argument("--rid", help="request id; default: the last finished request")


def show_trace(arguments: Namespace, console: Console) -> int:
    """Print one finished request of a trace file."""
    request = finished_request(Path(arguments.file), arguments.rid and name_of(arguments.rid))
    show(console, request, load_tokenizer("model-path", arguments.model_path))
    return 0


def finished_request(trace: Path, rid: str | None) -> FinishedRequest:
    """The last request of a trace that has finished, or the last one with this id.

    Raises:
        SettingError: no trace, or no such request in it.
    """
    with TraceFile(trace) as file:
        found = _last_finished(file, rid)
        if file.skipped:
            print(file.skipped, file=sys.stderr)
        if found is not None:
            return found
        rids = (event.rid for event, _ in file.events() if isinstance(event, Finish))
        known = [*dict.fromkeys(deque(rids, maxlen=10))]
    if rid is None or not known:
        choices = "a trace of a request with a budget, once it has finished"
        raise SettingError("file", "at least one finished request", "a trace without one", choices)
    choices = ", ".join(map(brief, known))
    raise SettingError("rid", "a finished request of the trace", rid, choices)


def _last_finished(file: TraceFile, rid: str | None) -> FinishedRequest | None:
    """A client may use an id again, so what a request keeps is forgotten when it finishes."""
    compacts: dict[str, Compact] = {}
    found = None
    for event, _ in file.events(rid):
        if isinstance(event, Compact):
            compacts[event.rid] = event
            continue
        compact = compacts.pop(event.rid, None)
        if isinstance(event, Finish):
            found = FinishedRequest(event, compact)
    return found


def show(console: Console, request: FinishedRequest, tokenizer: Any) -> None:
    """Print a request's text and its eviction summary."""
    styled = console.is_terminal and not console.no_color
    console.print(render(request, tokenizer, mark="" if styled else "~~"))
    finish = request.finish
    budget = "" if finish.kv_budget is None else f", kv_budget {finish.kv_budget}"
    legend = (
        f"[{printable(finish.policy)}{budget}: "
        f"{finish.evicted_tokens} of {finish.full_kv_tokens} tokens evicted, struck through; "
        f"{finish.evicted_sentences} of {finish.sentences} sentences whole, "
        f"peak {finish.peak_kv_tokens} KV tokens]"
    )
    console.print(Text(legend, style="italic"))


def render(request: FinishedRequest, tokenizer: Any, *, mark: str) -> Text:
    """The generated text of one request: evicted tokens dim and struck through, each run of them
    in one line between two ``mark``, for output without styles.
    """
    evicted = request.evicted
    text = Text()
    by_token = enumerate(pieces(tokenizer, request.finish.output_ids))
    for is_evicted, run in groupby(by_token, lambda at: at[0] in evicted):
        words = printable("".join(piece for _, piece in run))
        if is_evicted:
            # Line by line: who reads a file sees where a line's first mark opens.
            marked = re.sub("[^\n]+", lambda line: mark + line[0] + mark, words)
            text.append(marked, style="dim strike")
        else:
            text.append(words)
    return text
