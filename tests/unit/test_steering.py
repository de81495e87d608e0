"""When the vector is added and how strongly: the device's tables and the CPU's schedule against the
definition, and the rows that nobody steers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_files import WIDTH, origin

from sgl_skipkv.config import SettingError
from sgl_skipkv.kernels.reference import DELIMITER, KEYWORD, THINK_END, THINK_START
from sgl_skipkv.recording.sentences import Delimiters
from sgl_skipkv.steering.steerer import Schedule, Steerer, TokenClasses
from sgl_skipkv.steering.vector import SteeringVector

OFTEN = settings(max_examples=200)
CPU = torch.device("cpu")
GAMMA = 0.25
# id -> text; 3 and 4 are one keyword with and without its space
VOCABULARY = ("word", "\n", ".\n\n", "Wait", "ĠWait", "▁again", "<think>", "</think>", "Waiting")
NEWLINES = [(1, "\n"), (2, ".\n\n")]


def classes(
    vocabulary: tuple[str, ...] = VOCABULARY, keywords: tuple[str, ...] = ("Wait", "again")
) -> TokenClasses:
    tokenizer = SimpleNamespace(get_vocab=lambda: {text: i for i, text in enumerate(vocabulary)})
    return TokenClasses(tokenizer, Delimiters(NEWLINES, len(vocabulary)), "math", keywords)


def steerer(rows: int = 4) -> Steerer:
    draw = torch.Generator().manual_seed(0)
    vector = SteeringVector(torch.randn(WIDTH, generator=draw), origin())
    made = Steerer(vector, classes(), GAMMA, device=CPU)
    made.use_rows(rows)
    return made


def defined_factors(tokens: list[int], alpha_0: float, thinks: bool) -> tuple[list[float], int]:
    """Word by word: a sentence runs to its delimiter; N_o counts those with a keyword."""
    factors, sentence, count = [], [], 0
    for token in tokens:
        sentence.append(token)
        thinks = {6: True, 7: False}.get(token, thinks)
        if token not in (1, 2):
            factors.append(0.0)
            continue
        count += any(word in (3, 4, 5) for word in sentence)
        sentence = []
        factors.append(alpha_0 + GAMMA * count if thinks else 0.0)
    return factors, count


TOKENS = st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=60)


def test_classes_know_both_forms_of_a_keyword() -> None:
    found = [classes()[token] for token in range(len(VOCABULARY))]
    expected = [0, DELIMITER, DELIMITER, KEYWORD, KEYWORD, KEYWORD, THINK_START, THINK_END, 0]
    assert found == expected
    assert classes()[999] == classes()[-1] == 0, "an id past the vocabulary means nothing"


def test_a_keyword_that_could_never_be_counted_is_refused() -> None:
    with pytest.raises(SettingError, match=r"keywords: expected .* got 'Hmm'"):
        classes(keywords=("Wait", "Hmm"))


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [([], False), ([0, 6], True), ([6, 7], False), ([6, 7, 6, 0], True), ([7, 0], False)],
)
def test_thinking_begins_where_the_prompt_left_it(prompt: list[int], thinks: bool) -> None:
    assert classes().thinks_after(prompt) == thinks
    without = tuple(text for text in VOCABULARY if "think" not in text)
    assert classes(without).thinks_after(prompt), "a model without thinking tokens always thinks"


@OFTEN
@given(TOKENS, st.floats(-2, 2, width=16), st.booleans())
def test_the_schedule_is_the_definition(tokens: list[int], alpha_0: float, thinks: bool) -> None:
    schedule = Schedule(classes(), alpha_0, GAMMA, thinks)
    factors, count = defined_factors(tokens, alpha_0, thinks)
    assert schedule.feed(tokens) == factors
    assert schedule.nonexecution_sentences == count
    assert schedule.alpha == alpha_0 + GAMMA * count


@OFTEN
@given(TOKENS, st.integers(0, 60))
def test_a_schedule_goes_on_from_its_copy(tokens: list[int], cut: int) -> None:
    whole = Schedule(classes(), 1.0, GAMMA, True)
    first = whole.copy()
    second_half = first.feed(tokens[:cut]) + first.copy().feed(tokens[cut:])
    assert second_half == whole.feed(tokens)


@OFTEN
@given(TOKENS, TOKENS, st.floats(-2, 2, width=16), st.integers(0, 20))
def test_the_device_adds_what_the_schedule_says(
    steered: list[int], other: list[int], alpha_0: float, recomputed: int
) -> None:
    """Rows 1 and 3 are steered, 2 is not, and padding repeats row 0; the start may be a
    recomputation. Bit for bit on rows that nothing is added to."""
    table, longest = steerer(), max(len(steered), len(other))
    for row, prompt in ((1, [6]), (3, [])):
        schedule = table.schedule(alpha_0, prompt)
        schedule.feed(steered[:recomputed])
        table.start(row, schedule)
    expected = {
        1: defined_factors(steered, alpha_0, True)[0],
        2: [0.0] * longest,
        3: defined_factors(steered, alpha_0, False)[0],
    }
    draw = torch.Generator().manual_seed(len(steered))
    for step in range(recomputed, longest):
        tokens = {row: (other if row == 2 else steered) for row in (1, 2, 3)}
        rows = [row for row in (3, 1, 2) if step < len(tokens[row])] + [0, 0]
        ids = [tokens[row][step] if row else 1 for row in rows]
        residual = torch.randn(len(rows), WIDTH, generator=draw)
        before = residual.clone()
        table.decode(residual, torch.tensor(rows), torch.tensor(ids))
        for i, row in enumerate(rows):
            factor = expected[row][step] if row else 0.0
            exact = before[i].double() + factor * table._vector.double()
            if factor == 0:
                assert torch.equal(residual[i], before[i])
            else:
                assert (residual[i] - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * 10
    if recomputed < len(steered):
        assert table._tables["nonexecution"][1] == defined_factors(steered, alpha_0, True)[1]


def test_a_stopped_row_is_left_alone_and_half_precision_rounds_once() -> None:
    table = steerer()
    table.start(1, table.schedule(1.5, [6]))
    residual = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    moved = (residual.double() + 1.5 * table._vector.double()).bfloat16()
    steered = residual.clone()
    table.decode(steered, torch.tensor([1]), torch.tensor([1]))
    assert torch.equal(steered, moved)
    table.stop(1)
    again = residual.clone()
    table.decode(again, torch.tensor([1]), torch.tensor([1]))
    assert torch.equal(again, residual)


@pytest.mark.parametrize("strength", [1.5, -1.5])
def test_a_prefill_is_steered_either_way(strength: float) -> None:
    table, residual = steerer(), torch.randn(3, WIDTH)
    before, table.factors = residual.clone(), torch.tensor([0.0, strength, 0.0])
    table.prefill(residual)
    assert torch.equal(residual[[0, 2]], before[[0, 2]])
    assert torch.allclose(residual[1], before[1] + strength * table._vector)
