"""Which tokens of a request the template of the next turn drops (``kv_params.drop_thoughts``).

An output of thoughts and answer is sent back as the answer alone: without everything up to the last
``</think>`` and the white space behind it, and without the ``<think>`` that the prompt ended with.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, NamedTuple

from sgl_skipkv.recording.sentences import Tokenizer, vocabulary_of

START: Final = "<think>"
END: Final = "</think>"
NO_THOUGHTS: Final = f"the model's vocabulary has no {END}"
# White space in a raw vocabulary entry: as itself, in byte-level BPE, in SentencePiece.
_BLANKS: Final = frozenset(" \t\n\r" + "ĠĉĊč" + "▁")
_BLANK_BYTES: Final = frozenset({"<0x09>", "<0x0A>", "<0x0D>", "<0x20>"})


class Thought(NamedTuple):
    """The thoughts of one output, which end with a token of the answer behind them.

    Attributes:
        tokens: generated tokens up to the answer; they are evicted.
        opener_tokens: of the prompt, at its end; they keep their KV, but the next prompt does not
            contain them.
        edge_tokens: of the prompt, at its end: these, and the white space in front of them, which
            is tokenized together with white space that stands for the thoughts.
    """

    tokens: int
    opener_tokens: int
    edge_tokens: int


@dataclass(frozen=True)
class ThoughtTokens:
    """The tokens around thoughts in one vocabulary: ``</think>``, ``<think>`` where there is one,
    and those of white space only."""

    end: int
    start: int | None
    blank: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThoughtTokens | None:
        """Those of a tokenizer; None if ``</think>`` is not one token."""
        vocabulary = vocabulary_of(tokenizer)
        if END not in vocabulary:
            return None
        blank = frozenset(token for raw, token in vocabulary.items() if _is_blank(raw))
        return cls(vocabulary[END], vocabulary.get(START), blank)

    def find(self, prompt: array[int], output: array[int]) -> Thought | None:
        """None: no thought ended, or no answer followed."""
        ends = len(output) - next(
            (i for i, token in enumerate(reversed(output)) if token == self.end), len(output)
        )
        tokens = ends + self._blanks(output[ends:])
        if not ends or tokens == len(output):
            return None
        edge = self._blanks(prompt[::-1])
        start = len(prompt) - edge - 1
        if start < 0 or prompt[start] != self.start:
            return Thought(tokens, 0, edge)
        return Thought(tokens, edge + 1, edge + 1 + self._blanks(prompt[:start][::-1]))

    def _blanks(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning are white space."""
        return sum(1 for _ in takewhile(self.blank.__contains__, tokens))


def _is_blank(raw: str) -> bool:
    return raw in _BLANK_BYTES or (raw != "" and _BLANKS.issuperset(raw))
