"""Training batches: batch `k` of a run is a pure function of the seed and `k`.

That makes a run restartable at any step without saving the state of a generator. Rows of one
batch have about the same length, one problem to a row.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.reasoner.conversations import MAX_TURNS, training_conversation
from bench.reasoner.families.needed import Rule, visible_tokens
from bench.reasoner.families.registry import (
    FAMILIES,
    random_sum,
    training_family,
    training_task,
)
from bench.reasoner.problems import (
    LEVELS,
    heldout_problem,
    optional_checks,
    recall_drill,
    solution_text,
    training_problem,
)
from bench.reasoner.vocabulary import (
    END_OF_TEXT,
    OPEN_REPLY,
    TURN_END,
    TURN_START,
    message_text,
    prompt_text,
    token_id,
)

IGNORE = -100
GROUP = 4
"""Batches that are drawn together and sorted by length before they are cut."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run, up to the share `until` of it.

    Problem size, share of drills, and whether lists of facts end with a last line.
    """

    until: float
    max_steps: int
    drills: float
    last_line: bool


# Recency answers most look-ups of short problems, and a model that starts with them stays there:
# recall at every distance comes first. A last line from the start delays the references; without
# one the model never quite learns when to stop.
CURRICULUM: tuple[Phase, ...] = (
    Phase(0.06, 8, 1.0, False),
    Phase(0.25, 8, 0.25, False),
    Phase(0.45, 14, 0.15, False),
    Phase(0.7708, 23, 0.05, False),
    Phase(1.00, 23, 0.05, True),
)
MIN_STEPS = 2
LENGTH_STEP = 64
TOKENS_PER_STEP = 75
"""Prompt and solution tokens per relevant fact, about; only used to size batches."""
DRILL_PASSAGES_PER_STEP = 3
TOKENS_PER_TURN = 320

LONGEST_TASK_TOKENS = 3300
TOKENS_PER_SUM = 6
SHARES: tuple[tuple[float, float], ...] = ((0.25, 0.15), (0.5, 0.4), (1.00, 1.0))
"""Of the families: until which share of the run, up to which share of the longest problems."""
MASKED = (0.9, 0.4, (48, 129))
"""From which share of the run how many batches are read with the tokens only that their family
needs, and with how many recent ones: what a trace does not need, a model should not read."""
LONG_ONLY = (0.9, 0.6, 0.9)
"""From which share of the run how many groups have nothing below which share: the highest line
numbers stand in the longest problems only."""
SUM_DRILLS: tuple[tuple[float, float], ...] = ((0.5, 0.25), (0.75, 0.15), (1.00, 0.05))
"""Of the families: until which share of the run, how many rows hold nothing but sums."""

Kind = Literal["problems", "optional checks", "conversations", "families"]
"""What a run learns; all but problems go on from a trained model."""


@dataclass(frozen=True, slots=True)
class Batch:
    """ids int64 [B, T]; labels int64 [B, T], already shifted; IGNORE outside the solution.

    ``visible`` bool [B, 1, T, T] says which keys a query sees, where that is not all before it.
    """

    ids: Tensor
    labels: Tensor
    visible: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        visible = None if self.visible is None else self.visible.to(device)
        return Batch(self.ids.to(device), self.labels.to(device), visible)


def phase_at(progress: float) -> Phase:
    """The phase at this point (0..1) of the run."""
    return next(phase for phase in CURRICULUM if progress < phase.until)


class BatchMaker:
    """Draws the problems of a run, encodes them and cuts them into batches.

    ``optional checks`` is the last phase of the curriculum with traces that leave checks out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        batch_tokens: int,
        total: int,
        kind: Kind = "problems",
    ) -> None:
        self.tokenizer = tokenizer
        self.kind = kind
        self.seed = seed
        self.batch_tokens = batch_tokens
        self.total = total
        self.turn_end = token_id(tokenizer, TURN_END)
        self.pad = token_id(tokenizer, END_OF_TEXT)
        self.equals = token_id(tokenizer, " =")
        self._group_rows = lru_cache(maxsize=1)(self._draw_group)

    def batch(self, index: int) -> Batch:
        """The `index`-th batch."""
        group, place = divmod(index, GROUP)
        rows, size, order = self._group_rows(group)
        start = order[place] * size
        batch = self._collate(rows[start : start + size])
        masked_from, often, recent = MASKED
        rng = random.Random(f"masks/{self.seed}/{index}")
        if self.kind == "families" and index / self.total >= masked_from and rng.random() < often:
            return replace(batch, visible=self._visible(batch, rng.randrange(*recent)))
        return batch

    def _draw_group(self, group: int) -> tuple[list[tuple[list[int], list[int]]], int, list[int]]:
        """The rows of GROUP batches, sorted by length; rows per batch; order of the batches."""
        rng = random.Random(f"group/{self.seed}/{group}")
        if self.kind == "conversations":
            rows, size = self._draw_conversations(rng, group)
        elif self.kind == "families":
            rows, size = self._draw_tasks(rng, group)
        else:
            rows, size = self._draw_problems(rng, group)
        rows.sort(key=lambda pair: len(pair[0]))
        return rows, size, rng.sample(range(GROUP), GROUP)

    def _draw_problems(
        self, rng: random.Random, group: int
    ) -> tuple[list[tuple[list[int], list[int]]], int]:
        progress = group * GROUP / self.total
        phase = phase_at(progress) if self.kind == "problems" else CURRICULUM[-1]
        low, high = MIN_STEPS, phase.max_steps
        drill = rng.random() < phase.drills
        # Long problems teach more per row, short ones more per second: take the longer of two
        # draws half of the time.
        steps = max(rng.randint(low, high), rng.randint(low, high) if rng.random() < 0.5 else 0)
        size = max(1, self.batch_tokens // (TOKENS_PER_STEP * steps + 30))
        rows = []
        for row in range(size * GROUP):
            count = min(high, max(low, steps + rng.choice((-1, 0, 1))))
            index = group * 100_000 + row
            if drill:
                rows.append(self._encode_drill(index, count))
            else:
                rows.append(self._encode(index, count, phase.last_line))
        return rows, size

    def _draw_conversations(
        self, rng: random.Random, group: int
    ) -> tuple[list[tuple[list[int], list[int]]], int]:
        turns = max(rng.randint(1, MAX_TURNS), rng.randint(1, MAX_TURNS))
        size = max(1, self.batch_tokens // (TOKENS_PER_TURN * turns))
        rows = range(size * GROUP)
        return [self._encode_conversation(group * 100_000 + row, turns) for row in rows], size

    def _draw_tasks(
        self, rng: random.Random, group: int
    ) -> tuple[list[tuple[list[int], list[int]]], int]:
        """Problems of all families, about as long as each other."""
        progress = group * GROUP / self.total
        most = next(share for until, share in SHARES if progress < until)
        share = max(rng.random(), rng.random() if rng.random() < 0.5 else 0.0) * most
        start, often, least = LONG_ONLY
        if progress >= start and rng.random() < often:
            share = least + (1.0 - least) * share
        size = max(1, int(self.batch_tokens / (LONGEST_TASK_TOKENS * share + 100)))
        drills = next(share for until, share in SUM_DRILLS if progress < until)
        rows = [
            self._encode_sums(rng, int(LONGEST_TASK_TOKENS * share + 100) // TOKENS_PER_SUM)
            if rng.random() < drills
            else self._encode_task(group * 100_000 + row, training_family(rng), share)
            for row in range(size * GROUP)
        ]
        return rows, size

    def _encode_sums(self, rng: random.Random, sums: int) -> tuple[list[int], list[int]]:
        """Sums, as traces write them; what counts are the results."""
        ids = self.tokenizer.encode("".join(random_sum(rng) for _ in range(sums))).ids
        wanted = [
            now if before == self.equals else IGNORE
            for before, now in zip([self.pad, *ids], ids, strict=False)
        ]
        return ids, wanted

    def _encode_task(self, index: int, family: str, share: float) -> tuple[list[int], list[int]]:
        """One problem of a family; what counts is its trace."""
        task = training_task(self.seed, index, family, share)
        prompt = self.tokenizer.encode(prompt_text(task.prompt)).ids
        solution = [*self.tokenizer.encode(task.solution).ids, self.turn_end]
        return [*prompt, *solution], [*[IGNORE] * len(prompt), *solution]

    def _encode(self, index: int, steps: int, last_line: bool) -> tuple[list[int], list[int]]:
        """One problem as (ids, ids that count, IGNORE elsewhere)."""
        problem = training_problem(self.seed, index, steps)
        attempt = 0
        while problem.digest in heldout_digests():
            attempt += 1
            problem = training_problem(self.seed, index + attempt * 10**12, steps)
        problem = replace(problem, last_line=last_line)
        prompt = self.tokenizer.encode(prompt_text(problem.prompt)).ids
        text = solution_text(problem)
        if self.kind == "optional checks":
            text = solution_text(problem, optional_checks(problem.digest))
        solution = [*self.tokenizer.encode(text).ids, self.turn_end]
        return [*prompt, *solution], [*[IGNORE] * len(prompt), *solution]

    def _encode_conversation(self, index: int, turns: int) -> tuple[list[int], list[int]]:
        """One conversation; what counts is what the model writes."""
        ids: list[int] = []
        wanted: list[int] = []

        def add(text: str, *, counts: bool) -> None:
            encoded = self.tokenizer.encode(text).ids
            ids.extend(encoded)
            wanted.extend(encoded if counts else [IGNORE] * len(encoded))

        for turn in training_conversation(self.seed, index, turns):
            told = [message_text("user", turn.question)]
            if turn.lookup is not None:
                told.append(message_text("tool", turn.lookup.text))
            for message, reply in zip(told, turn.replies, strict=True):
                add(f"{message}{OPEN_REPLY}", counts=False)
                add(f"{reply}{TURN_END}", counts=True)
                add("\n", counts=False)
        return ids, wanted

    def _encode_drill(self, index: int, steps: int) -> tuple[list[int], list[int]]:
        """One drill; what counts is the value of a person who was named before."""
        seed = f"drill/{self.seed}/{index}"
        passages = steps * DRILL_PASSAGES_PER_STEP
        people = random.Random(seed).randint(3, min(60, 2 + 2 * passages))
        ids = self.tokenizer.encode(recall_drill(seed, people, passages)).ids
        wanted = [IGNORE] * len(ids)
        named: set[int] = set()
        for place in range(2, len(ids)):
            if ids[place - 1] == self.equals:
                if ids[place - 2] in named:
                    wanted[place] = ids[place]
                named.add(ids[place - 2])
        return ids, wanted

    def _visible(self, batch: Batch, recent: int) -> Tensor:
        """bool [B, 1, T, T]: prompt, recent tokens and what the family needs; drills see all."""
        rows, length = batch.ids.shape
        visible = torch.ones(rows, 1, length, length, dtype=torch.bool).tril()
        for row, ids in enumerate(batch.ids.tolist()):
            rule = self._rules().get(ids[FIRST_WORD])
            if rule:
                start = int((batch.labels[row] != IGNORE).nonzero()[0]) + 1
                texts = [self._texts()[token] for token in ids]
                visible[row, 0] &= visible_tokens(rule(texts, start), length, start, recent)
        return visible

    @cache  # noqa: B019
    def _rules(self) -> dict[int, Rule]:
        """What a family needs, by the first word of its prompts."""
        return {
            first_word(self.tokenizer, family.make("any", "short").prompt): family.needed
            for family in FAMILIES.values()
        }

    @cache  # noqa: B019
    def _texts(self) -> list[str]:
        """The text of every token."""
        size = self.tokenizer.get_vocab_size()
        return [self.tokenizer.decode([x], skip_special_tokens=False) for x in range(size)]

    def _collate(self, rows: list[tuple[list[int], list[int]]]) -> Batch:
        """Pad on the right; a label is the next token."""
        longest = max(len(ids) for ids, _ in rows) - 1
        # Few different shapes: CPU matmuls keep a plan, with its memory, for each.
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        ids = torch.full((len(rows), length), self.pad)
        labels = torch.full((len(rows), length), IGNORE)
        for place, (row, wanted) in enumerate(rows):
            ids[place, : len(row) - 1] = torch.tensor(row[:-1])
            labels[place, : len(row) - 1] = torch.tensor(wanted[1:])
        return Batch(ids, labels)


@lru_cache(maxsize=1)
def heldout_digests() -> frozenset[str]:
    """Hashes of every prompt that the evaluation may use."""
    return frozenset(heldout_problem(level, i).digest for level in LEVELS for i in range(1000))


FIRST_WORD = len((TURN_START, "user", "\n"))
"""Position of a prompt's first word, which tells its family."""


def first_word(tokenizer: Tokenizer, prompt: str) -> int:
    """The token that tells a prompt's family."""
    return int(tokenizer.encode(prompt_text(prompt)).ids[FIRST_WORD])
