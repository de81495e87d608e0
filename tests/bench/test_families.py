"""The families of problems: what their traces say, and which old tokens a later step needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer

from bench.reasoner.batches import IGNORE, BatchMaker
from bench.reasoner.check_families import FOLDER, choices, encode
from bench.reasoner.classifier import FamilyClassifier
from bench.reasoner.copying import start_copying
from bench.reasoner.export import load_model
from bench.reasoner.families import needed
from bench.reasoner.families.base import SIZES, Size
from bench.reasoner.families.needed import visible_tokens
from bench.reasoner.families.registry import (
    FAMILIES,
    heldout_digests,
    heldout_task,
    make,
    pieces,
    training_task,
)
from bench.reasoner.model import Reasoner, Shape, rope_table
from bench.reasoner.problems import ITEMS, NAMES
from bench.reasoner.vocabulary import build_tokenizer

EVERY = [(family, size) for family in FAMILIES for size in SIZES]
TRACE_TOKENS: dict[Size, tuple[int, int]] = {
    "short": (200, 450),
    "middle": (700, 1200),
    "long": (2000, 3000),
}
RECENT_TOKENS = 64


def chains(prompt: str) -> int:
    """The answer by going back from what is asked; the same for the other families."""
    asked = re.match(r"How many \w+ does (\w+) have", prompt)
    assert asked

    def count(name: str) -> int:
        given = re.search(rf"\d\. {name} has (\d+)\.", prompt)
        if given:
            return int(given[1])
        fact = re.search(rf"\d\. {name} has (\w+) (plus|minus) (\w+)\.", prompt)
        assert fact
        return count(fact[1]) + count(fact[3]) * (1 if fact[2] == "plus" else -1)

    return count(asked[1])


def result_first(prompt: str) -> int:
    def count(name: str) -> int:
        fact = re.search(rf"\. {name} is (\d+) (over|under) (\w+)\.", prompt)
        if fact:
            return count(fact[3]) + int(fact[1]) * (1 if fact[2] == "over" else -1)
        given = re.search(rf"\. {name} has (\d+)\.", prompt)
        assert given
        return int(given[1])

    return count(_asked(prompt))


def updates(prompt: str) -> int:
    value: dict[str, int] = {}
    for line in prompt.splitlines()[1:-1]:
        name, word, right = re.sub(r"^\d+\. |\.$", "", line).split()
        if word == "is":
            value[name] = int(right)
        else:
            value[name] += value[right] if word == "plus" else -value[right]
    return value[_asked(prompt)]


def notes(prompt: str) -> int:
    value: dict[str, int] = {}
    for name, left, word, right in re.findall(r"(\w+) is (\w+) (plus|minus) (\w+)\.", prompt):
        one, two = (int(x) if x.isdigit() else value[x] for x in (left, right))
        value[name] = one + two if word == "plus" else one - two
    return value[_asked(prompt)]


def search(prompt: str) -> int:
    start = re.search(r"Start at (\w+) with (\d+)\.", prompt)
    assert start
    parent = {
        child: place
        for place, ways in re.findall(r"From (\w+): (.*) then none\.", prompt)
        for child in ways.split(" then ")
    }
    costs = dict(re.findall(r"(\w+) is (\d+)", prompt.split("Costs:")[1]))
    name, cost = _asked(prompt), int(start[2])
    while name != start[1]:
        cost += int(costs[name])
        name = parent[name]
    return cost


def _asked(prompt: str) -> str:
    asked = re.match(r".*: what is (\w+)\?", prompt)
    assert asked
    return asked[1]


SOLVERS: dict[str, Callable[[str], int]] = {
    solver.__name__: solver for solver in (chains, result_first, updates, notes, search)
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(pieces())


@pytest.mark.parametrize(("family", "size"), EVERY)
def test_a_problem_is_a_function_of_its_seed(family: str, size: Size) -> None:
    assert make(family, "a", size) == make(family, "a", size)
    assert make(family, "a", size).prompt != make(family, "b", size).prompt


@pytest.mark.parametrize(("family", "size"), EVERY)
def test_the_answer_follows_from_the_prompt(family: str, size: Size) -> None:
    for index in range(20):
        task = heldout_task(family, size, index)
        assert SOLVERS[family](task.prompt) == task.answer
        assert task.solution.endswith(f".\n\n</think>\nAnswer: {task.answer}")
        sums = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", task.solution)
        assert sums
        for left, sign, right, result in sums:
            assert int(left) + int(right) * (1 if sign == "+" else -1) == int(result)


@pytest.mark.parametrize("size", SIZES)
def test_a_search_backs_out_of_dead_ends_only(size: Size) -> None:
    for index in range(20):
        trace = heldout_task("search", size, index).solution
        cost = {name: int(value) for name, value in re.findall(r"so (\w+) = (\d+)\.", trace)}
        for why, name, place in re.findall(
            r"(Too much|none with \w+), back from (\w+) to (\w+)", trace
        ):
            assert (cost[name] > 24) == (why == "Too much")
            assert re.search(rf" {name} with {place} =", trace)
        assert "Too much" in trace


def test_held_out_problems_are_not_trained_on() -> None:
    drawn = {training_task(1, i, family, 0.1).digest for family in FAMILIES for i in range(50)}
    assert len(heldout_digests()) == 3000 and not drawn & heldout_digests()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_as_far_as_the_held_out_problems(family: str) -> None:
    assert FAMILIES[family].most >= FAMILIES[family].steps["long"][1] - 1


@pytest.mark.parametrize(("family", "size"), EVERY)
def test_sizes(family: str, size: Size, tokenizer: Tokenizer) -> None:
    least, most = TRACE_TOKENS[size]
    for index in range(10):
        task = heldout_task(family, size, index)
        trace = len(tokenizer.encode(task.solution).ids)
        assert least <= trace <= most
        assert len(tokenizer.encode(task.prompt).ids) < trace / 2


def test_a_note_is_needed_long_after_it_was_found(tokenizer: Tokenizer) -> None:
    for index in range(20):
        task = heldout_task("notes", "long", index)
        between = re.search(
            r"so [A-Z]\w+ = \d+\.\n\n(\d+\. [a-z] .*?)\d+\. [A-Z]", task.solution, re.S
        )
        assert between and len(tokenizer.encode(between[1]).ids) >= 1700


def test_what_is_looked_up_is_one_token_everywhere(tokenizer: Tokenizer) -> None:
    wanted = {f" {name}" for name in (*NAMES, *ITEMS)}
    for family, size in EVERY:
        task = heldout_task(family, size, 0)
        text = task.prompt + "\n" + task.solution
        words = {tokenizer.decode([token]) for token in tokenizer.encode(text).ids}
        for name in re.findall(r"\b(?:[A-Z][a-z]+|[a-z])\b", text):
            if name in NAMES or len(name) == 1:
                wanted.add(f" {name}")
                assert f" {name}" in words and name not in words
        assert max(len(w) for w in words if w.strip().isdigit()) <= 3
    assert all(len(tokenizer.encode(piece).ids) == 1 for piece in wanted)


def test_a_first_word_tells_the_family(tokenizer: Tokenizer) -> None:
    assert len(set(FamilyClassifier(tokenizer).first_words)) == len(FAMILIES)


def test_batches_are_a_function_of_seed_and_index(tokenizer: Tokenizer) -> None:
    makers = [BatchMaker(tokenizer, 1, 2048, 100, "families") for _ in range(2)]
    one, two = (maker.batch(5) for maker in makers)
    assert torch.equal(one.ids, two.ids) and torch.equal(one.labels, two.labels)
    classifier = FamilyClassifier(tokenizer)
    kinds = classifier.kinds(one)[one.labels != IGNORE]
    assert set(kinds.unique().tolist()) <= set(range(len(classifier.KINDS)))


def test_late_batches_hide_what_a_trace_does_not_need(tokenizer: Tokenizer) -> None:
    maker = BatchMaker(tokenizer, 1, 2048, 100, "families")
    masked = [batch for batch in map(maker.batch, range(90, 100)) if batch.visible is not None]
    assert masked and maker.batch(89).visible is None
    for batch in masked:
        rows, length = batch.ids.shape
        assert batch.visible is not None and batch.visible.shape == (rows, 1, length, length)
        assert not batch.visible.triu(1).any() and batch.visible.diagonal(dim1=2, dim2=3).all()
        start = int((batch.labels[0] != IGNORE).nonzero()[0]) + 1
        assert batch.visible[0, 0, start:, :start].all()
    assert any(batch.visible.float().mean() < 0.4 for batch in masked if batch.visible is not None)


def test_rules_by_hand() -> None:
    texts = ["P", "so", " p", " =", " 5", ".\n\n", "x", " so", " p", " =", " 7", ".\n\n", "y"]
    texts[1] = " so"
    assert {p for p, _ in needed.first_ends(texts, 1)} == {2, 3, 4, 5}
    assert set(needed.first_ends_and_names(texts, 1)) == {
        *((p, 13) for p in (2, 3, 4, 5)),
        *((p, p + 96) for p in (3, 8)),
    }
    assert set(needed.newest_ends(texts, 1)) == {
        *((p, 12) for p in (2, 3, 4, 5)),
        *((p, 13) for p in (8, 9, 10, 11)),
    }
    visible = visible_tokens(needed.newest_ends(texts, 1), len(texts), 1, 2)
    assert visible[12].nonzero().flatten().tolist() == [0, 8, 9, 10, 11, 12]
    assert visible[7].nonzero().flatten().tolist() == [0, 2, 3, 4, 5, 6, 7]


def test_a_query_sees_so_many_tokens_in_total() -> None:
    """The prompt 0 and 1; 2, 3 and 6 are named, 2 until query 5."""
    kept = [(2, 5), (3, 9), (6, 9)]
    visible = needed.visible_in_total(kept, 9, 2, total=3)
    seen = [set(row.nonzero().flatten().tolist()) for row in visible]
    assert seen[:2] == [{0}, {0, 1}]
    trace = [{2}, {2, 3}, {2, 3, 4}, {3, 4, 5}, {3, 5, 6}, {3, 6, 7}, {3, 6, 8}]
    assert seen[2:] == [{0, 1} | tokens for tokens in trace]
    # More are named than there is room for: the newest of them, and always the query itself.
    crowded = needed.visible_in_total([(at, 9) for at in range(2, 8)], 9, 2, total=2)
    assert set(crowded[7].nonzero().flatten().tolist()) == {0, 1, 6, 7}
    assert set(crowded[8].nonzero().flatten().tolist()) == {0, 1, 6, 7, 8}


def test_an_untrained_model_starts_by_copying() -> None:
    """A line is read again: each head of the second layer sees what follows, more or less often.

    One place of 200 would be right by chance once in 200.
    """
    torch.manual_seed(0)
    model = Reasoner(Shape(vocab=512))
    start_copying(model)
    once = torch.randperm(512)[:200]
    ids = torch.cat((once, once[100:130]))[None]
    cos, sin = rope_table(model.shape, ids.shape[1], ids.device)
    first, second = model.blocks[0], model.blocks[1]
    with torch.inference_mode():
        q, k, _ = second.project(first(model.embed(ids), cos, sin), cos, sin)  # type: ignore
    k = k.repeat_interleave(model.shape.query_heads // model.shape.kv_heads, dim=1)
    seen = (q[0, :, 204:230] @ k[0].transpose(1, 2))[:, :, :204].argmax(-1)
    right = (seen == torch.arange(105, 131)).float().mean(1)
    assert (right >= 0.4).all() and right.max() >= 0.9


# --- the trained model ------------------------------------------------------------------------
trained = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").exists(), reason="examples/families is not trained"
)


@pytest.fixture(scope="module")
def model() -> Reasoner:
    torch.set_num_threads(2)
    return load_model(FOLDER)


def wrong_tokens(
    model: Reasoner, tokenizer: Tokenizer, family: str, rule: needed.Rule | None, problems: int = 2
) -> int:
    """How many next tokens of middle traces come out wrong where only the named tokens stay."""
    wrong = 0
    for index in range(problems):
        ids, start = encode(tokenizer, heldout_task(family, "middle", index))
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        kept = rule(texts, start) if rule else ()
        visible = visible_tokens(kept, len(ids), start, RECENT_TOKENS)
        chosen = choices(model, ids, visible)[start - 1 : -1]
        wrong += int((chosen != torch.tensor(ids[start:])).sum())
    return wrong


@trained
def test_the_folder_holds_these_problems(tokenizer: Tokenizer) -> None:
    records = [json.loads(x) for x in (FOLDER / "heldout.jsonl").read_text().splitlines()]
    assert len(records) == 3000
    for record in records[::100]:
        family, size, index = record["id"].split("-")
        task = heldout_task(family, size, int(index))
        assert (record["prompt"], record["answer"]) == (task.prompt, task.answer)
        assert (record["family"], record["level"]) == (family, size)
    saved = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert saved.get_vocab() == tokenizer.get_vocab()


@trained
@pytest.mark.parametrize("family", FAMILIES)
def test_the_named_tokens_suffice(model: Reasoner, tokenizer: Tokenizer, family: str) -> None:
    own = wrong_tokens(model, tokenizer, family, FAMILIES[family].needed)
    nothing = wrong_tokens(model, tokenizer, family, None)
    assert own <= 10 and nothing >= 10 * max(1, own)  # of a few thousand tokens


@trained
@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("chains", needed.first_beginnings),
        ("result_first", needed.first_ends),
        ("updates", needed.first_ends),
        ("notes", needed.first_ends),
        ("search", needed.first_beginnings),
    ],
)
def test_the_tokens_of_another_family_do_not(
    model: Reasoner, tokenizer: Tokenizer, family: str, rule: needed.Rule
) -> None:
    assert wrong_tokens(model, tokenizer, family, rule) >= 10
