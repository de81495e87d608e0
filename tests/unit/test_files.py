"""The files that commands read: what is a line, and what a refusal says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sgl_skipkv.cli.files import read_json, read_lines
from sgl_skipkv.cli.main import main
from sgl_skipkv.config import SettingError, Unabridged, brief

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_ends_only_where_those_of_json_do(tmp_path: Path, mark: str, end: str) -> None:
    """Other separators may stand in strings, and a byte-order mark before the first line."""
    path, texts = tmp_path / "p.jsonl", ["a\u2028b", "c\u0085d", "e\u2029"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_bytes((mark + end.join([lines[0], "", *lines[1:], ""])).encode())
    read = read_lines("prompts", path, "prompt")
    assert [line.record["prompt"] for line in read] == texts
    assert [line.place for line in read] == [f"{path}, line {i}" for i in (1, 3, 4)]


@pytest.mark.parametrize(
    ("third", "why"),
    [
        ('{"prompt": "y"', "Expecting ',' delimiter at column 15"),
        ("[" * 100_000, "nested too deep"),
        ("9" * 5000, "Exceeds the limit"),
        ("[1]", "[1]"),
        ('{"text": "y"}', "{'text': 'y'}"),
        ('{"prompt": "\\ud800"}', "{'prompt': '\\ud800'}"),
    ],
    ids=["cut", "deep", "long", "list", "other name", "half a pair"],
)
def test_a_wrong_line_is_named(tmp_path: Path, third: str, why: str) -> None:
    path = tmp_path / ("long" * 30 + ".jsonl")
    path.write_text(f'{{"prompt": "x"}}\n\n{third}\n')
    expected = f"^traces: expected .*, got {path}, line 3: {re.escape(why)}"
    with pytest.raises(SettingError, match=expected):
        read_lines("traces", path, "prompt")


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    """With its whole path, and the reason."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    binary, empty = folder / "binary", folder / "empty"
    binary.write_bytes(b"\xff")
    empty.write_text("\n")
    for path, why in (
        (folder, "Is a directory"),
        (folder / "none", "No such file or directory"),
        (Path("\0"), "not a file name"),
        (binary, "byte 0 is not UTF-8"),
    ):
        with pytest.raises(SettingError) as lines:
            read_lines("traces", path)
        with pytest.raises(SettingError) as value:
            read_json("model", path, dict, "an object")
        for refused in (lines, value):
            assert f"got {path}: {why}; choices" in str(refused.value)
    with pytest.raises(SettingError, match=f"at least one line, got {empty}; choices"):
        read_lines("traces", empty)


@pytest.mark.parametrize(
    ("text", "why"),
    [("[", "Expecting value at column 2"), ("[" * 100_000, "nested too deep"), ("[1]", "[1]")],
    ids=["cut", "deep", "list"],
)
def test_wrong_json_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / ("long" * 30)
    path.write_text(text)
    with pytest.raises(SettingError) as refused:
        read_json("model", path, dict, "an object")
    assert f"got {path}: {why}; choices" in str(refused.value)


def test_only_what_an_operator_gave_is_shown_whole() -> None:
    assert brief(Unabridged("x" * 200)) == "x" * 200
    assert len(brief("x" * 200)) <= 80


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("tune", "--prompts"), "prompts"),
        (("steering", "extract", "--prompts"), "prompts"),
        (("steering", "extract", "--traces"), "traces"),
    ],
)
def test_the_option_is_named(
    command: tuple[str, ...], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *first, last = command
    missing = tmp_path / "none.jsonl"
    given = [*first, "--model-path", str(REASONER), last, str(missing)]
    given += ["-o", str(tmp_path / "x.safetensors")] if first[0] == "steering" else []
    with pytest.raises(SystemExit):
        main(given)
    shown = capsys.readouterr().err
    assert f"error: {option}: expected readable JSONL, got {missing}: No such" in shown
