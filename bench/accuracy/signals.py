"""What tells the tokens that a trace needs later from all others, at full cache.

    python -m bench.accuracy.signals

For each family, and for the reasoner, the numbers that the family's rule names
(``bench/reasoner/families/needed.py``) against all other tokens of right middle traces: the area
under the curve of the size of values, all heads alike or weighted by their reach, and of the
attention that a token is going to receive from more than ``AWAY`` tokens away, summed over all
heads or of the best single one. Then, layer by layer, how far the values of two mentions of the
same number lie apart, of the same name and of two names, in mean lengths. One row each in
bench/rows/signals.csv.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from statistics import mean

import torch
from torch import Tensor

from bench.lib.forced import (
    FAMILIES_MODEL,
    REASONER_MODEL,
    ForcedModel,
    forced_model,
    reasoner_task,
)
from bench.lib.record import append_row
from bench.reasoner.check_families import encode
from bench.reasoner.families.base import Task
from bench.reasoner.families.needed import Rule, first_ends
from bench.reasoner.families.registry import FAMILIES, heldout_task
from bench.reasoner.model import Block
from sgl_skipkv.cli.progress import track

AWAY = 48
_MENTION = re.compile(r"^ ?(=|has|is)$")


class Seen:
    """One right trace at full cache.

    Attributes:
        texts: of all tokens. start: of the trace.
        values: float [L, T, Hkv, d]. received: float [L, Hq, T], from queries far behind.
    """

    @torch.inference_mode()
    def __init__(self, forced: ForcedModel, task: Task) -> None:
        ids, self.start = encode(forced.tokenizer, task)
        self.texts = [
            forced.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids
        ]
        n, model = len(ids), forced.model
        at = torch.arange(n)
        future, far = at > at[:, None], at < at[:, None] - AWAY
        x, values, received = model.embed(torch.tensor([ids])), [], []
        for block in model.blocks:
            assert isinstance(block, Block)
            q, k, v = block.project(x, forced.cos[:n], forced.sin[:n])
            groups = q.shape[1] // k.shape[1]
            logits = q @ k.repeat_interleave(groups, dim=1).transpose(2, 3) * q.shape[3] ** -0.5
            attention = logits.masked_fill(future, -torch.inf).softmax(dim=-1)
            received.append(attention[0].where(far, 0.0)[:, self.start :].sum(dim=1))
            values.append(v[0].transpose(0, 1))
            x = block.finish(x, attention @ v.repeat_interleave(groups, dim=1))
        self.values, self.received = torch.stack(values), torch.stack(received)

    @property
    def sizes(self) -> Tensor:
        """float [L, Hkv, T], in mean lengths."""
        lengths = self.values.norm(dim=3)
        return (lengths / lengths[:, self.start :].mean(dim=1, keepdim=True)).transpose(1, 2)

    def needed(self, rule: Rule) -> Tensor:
        """bool [generated tokens], the numbers that the rule names."""
        is_needed = torch.zeros(len(self.texts), dtype=torch.bool)
        for position, _ in rule(self.texts, self.start):
            is_needed[position] = self.texts[position].strip().isdigit()
        return is_needed[self.start :]


def area(signal: Tensor, needed: Tensor) -> float:
    """That a needed token has more than another one, a draw counting half."""
    needed_values, others = signal[needed][:, None], signal[~needed]
    return float(
        ((needed_values > others).float() + 0.5 * (needed_values == others).float()).mean()
    )


def signals(seen: Seen, needed: Tensor, reach: Tensor) -> Iterator[tuple[str, float]]:
    """Name and area under the curve."""
    sizes, start = seen.sizes, seen.start
    weights = (reach / reach.sum())[..., None]
    yield "size of values, all heads alike", area(sizes.mean(dim=(0, 1))[start:], needed)
    yield "size of values, heads by reach", area((sizes * weights).sum(dim=(0, 1))[start:], needed)
    heads = seen.received.flatten(0, 1)[:, start:]
    yield "attention to come, all heads", area(heads.sum(dim=0), needed)
    yield "attention to come, best head", max(area(head, needed) for head in heads)


def apart(seen: Seen) -> Iterator[tuple[int, bool, float]]:
    """Layer, whether the names are the same, and distance, of pairs of mentions of one number."""
    texts, units = (
        seen.texts,
        seen.values / seen.values.norm(dim=3)[:, seen.start :].mean(dim=1)[:, None, :, None],
    )
    mentions = defaultdict(list)
    for at in range(seen.start + 2, len(texts)):
        if texts[at].strip().isdigit() and _MENTION.match(texts[at - 1]):
            if texts[at - 2].strip().isalpha():
                mentions[texts[at]].append(at)
    for places in mentions.values():
        for place, other in combinations(places, 2):
            gaps = (units[:, place] - units[:, other]).square().sum(dim=2).mean(dim=1).sqrt()
            for layer, gap in enumerate(gaps.tolist()):
                yield layer, texts[place - 2] == texts[other - 2], gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=4, help="of each family")
    arguments = parser.parse_args()
    numbers = range(arguments.problems)
    families, reasoner = forced_model(FAMILIES_MODEL), forced_model(REASONER_MODEL)
    kinds = [
        (name, families, family.needed, [heldout_task(name, "middle", i) for i in numbers])
        for name, family in FAMILIES.items()
    ]
    kinds.append(("reasoner", reasoner, first_ends, [reasoner_task("medium", i) for i in numbers]))
    for kind, forced, rule, tasks in kinds:
        areas, gaps = defaultdict(list), defaultdict(list)
        for task in track(tasks, kind):
            seen = Seen(forced, task)
            for name, value in signals(seen, seen.needed(rule), forced.measured[1]):
                areas[name].append(value)
            for layer, same, gap in apart(seen):
                gaps[f"layer {layer}, {'one name' if same else 'two names'}"].append(gap)
        for name, values in [*areas.items(), *sorted(gaps.items())]:
            row = {"kind": kind, "signal": name, "value": round(mean(values), 3)}
            append_row("signals", {**row, "traces": arguments.problems})


if __name__ == "__main__":
    main()
