"""Which tokens the next prompt does not have, for vocabularies of three kinds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_skipkv.reuse.thoughts import Thought, ThoughtTokens

# As byte-level BPE and SentencePiece write white space.
PIECES = {
    "bytes": ("a", "<think>", "</think>", "Ċ", "ĊĊ", "ĠĠ", "Ġb", "čĊ"),
    "sentences": ("a", "<think>", "</think>", "<0x0A>", "▁", "▁▁", "▁b", "\t"),
    "plain": ("a", "<think>", "</think>", "\n", "\n\n", " ", " b", ""),
}
A, START, END, NEWLINE, BLANK, SPACES, WORD = range(7)


def vocabulary(pieces: Sequence[str]) -> Any:
    """The part of a tokenizer that is asked: nothing is decoded."""
    return SimpleNamespace(get_vocab=lambda: {piece: i for i, piece in enumerate(pieces)})


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([A, START, NEWLINE], [A, A, END, BLANK, A, A], Thought(4, 2, 2)),
        ([A, START], [END, A], Thought(1, 1, 1)),
        ([START], [A, END, A], Thought(2, 1, 1)),
        ([A, NEWLINE, START, BLANK], [A, END, A], Thought(2, 2, 3)),
        ([A, NEWLINE], [START, A, END, BLANK, SPACES, WORD], Thought(5, 0, 1)),
        ([A, START, A], [A, END, WORD, NEWLINE, A], Thought(2, 0, 0)),
        ([A, START, A, NEWLINE], [A, END, WORD], Thought(2, 0, 1)),
        # the last of several
        ([A, START], [A, END, A, END, A], Thought(4, 1, 1)),
        # no thought has ended, or no answer follows
        ([A, START], [A, A, A], None),
        ([A, START], [], None),
        ([A, END], [A], None),
        ([A, START], [A, END], None),
        ([A, START], [A, END, BLANK, NEWLINE], None),
    ],
)
def test_thought_and_opener(
    kind: str, prompt: list[int], output: list[int], expected: Thought | None
) -> None:
    thoughts = ThoughtTokens.of(vocabulary(PIECES[kind]))
    assert thoughts is not None
    assert thoughts.find(array("q", prompt), array("q", output)) == expected


def test_a_vocabulary_without_the_tokens() -> None:
    assert ThoughtTokens.of(vocabulary(["a", "<think>", "think"])) is None
    only_end = ThoughtTokens.of(vocabulary(["a", "</think>"]))
    assert only_end is not None
    assert only_end.find(array("q", [0, 0]), array("q", [0, 1, 0])) == Thought(2, 0, 0)
