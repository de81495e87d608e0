"""A user's own prompts, as the model's chat template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_skipkv.cli.files import read_lines
from sgl_skipkv.config import SettingError

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
        SettingError: a line without a prompt, or messages for a model without a chat template.
    """
    messages, prompt = record.get("messages"), record.get("prompt") or record.get("problem")
    if messages is None:
        if not isinstance(prompt, str):
            raise SettingError("prompts", "a prompt in every line", dict(record), _EXAMPLE)
        if not tokenizer.chat_template:
            return prompt + suffix
        messages = [{"role": "user", "content": prompt}]
    texts = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not texts or not messages:
        raise SettingError("prompts", "messages with role and content", messages, _EXAMPLE)
    if not tokenizer.chat_template:
        expected = "prompt, because the model has no chat template"
        raise SettingError("prompts", expected, "messages", _EXAMPLE)
    last = {**messages[-1], "content": messages[-1]["content"] + suffix}
    text: str = tokenizer.apply_chat_template(
        [*messages[:-1], last], tokenize=False, add_generation_prompt=True
    )
    return text


def read_prompts(path: Path, tokenizer: Any, count: int, suffix: str = "") -> list[Prompt]:
    """``count`` lines of a JSONL file, spread evenly over it, because files are often sorted by
    difficulty; all of them where it has fewer.

    Raises:
        SettingError: a line without a prompt, a key in some lines only, or keys without the package
            that compares answers.
    """
    lines = _spread(read_lines(path), count)
    keyed = [line.get("answer") is not None for line in lines]
    if any(keyed) and not all(keyed):
        got = f"{sum(keyed)} of {len(keyed)} in {path}"
        choices = "an answer in every line, or in none to compare with the full cache's output"
        raise SettingError("prompts", "an answer in all lines or none", got, choices)
    if any(keyed) and find_spec("math_verify") is None:
        expected = "the package math-verify, which compares answers"
        choices = "pip install 'sgl-skipkv[bench]', or prompts without answers"
        raise SettingError("prompts", expected, "an environment without it", choices)
    return [_prompt(tokenizer, line, suffix) for line in lines]


def _spread(lines: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    count = min(count, len(lines))
    return [lines[i * len(lines) // count] for i in range(count)]


def _prompt(tokenizer: Any, line: Mapping[str, Any], suffix: str) -> Prompt:
    answer = line.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise SettingError("prompts", "an answer that is text or a number", answer, _EXAMPLE)
    text = prompt_text(tokenizer, line, suffix)
    # A chat template has written what the tokenizer would put before plain text.
    special = not tokenizer.chat_template
    ids = tokenizer(text, add_special_tokens=special)["input_ids"]
    return Prompt(tuple(ids), str(answer) if isinstance(answer, float) else answer)
