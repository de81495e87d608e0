"""Reads what a command is given: a model's tokenizer, JSON, JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sgl_skipkv.config import SettingError, Unabridged, brief, why_unopened


class Line(NamedTuple):
    """An object of a JSONL file, and where it stands: the file and the line, from 1."""

    place: str
    record: dict[str, Any]


def load_tokenizer(field: str, model: str) -> Any:
    """The tokenizer that Transformers loads from a folder or by name.

    Raises:
        SettingError: Transformers loads none; ``field`` is the command-line option.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        expected = "a folder or name of a model with a tokenizer"
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        got = Unabridged(f"{model}: {why}")
        raise SettingError(field, expected, got, "the folder that SGLang serves") from error


def read_json(field: str, path: Path, kind: type, expected: str) -> Any:
    """The value in a JSON file.

    Raises:
        SettingError: no readable JSON, or not of this kind; ``field`` is the command-line option.
    """
    text = _read_text(field, path, "readable JSON", expected)
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        got = Unabridged(f"{path}: {_why_no_json(error)}")
        raise SettingError(field, "readable JSON", got, expected) from error
    if not isinstance(value, kind):
        raise SettingError(field, expected, Unabridged(f"{path}: {brief(value)}"), "another file")
    return value


def read_lines(field: str, path: Path, *names: str) -> list[Line]:
    """The objects of a JSONL file, each with text under these names.

    Raises:
        SettingError: no readable JSONL, a line without one of the names, or no line at all;
            ``field`` is the command-line option.
    """
    example = json.dumps(dict.fromkeys(names or ("prompt",), "..."))
    text = _read_text(field, path, "readable JSONL", example)
    lines = []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            lines.append(Line(place, _record(field, place, line, names, example)))
    if not lines:
        raise SettingError(field, "at least one line", Unabridged(path), example)
    return lines


def _read_text(field: str, path: Path, expected: str, choices: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without a byte-order mark
    except (OSError, ValueError) as error:
        why = why_unopened(error)
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start} is not UTF-8"
        raise SettingError(field, expected, Unabridged(f"{path}: {why}"), choices) from error


def _record(
    field: str, place: str, line: str, names: Sequence[str], example: str
) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (RecursionError, ValueError) as error:
        got = Unabridged(f"{place}: {_why_no_json(error)}")
        raise SettingError(field, "readable JSONL", got, example) from error
    if isinstance(record, dict) and all(is_utf8(record.get(name)) for name in names):
        return record
    expected = f"objects with {', '.join(names) or 'names'}"
    raise SettingError(field, expected, Unabridged(f"{place}: {brief(record)}"), example)


def _why_no_json(error: RecursionError | ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


def is_utf8(value: object) -> bool:
    """Whether it is text that UTF-8 can encode; JSON can also write halves of surrogate pairs."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value
