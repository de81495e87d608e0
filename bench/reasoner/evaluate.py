"""Measure an exported model on its held-out problems, without a server.

    python bench/reasoner/evaluate.py --model examples/reasoner
    python bench/reasoner/evaluate.py --model examples/reasoner --policy streaming --kv-budget 64
    python bench/reasoner/evaluate.py --model examples/reasoner --similarity

Greedy decoding. The policies are the stand-ins of `evictors.py`; the prompt always stays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from decode import Eviction, generate
from evictors import make_evictor, sentence_spans, sentence_vectors
from export import load_model
from model import Reasoner
from problems import LEVELS, Problem, heldout_problem, solution_passages
from problems import solution_text as rule_text
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from vocabulary import TURN_END, prompt_text, token_id

ANSWER = re.compile(r"</think>\nAnswer: (\d+)$")


def read_answer(text: str) -> int | None:
    """The answer of a reply that ended by itself, or None."""
    match = ANSWER.search(text)
    return int(match.group(1)) if match else None


def decode_problems(
    model: Reasoner,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    eviction: Eviction | None,
    max_new: int,
    batch: int,
) -> list[list[int]]:
    """Greedy replies as token ids, in the order of the problems."""
    end = token_id(tokenizer, TURN_END)
    replies: list[list[int]] = []
    for start in tqdm(range(0, len(problems), batch), leave=False):
        part = problems[start : start + batch]
        prompts = [tokenizer.encode(prompt_text(problem.prompt)).ids for problem in part]
        replies += generate(model, prompts, end, max_new, eviction)
    return replies


def report(level: str, problems: Sequence[Problem], replies: list[str], sizes: list[int]) -> str:
    """One line: accuracy, traces that follow the rule word for word, lengths, open ends."""
    answers = [read_answer(reply) for reply in replies]
    right = sum(got == problem.answer for got, problem in zip(answers, problems, strict=True))
    same = sum(text == rule_text(p) for text, p in zip(replies, problems, strict=True))
    cuts = sorted(sizes)
    spread = "/".join(str(cuts[round(q * (len(cuts) - 1))]) for q in (0, 0.05, 0.5, 0.95, 1))
    return (
        f"{level:8} right {right}/{len(problems)} ({100 * right / len(problems):.1f}%)  "
        f"as the rule {same}  no answer {answers.count(None)}  "
        f"tokens min/5/50/95/max {spread}  mean {sum(sizes) / len(sizes):.0f}"
    )


def first_error(problem: Problem, reply: str) -> str | None:
    """The first passage that states a wrong result, or None when every result is right."""
    value = {fact.name: fact.value for fact in problem.steps}
    for passage in reply.split("\n\n"):
        for name, number in re.findall(r"(\w+) = (\d+)", passage):
            if name in value and value[name] != int(number):
                return passage
    return None


def similarities(model: Reasoner, tokenizer: Tokenizer, problem: Problem) -> dict[str, list[float]]:
    """Cosines of sentence vectors of the rule's trace: by kind of pair."""
    prompt = tokenizer.encode(prompt_text(problem.prompt)).ids
    passages = list(solution_passages(problem))
    ids = tokenizer.encode("".join(passages)).ids
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor([prompt + ids]))[0, len(prompt) :]
    closes = torch.tensor(["\n" in tokenizer.decode([token]) for token in ids])
    spans = sentence_spans(closes)
    texts = [tokenizer.decode(ids[start:stop]).strip() for start, stop in spans]
    cosine: Tensor = sentence_vectors(hidden, spans) @ sentence_vectors(hidden, spans).T
    owner = [re.search(r"\b(?:For|check|redo) (\w+)", text) for text in texts]
    pairs: dict[str, list[float]] = defaultdict(list)
    for second in range(len(texts)):
        for first in range(second):
            kinds = {text.startswith("For ") for text in (texts[first], texts[second])}
            one, two = owner[first], owner[second]
            same = one is not None and two is not None and one.group(1) == two.group(1)
            if kinds == {True}:
                again = "same words" if texts[first] == texts[second] else "turned round"
                kind = f"step and its check, {again}" if same else "two different steps"
            elif kinds == {False}:
                kind = "two openings of checks"
            else:
                kind = "step and opening"
            pairs[kind].append(float(cosine[first, second]))
    return pairs


def print_similarities(model: Reasoner, tokenizer: Tokenizer, count: int) -> None:
    """Quantiles of the cosines over `count` problems of each level."""
    merged: dict[str, list[float]] = defaultdict(list)
    for level in LEVELS:
        for index in range(count):
            for kind, values in similarities(
                model, tokenizer, heldout_problem(level, index)
            ).items():
                merged[kind] += values
    for kind, values in sorted(merged.items()):
        cuts = torch.tensor(values).quantile(torch.tensor([0.01, 0.05, 0.5, 0.95, 0.99])).tolist()
        shown = " ".join(f"{cut:.3f}" for cut in cuts)
        print(f"{kind:34} n={len(values):6}  1/5/50/95/99%: {shown}")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS))
    parser.add_argument("--limit", type=int, default=200, help="problems per level")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument(
        "--policy", default="full", help="full, streaming, random, statements, sentences"
    )
    parser.add_argument("--kv-budget", type=int)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--tau", type=float, default=0.95, help="of the policy `sentences`")
    parser.add_argument("--max-new", type=int, default=3000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--similarity", action="store_true", help="cosines of sentences, no decoding"
    )
    parser.add_argument("--errors", action="store_true", help="show the first wrong passages")
    parser.add_argument("--out", type=Path, help="append one JSON line per reply")
    args = parser.parse_args()
    if (args.policy == "full") != (args.kv_budget is None):
        parser.error("--kv-budget goes with every --policy but full")
    return args


def main() -> None:
    """Decode the held-out problems and print one line per level."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_model(args.model).to(getattr(torch, args.dtype))
    if args.similarity:
        print_similarities(model, tokenizer, min(args.limit, 20))
        return
    eviction = None
    if args.policy != "full":
        evictor = make_evictor(args.policy, tokenizer, args.tau)
        eviction = Eviction(evictor, args.kv_budget, args.interval)
    for level in args.levels:
        start = time.monotonic()
        problems = [heldout_problem(level, index) for index in range(args.limit)]
        ids = decode_problems(model, tokenizer, problems, eviction, args.max_new, args.batch)
        replies = [tokenizer.decode(reply, skip_special_tokens=False) for reply in ids]
        sizes = [len(reply) + 1 for reply in ids]
        print(report(level, problems, replies, sizes), f" {time.monotonic() - start:.0f}s")
        for index, (problem, reply) in enumerate(zip(problems, replies, strict=True)):
            wrong = first_error(problem, reply)
            if args.errors and wrong is not None:
                print(f"  {level}-{index:03d} {wrong!r}")
            if args.out:
                row = {"id": f"{level}-{index:03d}", "reply": reply, "answer": problem.answer}
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
