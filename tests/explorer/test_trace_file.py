"""A trace from its first line to its last: what is skipped, what is held, how requests are told."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from bench.lib.trace import read_trace
from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.view import DEFAULT_REQUESTS, write_page
from sgl_skipkv.explorer.book import Book
from sgl_skipkv.explorer.events import Finish, event_of
from sgl_skipkv.explorer.outline import Outline
from sgl_skipkv.explorer.trace_file import TraceFile
from sgl_skipkv.request.trace import TraceWriter

FINISH = {"event": "finish", "rid": "a", "policy": "rkv", "prompt_tokens": 3, "output_ids": [1]}
COMPACT = {
    **{"event": "compact", "rid": "a", "policy": "rkv", "prompt_tokens": 3},
    **{"generated": 9, "before": 12, "after": 1, "kept": [0]},
}


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def write(path: Path, *lines: Any, end: str = "\n") -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + end)


def data_of(page: Path) -> Any:
    """What the page was given."""
    text = page.read_text().partition('type="application/json">')[2]
    return json.loads(text.partition("</script>")[0])


def test_lines_that_are_no_events_are_skipped_and_counted(path: Path) -> None:
    write(path, FINISH, "{", "", "[" * 100_000, {**FINISH, "output_ids": "abc"}, COMPACT, end="")
    with TraceFile(path) as file:
        kinds = [type(event).__name__ for event, _ in file.events()]
        assert kinds == ["Finish", "Compact"] and (file.unreadable, file.incomplete) == (3, False)
        assert file.skipped.startswith(f"skipped 3 lines of {path}, no events of a trace: line 2: ")
        begins = [at for _, at in file.events()]
        assert file.unreadable == 3, "counted anew"
        assert [event.rid for event in file.at(reversed(begins))] == ["a", "a"]


def test_half_a_line_at_the_end_is_another_thing(path: Path) -> None:
    write(path, FINISH, json.dumps(FINISH)[:30], end="")
    with TraceFile(path) as file:
        assert len([*file.events()]) == 1 and (file.unreadable, file.incomplete) == (0, True)
        assert file.skipped.startswith("skipped the last line of ") and "killed" in file.skipped


def test_another_request_is_not_even_checked(path: Path) -> None:
    write(path, {**FINISH, "rid": "b", "output_ids": "abc"}, FINISH, "[]")
    with TraceFile(path) as file:
        assert [event.rid for event, _ in file.events("a")] == ["a"] and file.unreadable == 1


def test_a_pipe_is_read_too(path: Path) -> None:
    os.mkfifo(path)
    feed = threading.Thread(target=lambda: write(path, COMPACT, FINISH))
    feed.start()
    write_page(path, path.with_name("page.html"), None)
    feed.join()
    (request,) = data_of(path.with_name("page.html"))["requests"]
    assert request["rid"] == "a" and len(request["steps"]) == 1


def test_a_server_that_starts_again_begins_a_line(path: Path) -> None:
    """Behind half a line that a killed one left, and behind nothing else."""
    for _ in range(2):
        TraceWriter(str(path)).write("restore", rid="a")
    assert len(read_trace(path)) == 2 and path.read_text().count("\n") == 2
    with path.open("a") as file:
        file.write('{"event":"fin')
    TraceWriter(str(path)).write(**FINISH)
    with TraceFile(path) as trace:
        assert [type(event) for event, _ in trace.events()] == [Finish] and trace.unreadable == 1


def test_a_new_trace_is_of_this_user_alone(path: Path) -> None:
    """It has the text of all clients. Who made the file before has chosen who may read it."""
    TraceWriter(str(path)).write("restore", rid="a")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    TraceWriter(str(path)).write("restore", rid="a")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("how", ["a full disk", "a pipe that nobody reads any more"])
def test_a_trace_that_cannot_be_written_ends_and_nothing_else(
    how: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would leave a step of the scheduler, and end every request."""
    if how == "a full disk":
        writer = TraceWriter("/dev/full")
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer = TraceWriter(str(path))
        writer.write(**FINISH)
        os.close(reader)
    for _ in range(3):
        writer.write(**FINISH)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("sgl_skipkv: the trace /") and " ends here: " in told


def continues(rid: str, parent: str) -> dict[str, Any]:
    return {**FINISH, "rid": rid, "continues": {"rid": parent, "tokens": 2}}


def test_requests_are_told_apart_and_linked_as_in_a_book() -> None:
    """Ids that are used again, turns, and one that has not finished."""
    lines = [
        *(FINISH, COMPACT, {**COMPACT, "rid": "b"}, FINISH, continues("b", "a")),
        *(continues("c", "no such"), continues("d", "b"), COMPACT),
    ]
    book, events = Book(), [event_of(line) for line in lines]
    for event in events:
        assert event is not None
        book.add(event)
    outline = Outline((event, at) for at, event in enumerate(events) if event is not None)
    numbers = {request: i for i, request in enumerate(outline.requests)}
    linked = [(one.rid, one.continues and numbers[one.continues]) for one in outline.requests]
    assert linked == [
        (request.rid, request.continues and request.continues - 1) for request in book
    ]
    assert [one.lines for one in outline.requests] == [[0], [1, 3], [2, 4], [5], [6], [7]]


def test_the_page_has_the_last_requests_and_what_they_continue(path: Path) -> None:
    many = [{**FINISH, "rid": str(i)} for i in range(30)]
    write(path, FINISH, continues("turn", "a"), *many[:20], continues("last", "turn"), *many[20:])
    out = path.with_suffix(".html")
    write_page(path, out, None)
    data = data_of(out)
    rids = [request["rid"] for request in data["requests"]]
    assert rids == ["a", "turn", "19", "last", *map(str, range(20, 30))]
    assert len(rids) == DEFAULT_REQUESTS + 2 and data["side_by_side"] == []
    numbers = {request["rid"]: request["number"] for request in data["requests"]}
    assert data["requests"][3]["continues"]["number"] == numbers["turn"]
    write_page(path, out, None, ["7", "turn"])
    data = data_of(out)
    assert [request["rid"] for request in data["requests"]] == ["a", "turn", "7"]
    assert data["side_by_side"] == [3, 2]


def test_a_long_trace_is_not_held(path: Path) -> None:
    """The memory of a page is that of the requests on it."""
    with path.open("w") as file:
        for i in range(300):
            line = {**COMPACT, "rid": str(i), "kept": [*range(1000)]}
            file.write(json.dumps(line) + "\n" + json.dumps({**FINISH, "rid": str(i)}) + "\n")
    tracemalloc.start()
    write_page(path, path.with_suffix(".html"), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2, "more than half of the file, as text"


def test_the_trace_is_not_overwritten(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = path.with_suffix(".html")
    write(path, FINISH)
    os.link(path, page)
    for arguments in ([path, "-o", path], [page], [path]):
        with pytest.raises(SystemExit) as ended:
            main(["view", *map(str, arguments)])
        assert ended.value.code == 2
        assert "out: expected another file than the trace" in capsys.readouterr().err
    assert json.loads(path.read_text()) == FINISH


def test_what_was_skipped_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path, "{", FINISH)
    assert main(["view", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"skipped 1 line of {path}") and "(all requests," in printed.out


def test_a_folder_is_no_trace(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (".", str(path.parent)):
        with pytest.raises(SystemExit):
            main(["view", name])
        assert "file: expected a trace, JSON lines, got" in capsys.readouterr().err
