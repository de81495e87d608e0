"""What the explorer's page is told of a trace: when each token was evicted, who continues whom."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sgl_skipkv.explorer.book import LIMIT_TOKENS, Book
from sgl_skipkv.explorer.events import event_of
from sgl_skipkv.explorer.live import LiveTrace
from sgl_skipkv.explorer.tail import TraceTail
from sgl_skipkv.explorer.text import pieces

MODEL = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
PROMPT = 10
POLICY = {"rid": "a", "policy": "rkv", "prompt_tokens": PROMPT}


def compact(generated: int, kept: list[int], before: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"generated": generated, "before": before, "after": len(kept), "kept": kept}
    return {"event": "compact", **POLICY, **counts, "evicted_sentences": [], **more}


def finish(tokens: int, **more: Any) -> dict[str, Any]:
    return {"event": "finish", **POLICY, "output_ids": [*range(tokens)], **more}


def book_of(*events: dict[str, Any], limit: int | None = None) -> Book:
    book = Book(limit)
    for line in events:
        event = event_of(json.loads(json.dumps(line)))
        if event is not None:
            book.add(event)
    return book


def unpacked(runs: list[int]) -> list[int]:
    lengths, steps = runs[::2], runs[1::2]
    return [step for n, step in zip(lengths, steps, strict=True) for _ in range(n)]


def test_when_each_token_was_evicted() -> None:
    """Random compactions, against the sets of the trace themselves."""
    draw, events, live, expected, read = random.Random(3), [], list[int](), {}, 0
    for step, generated in enumerate(range(20, 200, 12), start=1):
        live += range(read, PROMPT + generated)
        read = PROMPT + generated
        kept = sorted({*range(PROMPT), *draw.sample(live, len(live) // 2)})
        expected |= {position: step for position in live if position not in set(kept)}
        events.append(compact(generated, kept))
        live = kept
    (request,) = book_of(*events, finish(200))
    (life,) = request.data(None)["lives"]
    found = {p: step for p, step in enumerate(unpacked(life["evicted"])) if step}
    assert found == expected and len(expected) > 50
    assert all(a != b for a, b in pairwise(life["evicted"][1::2])), "runs are as long as can be"


def test_a_recomputation_begins_another_life() -> None:
    again = {"event": "recompute", "rid": "a", "generated": 9}
    first, second = compact(8, [*range(12)]), compact(9, [*range(10), 18])
    (request,) = book_of(first, again, second, finish(12))
    lives = request.data(None)["lives"]
    assert [life["first"] for life in lives] == [0, 1] and lives[1]["generated"] == 9
    assert unpacked(lives[0]["evicted"]) == [0] * 12 + [1] * 6
    assert unpacked(lives[1]["evicted"]) == [0] * 10 + [2] * 8 + [0]


def test_a_turn_knows_the_one_that_it_continues() -> None:
    """By request ids; one that a client uses again is another request."""
    other = {"rid": "b", "continues": {"rid": "a", "tokens": 14}, "kv_reuse": "keep"}
    book = book_of(finish(3), finish(5), {**finish(4), **other}, compact(3, [1]))
    first, second, turn, running = book
    assert turn.continues == second.number and first.rid == second.rid == running.rid
    shown = turn.data(None)
    assert shown["continues"] == {"rid": "a", "tokens": 14, "number": second.number}
    assert [request.data(None)["finished"] for request in book] == [True, True, True, False]


def test_similar_sentences_and_the_summary_arrive() -> None:
    spans, similar = [[10, 14], [14, 18]], [[22, 26, 0.97], None]
    event = compact(20, [*range(10)], evicted_sentences=spans, similar=similar)
    (request,) = book_of(event, finish(20, kv_budget=8, sentence_spans=spans, peak_kv_tokens=9))
    shown = request.data(lambda ids: [str(i) for i in ids])
    assert shown["similar"] == [[10, 22, 26, 0.97]]
    assert shown["sentences"] == [(10, 14), (14, 18)] and shown["budget"] == 8
    assert shown["text"][3] == "3" and shown["summary"]["peak_kv_tokens"] == 9


def test_more_than_a_page_can_show_is_left_out() -> None:
    far = 1 << 50  # would be a petabyte of positions
    event = compact(far, [0, far])
    (request,) = book_of(event, finish(LIMIT_TOKENS + 5))
    shown = request.data(None)
    assert len(unpacked(shown["lives"][0]["evicted"])) == LIMIT_TOKENS == len(shown["ids"])
    assert shown["tokens"] == LIMIT_TOKENS + 5
    many = book_of(*({**finish(1), "rid": str(i)} for i in range(9)), limit=4)
    assert [request.rid for request in many] == ["5", "6", "7", "8"]


WRONG = (
    *(1, None, [], {}, {"event": 3}, {"event": "compact"}, {**finish(2), "rid": 5}),
    *({**compact(1, [0]), "kept": kept} for kept in ("x", [-1], [1 << 60], [{}], None)),
    {**compact(1, [0]), "generated": float("inf")},
    {**finish(2), "output_ids": ["a"]},
    {**finish(2), "continues": {"rid": "a"}},
    {**finish(2), "kv_params": {"tau": float("nan")}},
    compact(1, [0], similar=[[1, 2, float("nan")]]),
)


@pytest.mark.parametrize("line", WRONG, ids=str)
def test_a_line_that_is_no_event(line: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        event_of(line)


def test_a_kind_that_the_page_does_not_show() -> None:
    assert event_of({"event": "restore", "rid": "a", "generated": 3}) is None


def test_the_pieces_are_the_text() -> None:
    """A character of several tokens comes with the last of them."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in (
        "4. Ann: Bob = 3, so Ann = 7.\n\n",
        "né 你好 🎈🏳️‍🌈 end",
        "\ud83c".encode(errors="replace"),
    ):
        text = text if isinstance(text, str) else text.decode()
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids)
        assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids)
    assert pieces(tokenizer, [10**9, *tokenizer.encode("a")]) == ["", "a"]


def write(path: Path, *lines: object, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(map(json.dumps, lines)) + end)


def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tail = TraceTail(str(path))
    assert [*tail.events()] == []
    write(path, compact(8, [0]), "no event", finish(3))
    events = [*tail.events()]
    assert [type(event).__name__ for event, _ in events] == ["Compact", "Finish"]
    assert events[-1][1] == tail.at == path.stat().st_size and tail.unreadable == 1
    write(path, finish(4), end="")  # half a line
    assert [*tail.events()] == []
    write(path, end="\n")
    ((event, at),) = tail.events()
    assert at == path.stat().st_size and len(event.output_ids) == 4
    path.write_text("")  # it was emptied
    write(path, finish(5))
    assert [len(event.output_ids) for event, _ in tail.events()] == [5]


def test_of_a_long_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_skipkv.explorer.tail.LIMIT_BYTES", 1000)
    path = tmp_path / "trace.jsonl"
    for number in range(40):
        write(path, {**finish(2), "rid": str(number)})
    tail = TraceTail(str(path))
    rids = [event.rid for event, _ in tail.events()]
    assert rids[-1] == "39" and 0 < len(rids) < 20 and tail.unreadable == 1
    write(path, {**finish(2), "rid": "x" * 5000}, {**finish(2), "rid": "last"})
    found = [event.rid for _ in range(9) for event, _ in tail.events()]
    assert found == ["last"] and tail.at == path.stat().st_size


def test_a_live_page_gets_what_changed(tmp_path: Path) -> None:
    paths = {name: str(tmp_path / f"t.{name}.jsonl") for name in ("dp0", "dp1")}
    live = LiveTrace(paths, lambda ids: ["x"] * len(ids))
    write(Path(paths["dp0"]), compact(8, [0]))
    write(Path(paths["dp1"]), finish(3))
    first = live.data()
    assert [(one["source"], one["rid"]) for one in first["requests"]] == [
        ("dp0", "a"),
        ("dp1", "a"),
    ]
    assert live.data(first["cursor"])["requests"] == []
    write(Path(paths["dp0"]), finish(9))
    (changed,) = live.data(first["cursor"])["requests"]
    assert changed["finished"] and changed["text"] == ["x"] * 9
    # another process of the same server goes on with this cursor
    other = LiveTrace(paths, lambda ids: []).data(first["cursor"])
    assert [one["source"] for one in other["requests"]] == ["dp0"]
    for cursor in ("", "1", "1,2,3", "a,b", "-1,0", "9" * 99 + ",1"):
        with pytest.raises(ValueError, match="since: expected 2 numbers"):
            live.data(cursor)
