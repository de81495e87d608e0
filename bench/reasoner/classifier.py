"""What each token of a training batch is for: accuracy is read, and loss weighted, by that."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.reasoner.batches import FIRST_WORD, Batch, first_word
from bench.reasoner.families.registry import FAMILIES
from bench.reasoner.families.updates import VARIABLES
from bench.reasoner.problems import ITEMS, NAMES
from bench.reasoner.vocabulary import token_id

CHOSEN_WORDS = (
    *(" plus", " minus", " over", " under", " +", " -", " found", " none"),
    *(f" {item}" for item in ITEMS),
)
"""Choices, too: a wrong one makes a trace wrong, as a wrong name does."""


class Classifier:
    """Tells what each predicted token is for: accuracy is read, and loss weighted, by that."""

    KINDS: tuple[str, ...] = (
        "decision",
        "number",
        "verdict",
        "reference",
        "lookup",
        "sum",
        "check",
        "other",
    )
    WEIGHTS: tuple[float, ...] = (1.0, 1.0, 2.0, 1.0, 3.0, 3.0, 0.3, 0.5)
    """A verdict is whose step comes next, or that the fact is not asked about. Look-ups and sums
    are the hard part; a check mostly repeats the step before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.get_vocab_size()

        def those(pieces: list[str]) -> Tensor:
            table = torch.zeros(size, dtype=torch.bool)
            table[[token_id(tokenizer, piece) for piece in pieces]] = True
            return table

        self.is_name = those([f" {name}" for name in NAMES])
        self.is_value = those([f" {number}" for number in range(100)])
        self.is_number = those([str(number) for number in range(100)])
        self.opens_check = those(["Wait", "Alternatively"])
        self.dot = token_id(tokenizer, ".")
        self.before_reference = those([":", " and"])
        self.equals, self.stop = token_id(tokenizer, " ="), token_id(tokenizer, ".\n\n")
        self.so = token_id(tokenizer, " so")
        self.weights = torch.tensor(self.WEIGHTS)

    def to(self, device: torch.device) -> Classifier:
        """Move the tables to another device."""
        for name, table in list(vars(self).items()):
            if isinstance(table, Tensor):
                setattr(self, name, table.to(device))
        return self

    def kinds(self, batch: Batch) -> Tensor:
        """int64 [B, T]: index into KINDS of the token that each position predicts."""
        one, label = batch.ids, batch.labels.clamp(min=0)
        two = torch.roll(one, 1, dims=1)  # one: the token read last; two: the one before it
        three = torch.roll(one, 2, dims=1)
        kind = torch.full_like(label, self.KINDS.index("other"))
        after_equals = self.is_value[label] & (one == self.equals)
        named = self.is_name[two]
        kind[after_equals & ~named] = self.KINDS.index("sum")
        kind[after_equals & named & (three != self.so)] = self.KINDS.index("lookup")
        kind[self.is_name[label] & self.before_reference[one]] = self.KINDS.index("reference")
        kind[(one == self.dot) & self.is_number[two]] = self.KINDS.index("verdict")
        kind[self.in_check(one)] = self.KINDS.index("check")
        kind[one == self.stop] = self.KINDS.index("decision")
        kind[self.is_number[label]] = self.KINDS.index("number")
        return kind

    def in_check(self, ids: Tensor) -> Tensor:
        """bool [B, T]: inside a check. It can copy its step, so it is counted by itself."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        opening = torch.where(ids == self.stop, place, -1).cummax(dim=1).values + 1
        opens_check = self.opens_check[ids.gather(1, opening.clamp(max=ids.shape[1] - 1))]
        return opens_check & (opening <= place)


class FamilyClassifier(Classifier):
    """The same by family: its values, and its choices (whose step, and what kind, comes next)."""

    KINDS = (
        *(f"{family}_{what}" for family in FAMILIES for what in ("values", "choices")),
        "result_first_results",
        "sum",
        "answer",
        "check",
        "other",
    )
    WEIGHTS = (*(weight for _ in FAMILIES for weight in (2.0, 3.0)), 3.0, 5.0, 10.0, 1.0, 0.7)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.is_name[[token_id(tokenizer, f" {name}") for name in VARIABLES]] = True
        self.first_words = [
            first_word(tokenizer, family.make("any", "short").prompt)
            for family in FAMILIES.values()
        ]
        self.opens_result = token_id(tokenizer, "So")
        self.answer, self.colon = token_id(tokenizer, "Answer"), token_id(tokenizer, ":")
        self.result_first = [*FAMILIES].index("result_first")
        self.is_name[[token_id(tokenizer, word) for word in CHOSEN_WORDS]] = True

    def kinds(self, batch: Batch) -> Tensor:
        """int64 [B, T]: index into KINDS of the token that each position predicts."""
        one, label = batch.ids, batch.labels.clamp(min=0)
        three = torch.roll(one, 2, dims=1)
        first_word = one[:, FIRST_WORD : FIRST_WORD + 1].expand_as(one)
        kind = torch.full_like(label, self.KINDS.index("other"))
        chosen = self.is_name[label] | self.is_number[label] | (one == self.stop)
        for index, word in enumerate(self.first_words):
            kind[(first_word == word) & self.is_value[label]] = 2 * index
            kind[(first_word == word) & chosen] = 2 * index + 1
        result = (first_word == self.first_words[self.result_first]) & (three == self.opens_result)
        kind[result & (one == self.equals)] = self.KINDS.index("result_first_results")
        summed = self.is_value[label] & (one == self.equals) & self.is_value[torch.roll(one, 1, 1)]
        kind[summed] = self.KINDS.index("sum")
        kind[(torch.roll(one, 1, 1) == self.answer) & (one == self.colon)] = self.KINDS.index(
            "answer"
        )
        kind[self.in_check(one)] = self.KINDS.index("check")
        return kind
