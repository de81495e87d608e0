"""``skipkv view``: a trace as one HTML page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from sgl_skipkv.cli.files import load_tokenizer
from sgl_skipkv.config import SettingError, Unabridged, brief, name_of, why_unopened
from sgl_skipkv.explorer.book import Book, Decode
from sgl_skipkv.explorer.outline import Outline, OutlinedRequest
from sgl_skipkv.explorer.page import page_of
from sgl_skipkv.explorer.text import pieces
from sgl_skipkv.explorer.trace_file import TraceFile

#: requests on a page where none are named
DEFAULT_REQUESTS: Final = 12


def add_view(commands: Any) -> None:
    """Add the command to the parser."""
    view = commands.add_parser(
        "view", help="write a trace as one HTML page: text, KV over time, what lived how long"
    )
    view.set_defaults(run=view_trace)
    view.add_argument("file", help="written by --skipkv-trace")
    view.add_argument(
        "--model-path",
        help="folder with the model's tokenizer; without it the page shows token ids, because a "
        "trace holds no text",
    )
    view.add_argument(
        "--rid",
        nargs="+",
        help=f"request ids, the first four side by side; default: the last {DEFAULT_REQUESTS} "
        "requests, one at a time. Earlier turns that they continue come along",
    )
    view.add_argument("-o", "--out", type=Path, help="file to write; default: FILE.html")


def view_trace(arguments: argparse.Namespace, console: Console) -> int:
    """Write the page, and print where it is."""
    trace = Path(arguments.file)
    out = arguments.out or trace.parent / f"{trace.stem}.html"
    decode = None
    if arguments.model_path is not None:
        decode = partial(pieces, load_tokenizer("model-path", arguments.model_path))
    names = arguments.rid and [name_of(rid) for rid in arguments.rid]
    shown, traced = write_page(trace, out, decode, names)
    what = f"{shown} of {traced} requests" if shown < traced else "all requests"
    told = f"{out} ({what}, {out.stat().st_size / 1e6:.1f} MB)"
    console.print(told, soft_wrap=True, markup=False)
    return 0


def write_page(
    trace: Path, out: Path, decode: Decode | None, rids: Sequence[str] | None = None
) -> tuple[int, int]:
    """Write a page of these requests of a trace, or of its last ones; returns how many it has, of
    how many.

    Raises:
        SettingError: no trace, no such request, or a file that cannot be written or is the trace.
    """
    if _is_same_file(trace, out):
        raise SettingError(
            "out", "another file than the trace", Unabridged(out), "another name, with -o"
        )
    book = Book()
    with TraceFile(trace) as file:
        traced = Outline(file.events()).requests
        chosen = _chosen(traced, rids)
        turns = _with_earlier_turns(chosen)
        for event in file.at(sorted(begin for turn in turns for begin in turn.lines)):
            book.add(event)
        if file.skipped:
            print(file.skipped, file=sys.stderr)
    numbers = {turn.number: request.number for turn, request in zip(turns, book, strict=True)}
    side_by_side = [] if rids is None else [numbers[request.number] for request in chosen]
    requests = [request.data(decode) for request in book]
    page = page_of({"requests": requests, "side_by_side": side_by_side})
    try:
        out.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:
        expected, got = "a file that can be written", Unabridged(f"{out} ({why_unopened(error)})")
        raise SettingError("out", expected, got, "a writable path") from error
    return len(turns), len(traced)


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether both are there and are one file, by whatever names."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one is not there, or no file name
        return False


def _chosen(
    requests: Sequence[OutlinedRequest], rids: Sequence[str] | None
) -> list[OutlinedRequest]:
    """The requests that the page is of, in the order in which they were named."""
    if not requests:
        choices = "a trace of requests with a budget"
        raise SettingError("file", "at least one request", "a trace without one", choices)
    if rids is None:
        return [*requests[-DEFAULT_REQUESTS:]]
    last = {request.rid: request for request in requests}  # a client may use an id again
    for rid in rids:
        if rid not in last:
            known = ", ".join(brief(rid) for rid in [*last][-10:])
            raise SettingError("rid", "a request of the trace", rid, known)
    return [last[rid] for rid in dict.fromkeys(rids)]


def _with_earlier_turns(chosen: Sequence[OutlinedRequest]) -> list[OutlinedRequest]:
    """These and those that they continue, in the order of the trace."""
    turns: dict[int, OutlinedRequest] = {}
    for request in chosen:
        turn: OutlinedRequest | None = request
        while turn is not None and turn.number not in turns:
            turns[turn.number] = turn
            turn = turn.continues
    return [turns[number] for number in sorted(turns)]
