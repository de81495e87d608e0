"""Sentence spans from token ids: which tokens close a sentence, and where sentences begin and end.

A sentence is a half-open span ``[start, stop)`` of tokens that ends at a delimiter token (SkipKV,
arXiv 2512.07993, section 4.1; of generated tokens here). Further delimiters right after it belong
to the same sentence. Spans count from the first generated token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, get_args

from sgl_skipkv.config import Preset

# The paper's list, as whole tokens.
_PAPER: Final = frozenset({"\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n"})
# A newline after one of these closes no sentence: an introduction, a list, an unclosed bracket, a
# line break inside a formula.
_MATH_OPEN: Final = (":", ",", "{", "(", "[", "=", "&", "\\")
# In code, an expression also continues after a trailing operator.
_CODE_OPEN: Final = (*_MATH_OPEN, "+", "-", "/", "|", "<")

PRESETS: Final[Mapping[str, int]] = {name: 1 << i for i, name in enumerate(get_args(Preset))}
"""Preset name -> bit in ``Delimiters.bits``."""


def closes_sentence(text: str, preset: str) -> bool:
    """Whether a token with this text closes a sentence under ``preset``.

    ``paper``: exactly the six strings of the paper. ``any-newline``: the text ends in a newline.
    ``math`` and ``code``: the same, unless the text before the newline shows that it continues.
    """
    if preset == "paper":
        return text in _PAPER
    if not text.endswith("\n"):
        return False
    if preset == "any-newline":
        return True
    return not text.rstrip().endswith(_MATH_OPEN if preset == "math" else _CODE_OPEN)


class Delimiters:
    """The delimiter presets, compiled for one tokenizer.

    Attributes:
        bits: uint8 per token id; bit ``PRESETS[name]`` is set where the token closes a sentence
            under that preset, so requests of one batch can use different presets.
    """

    def __init__(self, token_texts: Iterable[tuple[int, str]], vocab_size: int) -> None:
        self.bits = bytearray(vocab_size)
        for token_id, text in token_texts:
            if not text.endswith("\n") or token_id >= vocab_size:
                continue
            for name, bit in PRESETS.items():
                if closes_sentence(text, name):
                    self.bits[token_id] |= bit

    def closes(self, token_id: int, preset_bit: int) -> bool:
        return token_id < len(self.bits) and bool(self.bits[token_id] & preset_bit)


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that delimiters and token classes need."""

    def get_vocab(self) -> Mapping[str, int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Raw entry -> token id. Some models' own tokenizers list bytes (Qwen 1, HunYuan)."""
    return {
        raw.decode(errors="replace") if isinstance(raw, bytes) else raw: token_id
        for raw, token_id in tokenizer.get_vocab().items()
    }


# A newline in a raw vocabulary entry: as itself, in byte-level BPE, and in SentencePiece's byte
# fallback. Only these entries are decoded, which is fast for 150,000-token vocabularies.
_NEWLINE_MARKS: Final = ("\n", "Ċ", "<0x0A>")


def newline_tokens(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Token id and decoded text of every vocabulary entry that may contain a newline."""
    ids = [
        token_id
        for raw, token_id in vocabulary_of(tokenizer).items()
        if any(mark in raw for mark in _NEWLINE_MARKS)
    ]
    return [(token_id, tokenizer.decode([token_id])) for token_id in sorted(ids)]


class SentenceTracker:
    """Sentence spans of one request, token by token.

    The device applies the same rules to hidden states (``kernels/reference.py: sentence_step``), so
    span ``i`` here belongs to vector ``i`` there.
    """

    def __init__(self, delimiters: Delimiters, preset: str) -> None:
        self._delimiters, self._bit = delimiters, PRESETS[preset]
        self.closed: list[tuple[int, int]] = []
        self.seen_tokens = 0
        self.open_start = 0
        self.after_delimiter = False

    @property
    def open_tokens(self) -> int:
        """Length of the open sentence."""
        return self.seen_tokens - self.open_start

    def resume(self, closed: Iterable[tuple[int, int]], seen_tokens: int) -> None:
        """Go on behind another tracker's sentences; the next token opens one."""
        self.closed = list(closed)
        self.seen_tokens = self.open_start = seen_tokens

    def feed(self, token_ids: Iterable[int]) -> None:
        """Process the next generated tokens, in order."""
        for token_id in token_ids:
            self.seen_tokens += 1
            is_delimiter = self._delimiters.closes(token_id, self._bit)
            if is_delimiter:
                if self.after_delimiter:
                    self.open_start = self.closed.pop()[0]
                self.closed.append((self.open_start, self.seen_tokens))
                self.open_start = self.seen_tokens
            self.after_delimiter = is_delimiter
