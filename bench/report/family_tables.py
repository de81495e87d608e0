"""Tables of the five families, and of what the default policy is made of."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import mean

from bench.lib.policies import compared
from bench.lib.record import recorded
from bench.lib.table_text import Row, table
from bench.reasoner.families.base import SIZES
from bench.reasoner.families.registry import FAMILIES
from bench.report.accuracy_tables import right as accuracy
from bench.report.accuracy_tables import share

SHARES = (8, 15, 25, 35)
#: of the table of single cells: the best of the first table, and the best of before
SHOWN = ("distinct", "skipkv+")
PLAIN = '{"interval": 32}'
#: problems per cell of the comparison of all policies; budgets follow from the problems
COMPARED = "10"
HEAD_SHARES = (15, 25, 35, 50)
#: problems of the rows about budgets that set themselves, and the fixed budgets beside them
SET_THEMSELVES, FIXED = "20", (20, 25, 30, 35, 40, 50)
Place = tuple[str, str, int]


def cells() -> tuple[dict[Place, dict[str, Row]], list[Row]]:
    """(family, size, share) -> policy -> its row, of the comparison of all policies; and all rows.
    Budgets of one family and size are in the order of the shares."""
    rows = [
        row
        for row in recorded("forced")
        if row["model"] == "families"
        and row["size"] != "long"
        and row["kv_params"] == PLAIN
        and row["problems"] == COMPARED
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
    found, rows = cells()
    policies = [name for name in compared() if all(name in here for here in found.values())]
    ranks: defaultdict[str, list[float]] = defaultdict(list)
    for here in found.values():
        for name in policies:
            own = share_right(here[name])
            better = sum(share_right(here[other]) > own for other in policies)
            equal = sum(share_right(here[other]) == own for other in policies)
            ranks[name].append(better + (equal + 1) / 2)
    launched = {row["policy"]: row["operations_16"] for row in recorded("launches")}
    spent = {row["metric"].split()[3]: row["ratio_p50"] for row in recorded("compaction_cost")}
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
                launched[name],
                spent.get(name, "1"),
            ]
        )
    header = ["policy", "mean rank", *(f"budget {one}%" for one in SHARES), "worst cell at 25%"]
    header += ["operations per compaction", "time over `rkv`'s"]
    return table(header, lines, rows, "forced")


def families() -> str:
    """Answers through the real server, of the families' model: family, size and policy down."""
    rows = [
        row
        for row in recorded("accuracy")
        if (row["model"], row["sampling"]) == ("families", "greedy")
    ]
    full = {row["level"]: row for row in rows if row["policy"] == "full"}
    lines = []
    for level in (f"{family}-{size}" for size in SIZES for family in FAMILIES):
        if level not in full:
            continue
        name, _, size = level.rpartition("-")
        start = [f"`{name}`", f"{size}, {float(full[level]['output_tokens']):,.0f} tokens"]
        lines.append([*start, full[level]["problems"], "FullKV", accuracy(full[level]), "", ""])
        for policy in SHOWN:
            own = {
                share(row, full[level]): accuracy(row)
                for row in rows
                if (row["level"], row["policy"]) == (level, policy)
            }
            if own:
                lines.append(["", "", "", f"`{policy}`", *(own.get(s, "-") for s in (15, 25, 35))])
    header = ["family", "size", "problems", "policy", *(f"budget {one}%" for one in (15, 25, 35))]
    return table(header, lines, rows, "accuracy")


def signals() -> str:
    """Signals down, families and the reasoner across."""
    rows = recorded("signals")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    found = {(row["signal"], row["kind"]): row["value"] for row in rows}
    lines = [
        [signal, *(found.get((signal, kind), "-") for kind in kinds)]
        for signal in dict.fromkeys(row["signal"] for row in rows)
    ]
    lines = [["distance, " + name if name.startswith("layer") else name, *r] for name, *r in lines]
    return table(["signal", *(f"`{kind}`" for kind in kinds)], lines, rows, "signals")


def parts() -> str:
    """Right traces in percent, one part of the default changed at a time."""
    rows = recorded("parts")
    places = list(dict.fromkeys((row["model"], row["size"], row["percent"]) for row in rows))
    found = {(row["variant"], row["model"], row["size"], row["percent"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [found[(variant, *place)] for place in places]
        lines.append([variant, *(f"{100 * int(r['right']) / int(r['traces']):.0f}" for r in own)])
    header = ["changed", *(f"{kind}, {size}, {percent}%" for kind, size, percent in places)]
    return table(header, lines, rows, "parts")


def heads() -> str:
    """One set for all heads against one for each, level by level."""
    rows = recorded("heads")
    lines = []
    for level in dict.fromkeys(row["level"] for row in rows):
        here = [row for row in rows if row["level"] == level]
        budgets = sorted({int(row["kv_budget"]) for row in here})
        for policy in dict.fromkeys(row["policy"] for row in here):
            for per_head in ("False", "True"):
                own = {
                    int(row["kv_budget"]): right(row)
                    for row in here
                    if (row["policy"], row["per_head"]) == (policy, per_head)
                }
                kind = "each head its own" if per_head == "True" else "one for all heads"
                lines.append([level, f"`{policy}`", kind, *(own.get(one, "-") for one in budgets)])
    header = ["level", "policy", "sets", *(f"budget {one}%" for one in HEAD_SHARES)]
    return table(header, lines, rows, "heads")


def sizes() -> str:
    """Fixed budgets against budgets that set themselves: right traces and mean KV tokens over all
    families, short and middle."""
    rows = [
        row
        for row in recorded("forced")
        if row["policy"] == "distinct" and row["problems"] == SET_THEMSELVES
    ]
    found: defaultdict[str, list[Row]] = defaultdict(list)
    budgets: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        if row["kv_params"] == PLAIN:
            budgets[row["family"], row["size"]].add(int(row["kv_budget"]))
    for row in rows:
        params = json.loads(row["kv_params"])
        del params["interval"]
        if params:
            ((name, value),) = params.items()
            found[f"`{name}` {value}"].append(row)
        else:
            of = sorted(budgets[row["family"], row["size"]])
            share = FIXED[of.index(int(row["kv_budget"]))]
            found[f"a budget of {share}% of the mean trace"].append(row)
    lines = []
    for name, own in found.items():
        correct = sum(int(row["right"]) for row in own) / sum(int(row["problems"]) for row in own)
        held = mean(float(row["mean_kv_tokens"]) for row in own)
        lines.append([name, f"{100 * correct:.0f}", f"{held:.0f}"])
    header = ["`distinct` with", "right, percent", "mean KV tokens of its own"]
    return table(header, lines, rows, "forced")


def right(row: Row) -> str:
    low, high = (100 * float(row[f"wilson_{side}"]) for side in ("low", "high"))
    return f"{row['right']} of {row['problems']} [{low:.0f}, {high:.0f}]"
