"""A trace in the terminal: the generated text, with what was evicted struck through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from sgl_skipkv.cli.tokenizer_files import load_tokenizer
from sgl_skipkv.request.trace import read_trace


def show_trace(console: Console, path: str, model_path: str, rid: str | None) -> int:
    """Print one finished request of a trace file; 1 if there is none."""
    events = read_trace(path)
    finished = [event for event in events if event["event"] == "finish"]
    chosen = [event for event in finished if rid in (None, event["rid"])]
    if not chosen:
        known = ", ".join(event["rid"] for event in finished[-10:]) or "none"
        console.print(f"rid: expected a finished request, got {rid}; choices: {known}")
        return 1
    finish = chosen[-1]
    own = [event for event in events if event["rid"] == finish["rid"]]
    show(console, own, load_tokenizer("model-path", model_path))
    return 0


def show(console: Console, events: Sequence[dict[str, Any]], tokenizer: Any) -> None:
    """Print one request's text and what it came to."""
    styled = console.is_terminal and not console.no_color
    console.print(render(events, tokenizer, marks=("", "") if styled else ("~~", "~~")))
    console.print(legend(events[-1]))


def evicted_positions(events: Sequence[dict[str, Any]]) -> set[int]:
    """Generated tokens, counted from 0, whose KV was gone when the request finished."""
    gone: set[int] = set()
    for event in events:
        if event["event"] == "recompute":
            gone.clear()
        elif event["event"] == "compact":
            prompt, kept = event["prompt_tokens"], set(event["kept"])
            gone = {i for i in range(event["generated"]) if i + prompt not in kept}
    return gone


def render(
    events: Sequence[dict[str, Any]], tokenizer: Any, *, marks: tuple[str, str] = ("", "")
) -> Text:
    """The generated text of one request: evicted tokens dim and struck through.

    Args:
        events: its trace lines.
        tokenizer: of Transformers.
        marks: around every evicted stretch, for output that has no styles.
    """
    finish = next(event for event in reversed(events) if event["event"] == "finish")
    gone = evicted_positions(events)
    text = Text()
    for is_gone, stretch in groupby(enumerate(finish["output_ids"]), lambda at: at[0] in gone):
        # Token by token: what a stretch decodes to may depend on its neighbours.
        words = "".join(tokenizer.decode([token_id]) for _, token_id in stretch)
        if is_gone:
            text.append(marks[0] + words + marks[1], style="dim strike")
        else:
            text.append(words)
    return text


def legend(finish: dict[str, Any]) -> Text:
    return Text(
        f"[{finish['policy']}, kv_budget {finish.get('kv_budget')}: "
        f"{finish['evicted_tokens']} of {finish['full_kv_tokens']} tokens evicted, struck through; "
        f"{finish['evicted_sentences']} of {finish['sentences']} sentences whole, "
        f"peak {finish['peak_kv_tokens']} KV tokens]",
        style="italic",
    )
