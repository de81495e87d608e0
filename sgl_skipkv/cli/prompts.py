"""A user's own prompts, as the model's chat template renders them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_skipkv.cli.files import Line, is_utf8, read_lines
from sgl_skipkv.config import SettingError, Unabridged, brief

_EXAMPLE = '{"prompt": "...", "answer": "7"}, or problem or messages in the place of prompt'


@dataclass(frozen=True)
class Prompt:
    """One line of the file.

    Attributes:
        ids: as sent to the model.
        answer: the key; None where there is none.
    """

    ids: tuple[int, ...]
    answer: str | int | None


def prompt_text(tokenizer: Any, record: Mapping[str, Any], suffix: str = "") -> str:
    """The text that is sent for one line: its ``messages``, or its ``prompt`` or ``problem`` as a
    user's message where the model has a chat template.

    Args:
        suffix: put after the last message.

    Raises:
        SettingError: a line without a prompt, messages for a model without a chat template or that
            its template refuses, or text that UTF-8 cannot encode.
    """
    messages, prompt = record.get("messages"), record.get("prompt") or record.get("problem")
    if messages is None:
        if not isinstance(prompt, str):
            raise SettingError("prompts", "a prompt in every line", dict(record), _EXAMPLE)
        messages = [{"role": "user", "content": prompt}]
    elif not _are_messages(messages):
        raise SettingError("prompts", "messages with role and content", messages, _EXAMPLE)
    elif not tokenizer.chat_template:
        expected = "prompt, because the model has no chat template"
        raise SettingError("prompts", expected, "messages", _EXAMPLE)
    last = {**messages[-1], "content": messages[-1]["content"] + suffix}
    text: str = last["content"]
    if tokenizer.chat_template:
        text = _templated(tokenizer, [*messages[:-1], last])
    if not is_utf8(text):
        choices = "text without halves of surrogate pairs, here and in --suffix"
        raise SettingError("prompts", "text that UTF-8 can encode", text, choices)
    return text


@contextmanager
def named(line: Line) -> Iterator[None]:
    """A wrong value found within it is reported with its file and line."""
    try:
        yield
    except SettingError as error:
        got = Unabridged(f"{line.place}: {brief(error.got)}")
        raise SettingError(error.field, error.expected, got, error.choices) from error


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        )
    )


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    from jinja2 import TemplateError  # which Transformers' chat templates need

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        expected = f"messages that the model's chat template takes ({error})"
        choices = "other roles, or another order"
        raise SettingError("prompts", expected, messages, choices) from error
    return text


def read_prompts(
    path: Path, tokenizer: Any, count: int, suffix: str = ""
) -> tuple[list[Prompt], int]:
    """``count`` prompts of a JSONL file, spread evenly over it, because files are often sorted by
    difficulty; all of them where it has fewer.

    A line whose prompt is that of an earlier one is no further evidence, so it is left out; the
    second value is how many these are.

    Raises:
        SettingError: a line without a prompt, a key in some lines only, or keys without the package
            that compares answers.
    """
    lines = read_lines("prompts", path)
    _check_keys(path, [line.record.get("answer") is not None for line in lines])
    different: dict[tuple[int, ...], Prompt] = {}
    for prompt in _prompts(tokenizer, lines, suffix):
        different.setdefault(prompt.ids, prompt)
    return _spread([*different.values()], count), len(lines) - len(different)


def _check_keys(path: Path, keyed: Sequence[bool]) -> None:
    if any(keyed) and not all(keyed):
        got = Unabridged(f"{path}: {sum(keyed)} of {len(keyed)}")
        choices = "an answer in every line, or in none to compare with the full cache's output"
        raise SettingError("prompts", "an answer in all lines or none", got, choices)
    if any(keyed) and find_spec("math_verify") is None:
        expected = "the package math-verify, which compares answers"
        choices = "pip install 'sgl-skipkv[bench]', or prompts without answers"
        raise SettingError("prompts", expected, "an environment without it", choices)


def _spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _prompts(tokenizer: Any, lines: Iterable[Line], suffix: str) -> Iterable[Prompt]:
    for line in lines:
        with named(line):
            prompt = _prompt(tokenizer, line.record, suffix)
        yield prompt


def _prompt(tokenizer: Any, record: Mapping[str, Any], suffix: str) -> Prompt:
    answer = record.get("answer")
    is_key = isinstance(answer, str | int | float | None) and not isinstance(answer, bool)
    if not is_key or (isinstance(answer, str) and not answer.strip()):
        raise SettingError("prompts", "an answer that is text or a number", answer, _EXAMPLE)
    text = prompt_text(tokenizer, record, suffix)
    # A chat template has written what the tokenizer would put before plain text.
    special = not tokenizer.chat_template
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    return Prompt(tuple(ids), str(answer) if isinstance(answer, float) else answer)
