"""Reads what a command is given: a model's tokenizer, JSON, JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgl_skipkv.config import SettingError


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
        got = f"{model} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise SettingError(field, expected, got, "the folder that SGLang serves") from error


def read_json(field: str, path: Path, kind: type, expected: str) -> Any:
    """The value in a JSON file.

    Raises:
        SettingError: no readable JSON, or not of this kind.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, no JSON, or no UTF-8
        raise SettingError(field, "readable JSON", f"{path} ({error})", expected) from error
    if not isinstance(value, kind):
        raise SettingError(field, expected, value, "another file")
    return value


def read_lines(path: Path, *fields: str) -> list[dict[str, Any]]:
    """The objects of a JSONL file, each with text in these fields.

    Raises:
        SettingError: no readable JSONL, a line without one of the fields, or no line at all.
    """
    example = json.dumps(dict.fromkeys(fields or ("prompt",), "..."))
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingError("file", "readable JSONL", f"{path} ({error})", example) from error
    for line in lines:
        if not isinstance(line, dict) or not all(isinstance(line.get(f), str) for f in fields):
            expected = f"objects with {', '.join(fields) or 'names'}"
            raise SettingError("file", expected, line, example)
    if not lines:
        raise SettingError("file", "at least one line", str(path), example)
    return lines
