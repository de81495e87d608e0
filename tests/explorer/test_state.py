"""What ``state.js`` makes of a request, against the trace's numbers. Skipped without Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sgl_skipkv.explorer.book import Book
from sgl_skipkv.explorer.events import event_of

NODE = shutil.which("node")
SOURCE = Path(__file__).resolve().parents[2] / "sgl_skipkv" / "explorer" / "state.js"
PROMPT, TOKENS, EVICTED = 10, 40, 12

pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js")


def compact(**more: Any) -> dict[str, Any]:
    counts = {"generated": 30, "before": 40, "after": 28, "kept": [*range(10), *range(22, 40)]}
    same = {"event": "compact", "rid": "a", "policy": "rkv", "prompt_tokens": PROMPT}
    return {**same, **counts, **more}


def finish(rid: str = "a", tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    full = max(tokens - 1, 0)
    summary = {"full_kv_tokens": full, "kv_tokens": max(full - EVICTED, 0), "kv_budget": 16}
    same = {"event": "finish", "rid": rid, "policy": "rkv", "prompt_tokens": PROMPT}
    return {**same, "output_ids": [*range(tokens)], **summary, **more}


def evaluated(expression: str, *lines: dict[str, Any]) -> Any:
    """The expression's value, where ``requests`` are those of the trace in its order."""
    book = Book()
    for line in lines:
        event = event_of(line)
        assert event is not None
        book.add(event)
    data = [request.data(None) for request in book]
    code = (
        f"{SOURCE.read_text()}\nconst known = new Map();"
        f"for (const data of {json.dumps(data)}) "
        "known.set(data.number, new TracedRequest(data, known));"
        f"const requests = [...known.values()]; console.log(JSON.stringify({expression}));"
    )
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_end_agrees_with_the_trace() -> None:
    """The token that was sampled last has no KV."""
    end = "requests[0].moment(Infinity)"
    expression = f"[requests[0].held({end}), requests[0].full(Infinity), requests[0].generated]"
    summary = finish()
    held, full, generated = evaluated(expression, compact(), summary)
    assert held == PROMPT + summary["kv_tokens"] and full == PROMPT + summary["full_kv_tokens"]
    assert generated == TOKENS
    points = evaluated("requests[0].line()", compact(), finish())
    assert points == [[0, 10], [30, 40], [30, 28], [40, held]]


def test_until_then_every_fed_token_has_kv() -> None:
    expression = "[requests[0].held(requests[0].moment(30)), requests[0].full(30)]"
    assert evaluated(expression, compact(), finish()) == [28, 40]
    assert evaluated(expression, compact()) == [28, 40], "one that runs"
    assert evaluated("requests[0].full(Infinity)", finish(tokens=0)) == PROMPT


def test_a_request_that_generated_nothing_is_no_turn() -> None:
    """A fork of the frontend language prefills with one."""
    lines = [
        finish("first"),
        finish("fork", 0, continues={"rid": "first", "tokens": PROMPT}),
        *(finish(rid, continues={"rid": "fork", "tokens": PROMPT}) for rid in ("one", "two")),
        finish("next", continues={"rid": "one", "tokens": PROMPT}),
    ]
    assert evaluated("requests.map((one) => one.depth + 1)", *lines) == [1, 2, 2, 2, 3]
