"""``skipkv trace``: which tokens are shown as gone, on a terminal and in a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from sgl_skipkv.cli import trace_view
from sgl_skipkv.cli.main import main

MODEL = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
TEXT = "5. Ann: it is given, so Ann = 7.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture()
def events(tokenizer: Any) -> list[dict[str, Any]]:
    """A prompt of 10 tokens; of the first eight generated ones, two stretches went."""
    ids = tokenizer.encode(TEXT)
    kept = [*range(10), 10, 13, 14, 17]
    summary = {"evicted_tokens": 4, "full_kv_tokens": len(ids) - 1, "evicted_sentences": 0}
    return [
        {"event": "compact", "rid": "a", "prompt_tokens": 10, "generated": 8, "kept": kept},
        {
            **{"event": "finish", "rid": "a", "prompt_tokens": 10, "output_ids": ids},
            **{"policy": "rkv", "kv_budget": 4, "sentences": 1, "peak_kv_tokens": 8, **summary},
        },
    ]


def test_what_is_not_kept_is_gone(events: list[dict[str, Any]]) -> None:
    assert trace_view.evicted_positions(events) == {1, 2, 5, 6}


def test_a_recomputation_brings_everything_back(events: list[dict[str, Any]]) -> None:
    again = [events[0], {"event": "recompute", "rid": "a", "generated": 9}, events[1]]
    assert trace_view.evicted_positions(again) == set()


def test_evicted_stretches_are_styled(events: list[dict[str, Any]], tokenizer: Any) -> None:
    text = trace_view.render(events, tokenizer)
    pieces = [tokenizer.decode([i]) for i in events[1]["output_ids"]]
    assert text.plain == "".join(pieces)
    struck = [text.plain[span.start : span.end] for span in text.spans]
    assert struck == ["".join(pieces[1:3]), "".join(pieces[5:7])]


def test_a_file_gets_marks_and_a_terminal_gets_styles(
    events: list[dict[str, Any]], tokenizer: Any
) -> None:
    pieces = [tokenizer.decode([i]) for i in events[1]["output_ids"]]
    plain, styled = io.StringIO(), io.StringIO()
    trace_view.show(Console(file=plain, width=200), events, tokenizer)
    trace_view.show(Console(file=styled, width=200, force_terminal=True), events, tokenizer)
    assert f"~~{''.join(pieces[1:3])}~~" in plain.getvalue()
    assert "\x1b[2;9m" in styled.getvalue() and "~~" not in styled.getvalue()
    assert "4 of" in plain.getvalue() and "kv_budget 4" in plain.getvalue()


def test_marks_close_at_the_end_of_a_line(tokenizer: Any) -> None:
    ids = tokenizer.encode("so Ann = 7.\n\n6. Bob")
    finish = {"event": "finish", "rid": "a", "output_ids": ids}
    compact = {"event": "compact", "rid": "a", "prompt_tokens": 0, "generated": len(ids)}
    text = trace_view.render([{**compact, "kept": [0]}, finish], tokenizer, mark="~~")
    first = tokenizer.decode(ids[:1])
    assert text.plain == f"{first}~~{'so Ann = 7.'[len(first) :]}~~\n\n~~6. Bob~~"


def test_a_character_of_several_tokens(tokenizer: Any) -> None:
    """Its last token has it; none of its tokens alone would be text."""
    ids = tokenizer.encode("√")
    assert len(ids) > 1
    compact = {"event": "compact", "rid": "a", "prompt_tokens": 0, "generated": len(ids)}
    finish = {"event": "finish", "rid": "a", "output_ids": ids}
    shown = trace_view.render([{**compact, "kept": []}, finish], tokenizer, mark="~~")
    assert shown.plain == "~~√~~"


@pytest.fixture()
def path(events: list[dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(path), "--model-path", str(MODEL)]) == 0
    assert "~~" in capsys.readouterr().out
    assert main(["trace", str(path), "--model-path", str(MODEL), "--rid", "b"]) == 1
    assert "rid: expected a finished request, got b; choices: a" in capsys.readouterr().out


LINES = ("1", "{}", '{"event": "finish", "rid": "a"}', '{"event": [1], "rid": "a"}')
WRONG: list[tuple[str | None, str]] = [
    *((line + "\n", "file: expected lines of a trace, with event, rid") for line in LINES),
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
    if text is None:
        path.unlink()
    elif text:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(path), "--model-path", str(model)])
    assert ended.value.code == 2 and message in capsys.readouterr().err
