"""How alike sentences of the bundled model's traces are: what ``tau`` can tell apart.

    python -m bench.reasoner.similarity

Cosines of mean final hidden states, as the ``skipkv`` policy computes them, over the solutions of
held-out problems. Appends one row per kind of pair to bench/rows/similarity.csv.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from bench.lib.record import append_row
from bench.reasoner.export import load_model
from bench.reasoner.model import Reasoner
from bench.reasoner.problems import LEVELS, Problem, heldout_problem, solution_passages
from bench.reasoner.vocabulary import build_tokenizer, prompt_text
from sgl_skipkv.cli.progress import track

STEP = re.compile(r"\d+\. (\w+): ")


def kind_of(first: str, second: str) -> str:
    """What a pair of sentences is, the earlier one first."""
    steps = STEP.match(first), STEP.match(second)
    if all(steps):
        same = steps[0].group(1) == steps[1].group(1)  # type: ignore[union-attr]
        if not same:
            return "two different steps"
        return "a step and its repetition" if first == second else "a step, its sum turned round"
    return "two remarks" if not any(steps) else "a step and a remark"


def similarities(model: Reasoner, tokenizer: Tokenizer, problem: Problem) -> dict[str, list[float]]:
    """Cosines of all pairs of sentences of one solution, by kind of pair."""
    prompt = tokenizer.encode(prompt_text(problem.prompt)).ids
    ids = tokenizer.encode("".join(solution_passages(problem))).ids
    with torch.inference_mode():
        hidden = model.hidden(torch.tensor([prompt + ids]))[0, len(prompt) :]
    stops = [i + 1 for i, token in enumerate(ids) if tokenizer.decode([token]).endswith("\n")]
    spans = list(zip([0, *stops[:-1]], stops, strict=True))
    vectors = F.normalize(torch.stack([hidden[a:b].mean(dim=0) for a, b in spans]), dim=-1)
    texts = [tokenizer.decode(ids[a:b]) for a, b in spans]
    cosine = (vectors @ vectors.T).tolist()
    found: dict[str, list[float]] = defaultdict(list)
    for i, j in combinations(range(len(spans)), 2):
        found[kind_of(texts[i], texts[j])].append(cosine[i][j])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    folder = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
    parser.add_argument("--model-path", type=Path, default=folder)
    parser.add_argument("--problems", type=int, default=20, help="per level")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model_path), build_tokenizer()
    merged: dict[str, list[float]] = defaultdict(list)
    for level in LEVELS:
        for index in track(range(arguments.problems), level):
            problem = heldout_problem(level, index)
            for kind, values in similarities(model, tokenizer, problem).items():
                merged[kind] += values
    for kind, values in sorted(merged.items()):
        cuts = torch.tensor(values).quantile(torch.tensor([0.01, 0.5, 0.99])).tolist()
        names = ("cosine_p1", "cosine_p50", "cosine_p99")
        row = {"pair": kind, "pairs": len(values)}
        row |= {name: round(cut, 4) for name, cut in zip(names, cuts, strict=True)}
        append_row("similarity", row)
        print(row)


if __name__ == "__main__":
    main()
