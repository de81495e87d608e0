"""Adaptive steering: at which tokens the vector is added, and how strongly.

    strength = alpha_0 + gamma * N_o

at every delimiter inside the thinking part, where ``N_o`` counts the request's closed sentences
that contain a keyword (SkipKV, arXiv 2512.07993, section 4.2). The device counts in each decode
step (``Steerer``). The CPU computes the same count (``Schedule``) for a prefill that recomputes
generated tokens, and for the request's summary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from sgl_skipkv.config import SettingError
from sgl_skipkv.kernels.on_device import uses_triton
from sgl_skipkv.kernels.reference import DELIMITER, KEYWORD, THINK_END, THINK_START, steering_step
from sgl_skipkv.recording.sentences import PRESETS, Delimiters, Tokenizer, vocabulary_of
from sgl_skipkv.steering.vector import SteeringVector

#: a leading space in the vocabularies of byte-level BPE and SentencePiece
_SPACES: Final = "Ġ▁ "
_THINK: Final = {"<think>": THINK_START, "</think>": THINK_END}


class TokenClasses:
    """Which tokens are delimiters, keywords and thinking marks, for one tokenizer.

    A keyword matches with and without a leading space. A model without both thinking tokens counts
    as always thinking.

    Args:
        preset: of the delimiters that close a sentence.
        keywords: each a single token of the vocabulary.

    Raises:
        SettingError: a keyword is not a single token, so it could never be counted.
    """

    def __init__(
        self, tokenizer: Tokenizer, delimiters: Delimiters, preset: str, keywords: Sequence[str]
    ) -> None:
        size = len(delimiters.bits)
        vocabulary = {raw: i for raw, i in vocabulary_of(tokenizer).items() if i < size}
        preset_bit, missing = PRESETS[preset], dict.fromkeys(keywords)
        self.bits = bytearray(DELIMITER if bits & preset_bit else 0 for bits in delimiters.bits)
        for raw, token_id in vocabulary.items():
            if (word := raw.lstrip(_SPACES)) in keywords:
                self.bits[token_id] |= KEYWORD
                missing.pop(word, None)
        if missing:
            expected = "words that are single tokens of this model's vocabulary"
            choices = "other keywords, or a vector with other keywords"
            raise SettingError("keywords", expected, ",".join(missing), choices)
        self.has_thinking = vocabulary.keys() >= _THINK.keys()
        if self.has_thinking:
            for name, bit in _THINK.items():
                self.bits[vocabulary[name]] |= bit

    def thinks_after(self, prompt_ids: Sequence[int]) -> bool:
        """Whether generation starts inside the thinking part."""
        marks = (self[token_id] & (THINK_START | THINK_END) for token_id in reversed(prompt_ids))
        last_mark = next(filter(None, marks), 0 if self.has_thinking else THINK_START)
        return bool(last_mark & THINK_START)

    def __getitem__(self, token_id: int) -> int:
        return self.bits[token_id] if 0 <= token_id < len(self.bits) else 0


class Schedule:
    """One request's steering strength, token by token: ``steering_step`` on the CPU."""

    def __init__(self, classes: TokenClasses, alpha_0: float, gamma: float, thinks: bool) -> None:
        self._classes, self.alpha_0, self._gamma = classes, alpha_0, gamma
        self.thinks = thinks
        self.keyword_seen = False
        self.nonexecution_sentences = 0

    def copy(self) -> Schedule:
        return copy.copy(self)

    @property
    def alpha(self) -> float:
        """The strength at the next delimiter, if no keyword comes before it."""
        return self.alpha_0 + self._gamma * self.nonexecution_sentences

    def feed(self, token_ids: Iterable[int]) -> list[float]:
        """Process the next generated tokens; returns the vector's factor at each, 0.0 for none."""
        factors = []
        for token_id in token_ids:
            bits = self._classes[token_id]
            self.keyword_seen |= bool(bits & KEYWORD)
            self.thinks = (self.thinks or bool(bits & THINK_START)) and not bits & THINK_END
            if bits & DELIMITER:
                self.nonexecution_sentences += self.keyword_seen
                self.keyword_seen = False
            factors.append(self.alpha if bits & DELIMITER and self.thinks else 0.0)
        return factors


class Steerer:
    """The vector and fixed tables on the device, one entry per row of the page table.

    Attributes:
        steered_requests: how many run; with none, a step that is not captured skips steering.
        factors: float32 [tokens], of the prefill being launched; None: it is not steered.
        decoding: its rows that decode, and their tokens; None: none of them is steered.
    """

    def __init__(
        self, vector: SteeringVector, classes: TokenClasses, gamma: float, *, device: torch.device
    ) -> None:
        self.classes, self.gamma = classes, gamma
        self.layer = vector.origin.layer
        self.steered_requests = 0
        self.factors: Tensor | None = None
        self.decoding: tuple[slice, slice] | None = None
        self._vector = vector.values.to(device)
        self._bits = torch.frombuffer(classes.bits, dtype=torch.uint8).to(device)
        self.use_rows(0)

    def use_rows(self, rows: int) -> None:
        """Allocate the tables, once the number of page-table rows is known."""
        device = self._vector.device
        self._tables = {
            "steered": torch.zeros(rows, dtype=torch.bool, device=device),
            "alpha_0": torch.zeros(rows, device=device),
            "nonexecution": torch.zeros(rows, dtype=torch.int32, device=device),
            "keyword_seen": torch.zeros(rows, dtype=torch.bool, device=device),
            "thinking": torch.zeros(rows, dtype=torch.bool, device=device),
        }

    @property
    def steers_prefill(self) -> bool:
        """Whether the prefill being launched has tokens or rows that are steered."""
        return self.factors is not None or self.decoding is not None

    def schedule(self, alpha_0: float, prompt_ids: Sequence[int]) -> Schedule:
        """A request's schedule before its first generated token."""
        return Schedule(self.classes, alpha_0, self.gamma, self.classes.thinks_after(prompt_ids))

    def start(self, row: int, schedule: Schedule) -> None:
        """Set the row's state for its next decode step. On the stream of the forward pass."""
        state = {
            "steered": True,
            "alpha_0": schedule.alpha_0,
            "nonexecution": schedule.nonexecution_sentences,
            "keyword_seen": schedule.keyword_seen,
            "thinking": schedule.thinks,
        }
        for name, value in state.items():
            self._tables[name][row].fill_(value)  # an assignment would wait for the device

    def stop(self, row: int) -> None:
        """Stop steering the row: its request has lost it."""
        self._tables["steered"][row].fill_(False)

    def decode(self, residual: Tensor, rows: Tensor, token_ids: Tensor) -> None:
        """Steer one decode step. residual: float [B, D]; rows, token_ids: int [B]."""
        if uses_triton(residual.device):
            from sgl_skipkv.kernels.steering_add import steering_add

            step = (residual, self._vector, rows, token_ids)
            steering_add(*step, bits=self._bits, gamma=self.gamma, **self._tables)
        else:
            classes = self._bits[token_ids]
            steering_step(residual, self._vector, rows, classes, gamma=self.gamma, **self._tables)

    def prefill(self, residual: Tensor) -> None:
        """Steer the prefill for which ``factors`` was set. residual: float [tokens, D]."""
        assert self.factors is not None
        factors = self.factors.unsqueeze(1)
        steered = (residual.float() + factors * self._vector).to(residual.dtype)
        residual.copy_(torch.where(factors != 0, steered, residual))
