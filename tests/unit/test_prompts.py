"""The prompts that ``skipkv tune`` takes from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from json_lines import written
from transformers import AutoTokenizer

from sgl_skipkv.cli.prompts import prompt_text, read_prompts
from sgl_skipkv.config import SettingError

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(REASONER)


def test_prompts(tokenizer: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "p.jsonl", *({"prompt": f"{i} pens", "answer": i} for i in range(9)))
    found, repeated = read_prompts(file, tokenizer, 3)
    assert [one.answer for one in found] == [0, 3, 6] and repeated == 0
    assert len(read_prompts(file, tokenizer, 40)[0]) == 9
    text = prompt_text(tokenizer, {"problem": "3 pens"}, "!")
    assert "3 pens!" in text and text.endswith("<think>\n")
    chat = {"messages": [{"role": "user", "content": "3 pens"}]}
    assert prompt_text(tokenizer, chat, "!") == text
    ids = tokenizer(prompt_text(tokenizer, {"prompt": "3 pens"}), add_special_tokens=False)
    assert list(found[1].ids) == ids["input_ids"]
    keyless = written(tmp_path / "q.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert [one.answer for one in read_prompts(keyless, tokenizer, 2)[0]] == [None, None]


def test_the_same_prompt_counts_once(tokenizer: Any, tmp_path: Path) -> None:
    """Whatever form it is written in; of its lines the first counts."""
    chat = {"messages": [{"role": "user", "content": "3 pens"}], "answer": 4}
    lines = [{"prompt": "3 pens", "answer": 3}, {"problem": "5 pens", "answer": 5}, chat]
    file = written(tmp_path / "p.jsonl", *lines * 20)
    found, repeated = read_prompts(file, tokenizer, 40)
    assert [one.answer for one in found] == [3, 5] and repeated == 58


NO_ROLE = {"messages": [{"content": "x"}]}
HALF = {"messages": [{"role": "user", "content": "\ud800"}]}


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ([{"text": "x"}], "a prompt in every line"),
        ([{"prompt": "x", "answer": 1}, {"prompt": "y"}], "in all lines or none"),
        ([{"prompt": "x", "answer": [1]}], "text or a number"),
        ([{"messages": []}], "messages with role and content"),
        ([{"messages": [{"role": "user"}]}], "messages with role and content"),
        ([NO_ROLE], "messages with role and content"),
        ([{"messages": [{"role": 1, "content": "x"}]}], "messages with role and content"),
        ([{"prompt": "x"}, NO_ROLE], "role and content, got [^ ]+p.jsonl, line 2: "),
        ([{"prompt": "x", "answer": 1}, {"prompt": "y", "answer": " "}], "line 2: ' '"),
        ([{"prompt": "x"}, {"prompt": "a\ud800"}], "UTF-8 can encode, got [^ ]+, line 2: "),
        ([HALF], "UTF-8 can encode, got [^ ]+, line 1: "),
    ],
)
def test_wrong_prompts(tokenizer: Any, tmp_path: Path, lines: list[Any], field: str) -> None:
    with pytest.raises(SettingError, match=f"^prompts: .*{field}"):
        read_prompts(written(tmp_path / "p.jsonl", *lines), tokenizer, 9)


def test_what_a_chat_template_refuses(tmp_path: Path) -> None:
    strict = AutoTokenizer.from_pretrained(REASONER)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = written(tmp_path / "p.jsonl", {"prompt": "x"})
    with pytest.raises(SettingError, match=r"takes \(roles must alternate\), got .*, line 1: "):
        read_prompts(file, strict, 9)
