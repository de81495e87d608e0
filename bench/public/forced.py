"""A public model under every policy, on texts that people wrote: what a budget costs in nats.

    python -m bench.public.forced
    python -m bench.public.forced --kinds recall --policies distinct rkv --kv-budgets 256

``bench/public/model.py`` says how to get the model, ``texts.py`` what the texts are. Each is given
as if the model generated it, and the plugin's own runtime compacts (``bench/lib/forced.py``). What
is scored, the second half or the numbers that are asked for, is compared with a full cache. One row
per cell in bench/rows/public.csv; cells on record are not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F

from bench.lib.cells import run_cells
from bench.lib.forced import forced_model
from bench.lib.policies import compared
from bench.public.model import FOLDER, made
from bench.public.texts import KINDS, PROMPT_TOKENS, Text
from sgl_skipkv import policy

#: a quarter of a text; and half of one: at a quarter no policy finds the facts again
KV_BUDGETS = {"prose": (512,), "code": (512,), "recall": (1024,)}


@dataclass(frozen=True)
class Cell:
    """One setting on the texts of one kind."""

    model: str
    kind: str
    policy: str
    kv_budget: int
    kv_params: str


@dataclass(frozen=True)
class Full:
    """One text with a full cache, position by position but the first."""

    text: Text
    most_likely: list[int]
    nats: list[float]


@cache
@torch.inference_mode()
def with_full_cache(folder: Path, kind: str) -> list[Full]:
    """The texts of a kind, and what the model makes of each without a budget."""
    forced = forced_model(folder)
    found = []
    for text in KINDS[kind](forced.tokenizer):
        ids = torch.tensor(text.ids)
        logits = forced.model(ids[None, :-1])[0]
        nats = F.cross_entropy(logits, ids[1:], reduction="none")
        found.append(Full(text, logits.argmax(-1).tolist(), nats.tolist()))
    return found


def run(folder: Path, cell: Cell) -> dict[str, float | str]:
    """Its row, without the setting."""
    keys = {
        "kv_budget": cell.kv_budget,
        "kv_policy": cell.policy,
        "kv_params": json.loads(cell.kv_params),
    }
    texts, forced = with_full_cache(folder, cell.kind), forced_model(folder)
    runs = [forced.run(full.text.ids, PROMPT_TOKENS, keys) for full in texts]
    compared_runs = [*zip(texts, runs, strict=True)]
    over = [_nats(full.text, ran.nats) - _nats(full.text, full.nats) for full, ran in compared_runs]
    return {
        "texts": len(texts),
        "python": platform.python_version(),
        "groups": sum(len(full.text.scored) for full in texts),
        "right": sum(_right(full.text, ran.most_likely) for full, ran in compared_runs),
        "full_right": sum(_right(full.text, full.most_likely) for full in texts),
        "nats": round(fmean(_nats(full.text, ran.nats) for full, ran in compared_runs), 4),
        "full_nats": round(fmean(_nats(full.text, full.nats) for full in texts), 4),
        "least_over_full": round(min(over), 4),
        "most_over_full": round(max(over), 4),
        "mean_kv_tokens": round(fmean(ran.mean_kv_tokens for ran in runs), 1),
        "compaction_s": round(sum(ran.compaction_s for ran in runs), 2),
    }


def _nats(text: Text, nats: Sequence[float]) -> float:
    """Their mean over the scored positions."""
    return fmean(nats[position - 1] for group in text.scored for position in group)


def _right(text: Text, most_likely: Sequence[int]) -> int:
    """How many groups have every token as the most likely one."""
    return sum(
        all(most_likely[position - 1] == text.ids[position] for position in group)
        for group in text.scored
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, default=FOLDER)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--policies", nargs="+", choices=policy.names(), default=list(compared()))
    parser.add_argument("--kv-budgets", type=int, nargs="+", help="of every kind")
    parser.add_argument("--kv-params", type=json.loads, default={}, help="JSON, of all policies")
    parser.add_argument("--workers", type=int, default=2, help="processes of 3 GB each")
    arguments = parser.parse_args()
    folder, params = made(arguments.model_path), json.dumps(arguments.kv_params, sort_keys=True)
    cells = [
        Cell(folder.name, kind, name, kv_budget, params)
        for kind in arguments.kinds
        for kv_budget in arguments.kv_budgets or KV_BUDGETS[kind]
        for name in arguments.policies
    ]
    run_cells("public", cells, partial(run, folder), arguments.workers)


if __name__ == "__main__":
    main()
