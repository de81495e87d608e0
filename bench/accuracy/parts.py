"""What each part of the default policy is worth: one part changed at a time, without a server.

    python -m bench.accuracy.parts
    python -m bench.accuracy.parts --problems 30

Right traces under a budget, as ``bench/accuracy/forced.py``, of both bundled models: all families
together, and each level of ``examples/reasoner``. One row per cell in bench/rows/parts.csv; cells
on record are not run again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.lib.cells import run_cells
from bench.lib.forced import (
    FAMILIES_MODEL,
    REASONER_MODEL,
    ForcedModel,
    forced_model,
    reasoner_trace,
)
from bench.reasoner.check_families import encode
from bench.reasoner.families.registry import FAMILIES, heldout_task
from sgl_skipkv.kernels.reference import distinct_values
from sgl_skipkv.policy.distinct import Distinct, middle_layers
from sgl_skipkv.policy.inputs.score_input import ScoreInput

INTERVAL = 32
Trace = tuple[list[int], int]


class Changed(Distinct):
    """The default policy with one part taken out, or in another form; always in plain torch.

    Attributes:
        layers: those that are compared, of as many; None: the middle half.
        alike_heads: whether all heads count the same.
        by_distance, by_ending: whether these parts of the score are in.
    """

    layers: Callable[[int], range] = staticmethod(middle_layers)
    alike_heads, by_distance, by_ending = False, True, True

    def scores_together(self, requests: Sequence[ScoreInput]) -> list[Tensor]:
        return [self.scores(inputs) for inputs in requests]

    def scores(self, inputs: ScoreInput) -> Tensor:
        assert inputs.sentences is not None
        reach = torch.ones_like(inputs.reach) if self.alike_heads else inputs.reach
        layers = [inputs.values(layer) for layer in range(inputs.layers)]
        first, compared = self.candidates(inputs)[0], self.layers(inputs.layers)
        distance, size = distinct_values(
            layers, first, weights=reach / reach.sum(), compared=compared
        )
        place = self._by_place(inputs.sentences.places(inputs.positions), self._old(inputs))
        return self._score(
            distance if self.by_distance else torch.ones_like(distance),
            size,
            place if self.by_ending else place.clamp_max(1.0),
        )


def changed(**attributes: Any) -> type[Changed]:
    wrapped = {name: staticmethod(a) if callable(a) else a for name, a in attributes.items()}
    return type("Changed", (Changed,), wrapped)


def _all_layers(layers: int) -> range:
    return range(layers)


def _first_half(layers: int) -> range:
    return range(layers // 2)


#: what is changed -> class and parameters
VARIANTS: Mapping[str, tuple[type[Distinct], dict[str, Any]]] = {
    "as it is": (Distinct, {}),
    "all heads alike": (changed(alike_heads=True), {}),
    "no distance": (changed(by_distance=False), {}),
    "distance in the first half": (changed(layers=_first_half), {}),
    "distance in all layers": (changed(layers=_all_layers), {}),
    "no size": (Distinct, {"power": 0.0}),
    "size to the power of 1": (Distinct, {"power": 1.0}),
    "size to the power of 8": (Distinct, {"power": 8.0}),
    "no endings": (changed(by_ending=False), {}),
    "old beginnings stay": (Distinct, {"beginning": 0}),
    "beginnings of one token": (Distinct, {"beginning": 1}),
    "beginnings of two tokens": (Distinct, {"beginning": 2}),
    "beginnings of two tokens, endings of four": (Distinct, {"beginning": 2, "ending": 4}),
    "endings of four tokens": (Distinct, {"ending": 4}),
    "at most 6 newer sentences": (changed(most_newer=6), {}),
    "any number of newer sentences": (changed(most_newer=10**6), {}),
    "no recent tokens": (Distinct, {"recent": 0}),
    "32 recent tokens": (Distinct, {"recent": 32}),
    "128 recent tokens": (Distinct, {"recent": 128}),
}
MODELS = {"families": FAMILIES_MODEL, "reasoner": REASONER_MODEL}
#: model, size or level, budget in percent of the mean trace
PLACES = (
    *(("families", "short", 15), ("families", "short", 25), ("families", "middle", 15)),
    *(("families", "middle", 25), ("reasoner", "easy", 25), ("reasoner", "medium", 15)),
    *(("families", "long", 15), ("reasoner", "hard", 15), ("reasoner", "hard", 25)),
)


@dataclass(frozen=True)
class Cell:
    """One variant on the first held-out problems of one kind and size."""

    model: str
    size: str
    percent: int
    variant: str
    problems: int


def traces(model: ForcedModel, cell: Cell) -> list[list[Trace]]:
    """Ids and where the trace starts, of each family of the cell, or of its level."""
    numbers = range(cell.problems)
    if cell.model == "reasoner":
        return [[reasoner_trace(model, cell.size, i) for i in numbers]]
    tasks = [[heldout_task(family, cell.size, i) for i in numbers] for family in FAMILIES]
    return [
        [encode(model.tokenizer, task) for task in tasks_of_family] for tasks_of_family in tasks
    ]


def run(cell: Cell) -> dict[str, float]:
    """Its row, without the setting."""
    forced, right, wrong, count = forced_model(MODELS[cell.model]), 0, 0, 0
    kind, params = VARIANTS[cell.variant]
    policy = kind(kind.Params(interval=INTERVAL, **params))
    for family in traces(forced, cell):
        mean_tokens = sum(len(ids) - prompt for ids, prompt in family) / len(family)
        keys = {"kv_budget": round(cell.percent / 100 * mean_tokens)}
        for ids, prompt in family:
            missed = forced.missed(ids, forced.run(ids, prompt, keys, policy=policy).wrong)
            right, wrong, count = right + (not missed), wrong + missed, count + 1
    return {"traces": count, "right": right, "wrong_tokens": round(wrong / count, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS])
    parser.add_argument("--problems", type=int, default=10, help="of each family, or level")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    places = [place for place in PLACES if place[0] in arguments.models]
    cells = [
        Cell(*place, name, arguments.problems) for place in places for name in arguments.variants
    ]
    run_cells("parts", cells, run, arguments.workers)


if __name__ == "__main__":
    main()
