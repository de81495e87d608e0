"""The bundled conversation model is what its card says: files, conversations, and its answers.

What it answers through the real server, by turn, is in bench/rows/conversation.csv.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bench.reasoner.conversations import CALL, MAX_TURNS, Turn, heldout_conversation
from bench.reasoner.export import load_model
from bench.reasoner.vocabulary import OPEN_REPLY, TURN_END, message_text

MODEL = Path(__file__).resolve().parents[2] / "examples" / "conversant"
LINES = (MODEL / "heldout.jsonl").read_text().splitlines()
SAMPLE = [heldout_conversation(i) for i in range(20)]


def test_weights_are_small_and_the_log_belongs_to_them() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 10_000_000
    rows = list(csv.DictReader((MODEL / "training_log.csv").open()))
    card = " ".join((MODEL / "README.md").read_text().split())
    assert f"--steps {int(rows[-1]['step'])} " in card


def test_heldout_conversations_come_from_the_generator() -> None:
    assert len(LINES) == 200
    for index, line in enumerate(LINES):
        made = [turn.record() for turn in heldout_conversation(index)]
        assert json.loads(line)["turns"] == made and len(made) == MAX_TURNS


def looked_up(turn: Turn) -> set[str]:
    """People whose counts the replies use."""
    return {name for reply in turn.replies for name in re.findall(r"(\w+) = \d+ and", reply)} | {
        name for reply in turn.replies for name in re.findall(r"and (\w+) = \d+,", reply)
    }


def test_later_turns_need_results_asides_and_tool_answers_of_earlier_ones() -> None:
    needed, later, alone = dict.fromkeys(("result", "aside", "tool"), 0), 0, 0
    for turns in SAMPLE:
        source: dict[str, str] = {}
        for number, turn in enumerate(turns):
            older = {name: source[name] for name in looked_up(turn) if name in source}
            later += number > 0
            alone += number > 0 and not older  # the first turn about the other item
            for kind in older.values():
                needed[kind] += 1
            said = re.findall(r"(?:As for \w+, (\w+) has \d+\.|(\w+) has)", turn.question)
            source |= {aside or name: "aside" if aside else "result" for aside, name in said}
            if turn.lookup is not None:
                assert CALL.search(turn.replies[0])[1] == turn.lookup.name
                told = re.findall(r"As for \w+, (\w+) has", turn.lookup.text)
                source |= {name: "tool" for name in told if name != turn.lookup.name}
    assert alone < 0.1 * later
    assert needed["result"] > 200 and needed["aside"] > 50 and needed["tool"] > 20


def test_the_chat_template_renders_what_it_was_trained_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    turn = next(turn for turns in SAMPLE for turn in turns if turn.lookup is not None)
    assert turn.lookup is not None
    chat = [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.replies[0]},
        {"role": "tool", "content": turn.lookup.text},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    trained = f"{message_text('user', turn.question)}{OPEN_REPLY}{turn.replies[0]}{TURN_END}\n"
    assert rendered == f"{trained}{message_text('tool', turn.lookup.text)}{OPEN_REPLY}"


@pytest.fixture(scope="module")
def said() -> list[tuple[int, float]]:
    """Of every reply in five conversations: its turn, and the share of tokens that the model would
    write, given the right ones before."""
    model, tokenizer = load_model(MODEL), AutoTokenizer.from_pretrained(MODEL)
    found = []
    for turns in SAMPLE[:5]:
        ids: list[int] = []
        replies: list[tuple[int, int, int]] = []
        for number, turn in enumerate(turns):
            told = [message_text("user", turn.question)]
            if turn.lookup is not None:
                told.append(message_text("tool", turn.lookup.text))
            for message, reply in zip(told, turn.replies, strict=True):
                ids += tokenizer.encode(f"{message}{OPEN_REPLY}")
                replies.append((number, len(ids), len(tokenizer.encode(f"{reply}{TURN_END}"))))
                ids += tokenizer.encode(f"{reply}{TURN_END}\n")
        with torch.inference_mode():
            right = model(torch.tensor([ids]))[0, :-1].argmax(-1) == torch.tensor(ids[1:])
        for number, start, length in replies:
            found.append((number, float(right[start - 1 : start - 1 + length].float().mean())))
    return found


def test_it_knows_what_to_write_in_every_turn(said: list[tuple[int, float]]) -> None:
    for turn in range(MAX_TURNS):
        shares = [share for number, share in said if number == turn]
        assert min(shares) > 0.97 and sum(shares) / len(shares) > 0.995
