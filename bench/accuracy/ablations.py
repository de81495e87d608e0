"""What each part of a policy is worth: one setting changed at a time, through the real server.

    python -m bench.accuracy.ablations                 # 50 hard problems of the bundled model
    python -m bench.accuracy.ablations --only interval

One row per cell in bench/rows/ablations.csv; restartable like ``python -m bench.accuracy``, and
like there FullKV runs first. Which rows belong to which question is in ``ABLATIONS`` and in
docs/ablations.md; the batch size, the layers and the peer have scripts of their own
(``bench/accuracy/batch_size.py``, ``bench/accuracy/layers.py``, ``bench/accuracy/peer.py``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from bench.lib.serving import add_arguments, sweep_over
from bench.lib.sweep import Cell

TIGHT, LOOSE = 0.15, 0.25
BASE = {"interval": 32}
SENTENCES = {**BASE, "tau": 0.85}
# What is left of skipkv+ when it scores nothing: recent tokens, and what stands before a delimiter.
NO_SCORE = {**BASE, "tau": 1.0, "sigma": 0.0, "threshold": 1.0}
Setting = tuple[str, float, dict[str, Any]]
"""Policy, budget as a share of the mean trace, parameters."""


def components() -> list[Setting]:
    """(a) tokens only, then sentences, then what skipkv+ adds, one by one; that without scores."""
    return [
        (policy, share, params)
        for share in (TIGHT, LOOSE)
        for policy, params in (
            ("random", BASE),
            ("rkv", BASE),
            ("skipkv", SENTENCES),
            ("skipkv+", {**SENTENCES, "ending": 0}),
            ("skipkv+", {**SENTENCES, "recent": 0}),
            ("skipkv+", SENTENCES),
            ("skipkv+", NO_SCORE),
        )
    ]


def prompt() -> list[Setting]:
    """(b) the prompt pinned and on top of the budget, or evictable and inside it."""
    free = {"protect_prompt": False, "count_prompt": True}
    policies = (("random", BASE), ("rkv", BASE), ("skipkv", SENTENCES), ("skipkv+", SENTENCES))
    return [
        (policy, LOOSE, {**params, **extra}) for policy, params in policies for extra in ({}, free)
    ]


def thresholds() -> list[Setting]:
    """(d) when two sentences are the same, and importance against redundancy."""
    return [
        *(("skipkv", LOOSE, {**BASE, "tau": tau}) for tau in (0.85, 0.90, 0.93, 0.96, 0.99)),
        *(("skipkv", LOOSE, {**SENTENCES, "sigma": sigma}) for sigma in (0.0, 0.5, 1.0)),
    ]


def interval() -> list[Setting]:
    """(e) how often a request compacts."""
    return [
        (policy, LOOSE, {**params, "interval": tokens})
        for policy, params in (("skipkv", SENTENCES), ("skipkv+", SENTENCES))
        for tokens in (32, 64, 128)
    ]


ABLATIONS: dict[str, Callable[[], list[Setting]]] = {
    ablation.__name__: ablation for ablation in (components, prompt, thresholds, interval)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.set_defaults(problems=50, levels=["hard"])
    parser.add_argument("--only", nargs="+", choices=list(ABLATIONS), default=list(ABLATIONS))
    arguments = parser.parse_args()
    with sweep_over(arguments, "ablations") as sweep:
        cells = []
        for level, full in sweep.baseline().items():
            for policy, share, params in (s for name in arguments.only for s in ABLATIONS[name]()):
                # An evictable prompt is counted; the cache holds the same number of tokens.
                extra = float(full["prompt_tokens"]) if params.get("count_prompt") else 0.0
                budget = round(share * float(full["output_tokens"]) + extra)
                cells.append(Cell(level, policy, budget, json.dumps(params, sort_keys=True)))
        sweep.run(cells)


if __name__ == "__main__":
    main()
