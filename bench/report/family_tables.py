"""Tables of the five families: every policy on right traces under a budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import mean

from bench.lib.policies import compared
from bench.lib.record import recorded
from bench.lib.table_text import Row, table
from bench.reasoner.families.base import SIZES
from bench.reasoner.families.registry import FAMILIES

SHARES = (8, 15, 25, 35)
#: of the table of single cells: the best of the first table, and the best of before
SHOWN = ("distinct", "skipkv+")
#: problems per cell of the two tables; budgets follow from the problems
FEW, MANY = {"short": 10, "middle": 10}, {"short": 200, "middle": 200, "long": 20}
PLAIN = '{"interval": 32}'
Place = tuple[str, str, int]


def cells(problems: Mapping[str, int]) -> tuple[dict[Place, dict[str, Row]], list[Row]]:
    """(family, size, share) -> policy -> its row; and all rows. Budgets of one family and size are
    in the order of the shares.

    Args:
        problems: size -> how many of each family; the sizes of the table.
    """
    rows = [
        row
        for row in recorded("forced")
        if row["model"] == "families"
        and row["kv_params"] == PLAIN
        and int(row["problems"]) == problems.get(row["size"])
    ]
    budgets: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        budgets[row["family"], row["size"]].add(int(row["kv_budget"]))
    found: defaultdict[Place, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        place = row["family"], row["size"]
        order = sorted(budgets[place]).index(int(row["kv_budget"]))
        found[(*place, SHARES[order])][row["policy"]] = row
    return found, rows


def share_right(row: Row) -> float:
    return 100 * int(row["right"]) / int(row["problems"])


def leaderboard() -> str:
    """Policies by their mean rank on short and middle traces; equal ones share a rank."""
    found, rows = cells(FEW)
    policies = [name for name in compared() if all(name in here for here in found.values())]
    ranks: defaultdict[str, list[float]] = defaultdict(list)
    for here in found.values():
        for name in policies:
            own = share_right(here[name])
            better = sum(share_right(here[other]) > own for other in policies)
            equal = sum(share_right(here[other]) == own for other in policies)
            ranks[name].append(better + (equal + 1) / 2)
    lines = []
    for name in sorted(policies, key=lambda one: mean(ranks[one])):
        at = {s: [share_right(found[p][name]) for p in found if p[2] == s] for s in SHARES}
        worst = min((p for p in found if p[2] == 25), key=lambda p: share_right(found[p][name]))
        lines.append(
            [
                f"`{name}`",
                f"{mean(ranks[name]):.1f}",
                *(f"{mean(at[one]):.0f}" for one in SHARES),
                f"{share_right(found[worst][name]):.0f} (`{worst[0]}`, {worst[1]})",
            ]
        )
    header = ["policy", "mean rank", *(f"budget {one}%" for one in SHARES), "worst cell at 25%"]
    return table(header, lines, rows, "forced")


def families() -> str:
    """Single cells of a few policies, with intervals."""
    found, rows = cells(MANY)
    lines = []
    for family in FAMILIES:
        for size in SIZES:
            for name in SHOWN:
                own = [found.get((family, size, one), {}).get(name) for one in SHARES]
                if any(own):
                    shown = ["-" if row is None else right(row) for row in own]
                    lines.append([f"`{family}`", size, f"`{name}`", *shown])
    header = ["family", "size", "policy", *(f"budget {one}%" for one in SHARES)]
    return table(header, lines, rows, "forced")


def right(row: Row) -> str:
    low, high = (100 * float(row[f"wilson_{side}"]) for side in ("low", "high"))
    return f"{row['right']} of {row['problems']} [{low:.0f}, {high:.0f}]"
