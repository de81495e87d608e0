"""``skipkv trace``: which tokens are shown as gone, on a terminal and in a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from sgl_skipkv.cli import trace
from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.trace import FinishedRequest, finished_request
from sgl_skipkv.config import printable

MODEL = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
TEXT = "5. Ann: it is given, so Ann = 7.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def compact(generated: int, kept: list[int], prompt: int = 10, rid: str = "a") -> dict[str, Any]:
    counts = {"generated": generated, "before": prompt + generated, "after": len(kept)}
    same = {"event": "compact", "rid": rid, "policy": "rkv", "prompt_tokens": prompt}
    return {**same, **counts, "kept": kept}


def finish(ids: list[int], prompt: int = 10, rid: str = "a", **more: Any) -> dict[str, Any]:
    summary = {"evicted_tokens": 4, "full_kv_tokens": len(ids) - 1, "evicted_sentences": 0}
    return {
        **{"event": "finish", "rid": rid, "prompt_tokens": prompt, "output_ids": ids},
        **{"policy": "rkv", "kv_budget": 4, "sentences": 1, "peak_kv_tokens": 8, **summary},
        **more,
    }


@pytest.fixture()
def events(tokenizer: Any) -> list[dict[str, Any]]:
    """A prompt of 10 tokens; of the first eight generated ones, two stretches went."""
    return [compact(8, [*range(10), 10, 13, 14, 17]), finish(tokenizer.encode(TEXT))]


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def traced(path: Path, *events: dict[str, Any], rid: str | None = None) -> FinishedRequest:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return finished_request(path, rid)


def test_what_is_not_kept_is_gone(events: list[dict[str, Any]], path: Path) -> None:
    assert traced(path, *events).evicted == {1, 2, 5, 6}


def test_a_recomputation_brings_everything_back(events: list[dict[str, Any]], path: Path) -> None:
    again = [events[0], {"event": "recompute", "rid": "a", "generated": 9}, events[1]]
    assert traced(path, *again).evicted == set()


@pytest.mark.parametrize("rid", [None, "a"])
def test_a_request_id_that_is_used_again(rid: str | None, path: Path) -> None:
    """The last use that has finished, without what another one evicted."""
    first, second = finish([1, 2, 3]), finish([4, 5])
    uses = [compact(2, [0]), first, second, compact(1, [0])]
    shown = traced(path, *uses, rid=rid)
    assert shown.finish.output_ids == [4, 5] and shown.evicted == set()
    other = [compact(2, [0]), {**second, "rid": "b"}, first]
    assert traced(path, *other, rid=rid).evicted == {0, 1}, "of a, although b finished between"


def test_evicted_stretches_are_styled(
    events: list[dict[str, Any]], path: Path, tokenizer: Any
) -> None:
    text = trace.render(traced(path, *events), tokenizer, mark="")
    pieces = [tokenizer.decode([i]) for i in events[1]["output_ids"]]
    assert text.plain == "".join(pieces)
    struck = [text.plain[span.start : span.end] for span in text.spans]
    assert struck == ["".join(pieces[1:3]), "".join(pieces[5:7])]


def test_a_file_gets_marks_and_a_terminal_gets_styles(
    events: list[dict[str, Any]], path: Path, tokenizer: Any
) -> None:
    pieces = [tokenizer.decode([i]) for i in events[1]["output_ids"]]
    plain, styled = io.StringIO(), io.StringIO()
    request = traced(path, *events)
    trace.show(Console(file=plain, width=200), request, tokenizer)
    trace.show(Console(file=styled, width=200, force_terminal=True), request, tokenizer)
    assert f"~~{''.join(pieces[1:3])}~~" in plain.getvalue()
    assert "\x1b[2;9m" in styled.getvalue() and "~~" not in styled.getvalue()
    assert "4 of" in plain.getvalue() and "[rkv, kv_budget 4: " in plain.getvalue()


def test_a_request_that_never_evicts_has_no_budget(path: Path, tokenizer: Any) -> None:
    plain = io.StringIO()
    request = traced(path, finish([5], policy="full", kv_budget=None))
    trace.show(Console(file=plain, width=200), request, tokenizer)
    assert "[full: " in plain.getvalue()


def test_marks_close_at_the_end_of_a_line(path: Path, tokenizer: Any) -> None:
    ids = tokenizer.encode("so Ann = 7.\n\n6. Bob")
    request = traced(path, compact(len(ids), [0], prompt=0), finish(ids, prompt=0))
    text = trace.render(request, tokenizer, mark="~~")
    first = tokenizer.decode(ids[:1])
    assert text.plain == f"{first}~~{'so Ann = 7.'[len(first) :]}~~\n\n~~6. Bob~~"


def test_a_character_of_several_tokens(path: Path, tokenizer: Any) -> None:
    """Its last token has it; none of its tokens alone would be text."""
    ids = tokenizer.encode("√")
    assert len(ids) > 1
    request = traced(path, compact(len(ids), [], prompt=0), finish(ids, prompt=0))
    assert trace.render(request, tokenizer, mark="~~").plain == "~~√~~"


def run(path: Path, *more: str) -> int:
    return main(["trace", str(path), "--model-path", str(MODEL), *more])


def refused(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What is printed of wrong arguments."""
    with pytest.raises(SystemExit) as ended:
        run(path, *more)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    return printed.err


def test_the_command(
    events: list[dict[str, Any]], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(path, *events, finish([5], rid="[/x] [bold]"))
    assert run(path, "--rid", "a") == 0
    printed = capsys.readouterr()
    assert "~~" in printed.out and printed.err == ""
    message = refused(path, capsys, "--rid", "[/b]")
    expected = "rid: expected a finished request of the trace, got '[/b]'; choices: "
    assert expected + "'a', '[/x] [bold]'" in message


@pytest.mark.parametrize("more", [(), ("--rid", "a")])
def test_a_trace_in_which_nothing_has_finished(
    more: tuple[str, ...], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for events in ([], [compact(8, [0])]):
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert "file: expected at least one finished request" in refused(path, capsys, *more)


def test_half_a_line_is_skipped(
    events: list[dict[str, Any]], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the end, where a server writes, and inside, where one was killed and another goes on."""
    lines = [json.dumps(event) for event in events]
    path.write_text("\n".join([*lines, lines[1][:20]]))
    assert run(path) == 0
    printed = capsys.readouterr()
    assert "~~" in printed.out and printed.err.startswith(f"skipped the last line of {path}")
    path.write_text("\n".join([lines[0][:20] + lines[0], "{}", *lines]))
    assert run(path) == 0
    printed = capsys.readouterr()
    assert "~~" in printed.out
    assert printed.err.startswith(f"skipped 2 lines of {path}, no events of a trace: line 1: ")
    assert printed.err.count("\n") == 1, "the last line is whole, although nothing ends it"


LINES = (
    *("1", "{}", '{"event": "finish", "rid": "a"}', '{"event": [1], "rid": "a"}'),
    json.dumps(finish([1], output_ids="abc")),
)
WRONG: list[tuple[str | None, str]] = [
    *((line + "\n", "trace.jsonl, line 1: ") for line in LINES),
    *(
        (text, "file: expected a trace, JSON lines, got ")
        for text in (None, '{"event": "compact", "ri')
    ),
    ("", "model-path: expected a folder or name of a model"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_file_that_is_no_trace_and_a_folder_without_a_tokenizer(
    text: str | None, message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = path.parent if text == "" else MODEL
    if text is not None:
        path.write_text(text or json.dumps(finish([1])))
    assert message in refused(path, capsys, "--model-path", str(model))


def test_the_files_of_replicas_are_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [path.with_name(f"trace.dp{i}.jsonl") for i in range(2)]
    for name in names:
        name.write_text(json.dumps(finish([1])) + "\n")
    assert f"choices: {names[0]}, {names[1]}" in refused(path, capsys)


def test_no_terminal_obeys_what_a_trace_says(tokenizer: Any, path: Path) -> None:
    """Clients chose what the model writes, and anyone may have made the file."""
    hostile = "\x1b]52;c;eA==\x07\x9b2J"
    request = traced(path, finish(tokenizer.encode(TEXT), policy=f"rkv{hostile}"))
    shown = io.StringIO()
    trace.show(Console(file=shown, width=200, force_terminal=True), request, tokenizer)
    said = shown.getvalue()
    assert "rkv\ufffd]52;" in said and "]52" not in said.replace("\ufffd]52", "")
    assert "\x1b]" not in said and "\x07" not in said and "\x9b" not in said
    assert "\n" in printable("a\n\tb") and printable(hostile).isprintable()
