"""Steering: accuracy, length and what the traces are made of, alone and with a KV budget.

    python -m bench.steering --model-path examples/wanderer
    python -m bench.steering --model-path examples/reasoner --only strength

``strength``: every ``alpha_0`` and ``gamma`` without a budget; ``gamma`` 0 is SEAL's fixed one.
``budget``: the shape of the paper's table 2, component by component: tokens, then sentences, then
fixed and adaptive steering. One row per cell in bench/rows/steering.csv, restartable.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.lib.serving import add_arguments, sweep_over
from bench.lib.sweep import Cell, Problem
from sgl_skipkv.cli.steering_extract import KEYWORDS

ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
GAMMAS = (0.0, 0.02, 0.05)
SHARES = (0.08, 0.15, 0.25, 0.35, 0.5)
BASE = {"interval": 32}
SENTENCES = {**BASE, "tau": 0.85}
#: cosine from which two sentences count as the same (bench/rows/similarity.csv)
SIMILAR = 0.85


@dataclass(frozen=True)
class SteeredCell(Cell):
    """A cell with a strength; None for no steering."""

    steering: float | None = None
    gamma: float | None = None

    def sampling_params(self, max_new_tokens: int, seed: int) -> dict[str, Any]:
        params = super().sampling_params(max_new_tokens, seed)
        return {**params, "steering": False if self.steering is None else self.steering}


def strength(arguments: argparse.Namespace, level: str, trace_tokens: float) -> Iterator[Cell]:
    """Each strength by itself, without a budget."""
    for alpha_0 in arguments.alphas:
        for gamma in arguments.gammas:
            yield SteeredCell(level, "full", steering=alpha_0, gamma=gamma)


def budget(arguments: argparse.Namespace, level: str, trace_tokens: float) -> Iterator[Cell]:
    """Component by component, at budgets that are shares of the unsteered trace."""
    tokens, sentences = (json.dumps(params, sort_keys=True) for params in (BASE, SENTENCES))
    alpha_0, gamma = arguments.at
    for share in SHARES:
        kv_budget = round(share * trace_tokens)
        yield SteeredCell(level, "rkv", kv_budget, tokens)
        for policy in ("skipkv", "skipkv+"):
            parameters = sentences if policy == "skipkv" else tokens
            yield SteeredCell(level, policy, kv_budget, parameters)
            yield SteeredCell(level, policy, kv_budget, parameters, steering=alpha_0, gamma=0.0)
            yield SteeredCell(level, policy, kv_budget, parameters, steering=alpha_0, gamma=gamma)


QUESTIONS = {one.__name__: one for one in (strength, budget)}


class Measures:
    """What a trace is made of.

    Args:
        model_path: its final hidden states make sentence vectors, as in the ``skipkv`` policy.
        compared: ids of the problems whose sentences are compared.
    """

    def __init__(self, model_path: str, compared: Sequence[str]) -> None:
        self._compared = frozenset(compared)
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._model = cache(
            lambda: AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        )

    def __call__(self, problem: Problem, text: str) -> dict[str, float]:
        """Shares of non-execution sentences, and of sentences that repeat an earlier one."""
        sentences = [line for line in text.split("\n") if line.strip()]
        words = [set(re.findall(r"\w+", line)) for line in sentences]
        found = {"nonexecution_share": share_of(bool(w & set(KEYWORDS)) for w in words)}
        if problem.id in self._compared:
            found["similar_share"] = self._similar(problem.text, text)
        return found

    def _similar(self, prompt: str, text: str) -> float:
        first = len(self._tokenizer.encode(prompt))
        ids = self._tokenizer.encode(prompt + text)
        with torch.inference_mode():
            hidden = self._model().model(torch.tensor([ids])).last_hidden_state[0, first:]
        stops = [i for i, t in enumerate(ids[first:], 1) if "\n" in self._tokenizer.decode([t])]
        spans = [
            s for s in zip([0, *stops], [*stops, len(ids) - first], strict=True) if s[0] < s[1]
        ]
        vectors = torch.stack([hidden[a:b].mean(dim=0) for a, b in spans])
        unit = torch.nn.functional.normalize(vectors, dim=1)
        earlier = (unit @ unit.T).tril(-1)
        return share_of(bool(row.max() > SIMILAR) for row in earlier)


def share_of(flags: Any) -> float:
    """Share of true values; 0 of none."""
    values = list(flags)
    return sum(values) / max(len(values), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.set_defaults(problems=100, levels=["hard"])
    parser.add_argument("--vector", help="default: steering.safetensors beside the model")
    parser.add_argument(
        "--compared", type=int, default=40, help="problems per cell whose sentences are compared"
    )
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--alphas", nargs="+", type=float, default=list(ALPHAS))
    parser.add_argument("--gammas", nargs="+", type=float, default=list(GAMMAS))
    parser.add_argument(
        "--at", nargs=2, type=float, default=[0.1, 0.02], help="alpha_0 and gamma of `budget`"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the servers need the rest
    vector = Path(arguments.vector or f"{arguments.model_path}/steering.safetensors").resolve()
    compared = [f"{level}-{i:03d}" for level in arguments.levels for i in range(arguments.compared)]
    measures, given = Measures(arguments.model_path, compared), list(arguments.server_flags)
    gammas = {"strength": arguments.gammas, "budget": arguments.at[1:]}
    # Gamma is a setting of the server; cells without steering run on the first.
    for gamma in sorted({0.0}.union(*(gammas[name] for name in arguments.only))):
        flags = [f"steering-vector={vector}", f"steering-gamma={gamma}"]
        arguments.server_flags = [*given, *flags]
        with sweep_over(arguments, "steering", cell_type=SteeredCell, measures=measures) as sweep:
            cells = [
                cell
                for level, row in sweep.baseline().items()
                for name in arguments.only
                for cell in QUESTIONS[name](arguments, level, float(row["output_tokens"]))
            ]
            sweep.run(cell for cell in cells if (cell.gamma or 0.0) == gamma)


if __name__ == "__main__":
    main()
