"""Tables of what led to the default policy, and of what each part of it is worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean

from bench.lib.record import recorded
from bench.lib.table_text import Row, parameters, table
from bench.reasoner.families.base import SIZES
from bench.reasoner.families.registry import FAMILIES
from bench.report.accuracy_tables import LEVELS, accuracy, share_of_trace
from bench.report.family_tables import PLAIN, RANKED, cells, right, share_right

HEAD_SHARES = (15, 25, 35, 50)
#: budgets in percent of the mean trace, of the table of the default's earlier forms
TIGHT_SHARES = (8, 15)
#: problems of the rows about budgets that set themselves, and the fixed budgets beside them
SET_THEMSELVES, FIXED = "20", (20, 25, 30, 35, 40, 50)


def signals() -> str:
    """Signals down, families and the reasoner across."""
    rows = recorded("signals")
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    values = {(row["signal"], row["kind"]): row["value"] for row in rows}
    lines = [
        [signal, *(values.get((signal, kind), "-") for kind in kinds)]
        for signal in dict.fromkeys(row["signal"] for row in rows)
    ]
    lines = [["distance, " + name if name.startswith("layer") else name, *r] for name, *r in lines]
    return table(["signal", *(f"`{kind}`" for kind in kinds)], lines, rows, "signals")


def parts() -> str:
    """Right traces in percent, one part of the default changed at a time."""
    rows = recorded("parts")
    places = list(dict.fromkeys((row["model"], row["size"], row["percent"]) for row in rows))
    by_variant = {(row["variant"], row["model"], row["size"], row["percent"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        of_variant = [by_variant[(variant, *place)] for place in places]
        lines.append(
            [variant, *(f"{100 * int(r['right']) / int(r['traces']):.0f}" for r in of_variant)]
        )
    header = ["changed", *(f"{kind}, {size}, {percent}%" for kind, size, percent in places)]
    return table(header, lines, rows, "parts")


def beginnings() -> str:
    """Answers through the real server: the default and its earlier forms, at tight budgets."""
    now = [row for row in recorded("accuracy") if row["sampling"] == "greedy"]
    earlier = recorded("beginnings")
    place = ("model", "level", "problems")
    full = {tuple(row[name] for name in place): row for row in now if row["policy"] == "full"}
    forms = {(*(row[name] for name in place), row["kv_budget"], _form(row)): row for row in earlier}
    names = list(dict.fromkeys(map(_form, reversed(earlier))))  # the latest first
    places = {tuple(row[name] for name in place) for row in earlier}
    lines = []
    for row in sorted((r for r in now if r["policy"] == "distinct"), key=_by_level_and_budget):
        at = tuple(row[name] for name in place)
        if at not in places or share_of_trace(row, full[at]) not in TIGHT_SHARES:
            continue
        others = [forms.get((*at, row["kv_budget"], name)) for name in names]
        lines.append(
            [
                f"`{row['level']}`" if row["model"] == "families" else row["level"],
                f"{share_of_trace(row, full[at])}%",
                accuracy(full[at]),
                accuracy(row),
                *("-" if other is None else accuracy(other) for other in others),
            ]
        )
    header = ["traces", "budget", "FullKV", "`distinct`", *names]
    return table(header, lines, earlier, "beginnings")


def _by_level_and_budget(row: Row) -> tuple[int, int]:
    levels = [*LEVELS, *(f"{family}-{size}" for size in SIZES for family in FAMILIES)]
    return levels.index(row["level"]), int(row["kv_budget"])


def _form(row: Row) -> str:
    """In which parameters an earlier form of the default differs from it."""
    asked = parameters(row)
    return ", ".join(f"`{name}` {asked[name]}" for name in ("beginning", "ending"))


def heads() -> str:
    """One set for all heads against one for each, level by level."""
    rows = recorded("heads")
    lines = []
    for level in dict.fromkeys(row["level"] for row in rows):
        here = [row for row in rows if row["level"] == level]
        budgets = sorted({int(row["kv_budget"]) for row in here})
        for policy in dict.fromkeys(row["policy"] for row in here):
            for per_head in ("False", "True"):
                cells_of_kind = {
                    int(row["kv_budget"]): right(row)
                    for row in here
                    if (row["policy"], row["per_head"]) == (policy, per_head)
                }
                kind = "each head its own" if per_head == "True" else "one for all heads"
                lines.append(
                    [
                        level,
                        f"`{policy}`",
                        kind,
                        *(cells_of_kind.get(budget, "-") for budget in budgets),
                    ]
                )
    header = ["level", "policy", "sets", *(f"budget {share}%" for share in HEAD_SHARES)]
    return table(header, lines, rows, "heads")


def quotas() -> str:
    """A policy's score over all tokens and sentence by sentence: right traces in percent over all
    families, short and middle."""
    plain, rows = cells(RANKED)
    asked = [row for row in recorded("forced") if parameters(row).get("quotas")]
    setting = ("family", "size", "policy", "kv_budget")
    beside = {tuple(row[name] for name in setting): row for row in asked}
    pairs: defaultdict[tuple[str, int], list[tuple[Row, Row]]] = defaultdict(list)
    for (_, _, share), by_policy in plain.items():
        for policy, row in by_policy.items():
            other = beside.get(tuple(row[name] for name in setting))
            if other is not None:
                pairs[policy, share].append((row, other))
    policies, shares = ([*dict.fromkeys(part)] for part in zip(*pairs, strict=True))
    lines = []
    for policy in policies:
        for at, kind in enumerate(("its score alone", "`quotas`")):
            right_of = [[pair[at] for pair in pairs[policy, share]] for share in shares]
            percent = [f"{mean(map(share_right, kind_rows)):.0f}" for kind_rows in right_of]
            lines.append(["" if at else f"`{policy}`", kind, *percent])
    header = ["policy", "what stays", *(f"budget {share}%" for share in shares)]
    return table(header, lines, [*rows, *asked], "forced")


def sizes() -> str:
    """Fixed budgets against budgets that set themselves: right traces and mean KV tokens over all
    families, short and middle."""
    rows = [
        row
        for row in recorded("forced")
        if row["policy"] == "distinct" and row["problems"] == SET_THEMSELVES
    ]
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    budgets: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        if row["kv_params"] == PLAIN:
            budgets[row["family"], row["size"]].add(int(row["kv_budget"]))
    for row in rows:
        params = parameters(row)
        del params["interval"]
        if params:
            ((name, value),) = params.items()
            groups[f"`{name}` {value}"].append(row)
        else:
            ascending = sorted(budgets[row["family"], row["size"]])
            share = FIXED[ascending.index(int(row["kv_budget"]))]
            groups[f"a budget of {share}% of the mean trace"].append(row)
    lines = []
    for name, group in groups.items():
        correct = sum(int(row["right"]) for row in group) / sum(
            int(row["problems"]) for row in group
        )
        held = mean(float(row["mean_kv_tokens"]) for row in group)
        lines.append([name, f"{100 * correct:.0f}", f"{held:.0f}"])
    header = ["`distinct` with", "right, percent", "mean KV tokens of its own"]
    return table(header, lines, rows, "forced")


def mix() -> str:
    """One budget for traces of all lengths, in tokens or by ``coverage``: right traces in percent,
    and mean KV tokens, over all families. The last line is what no policy can know: of each family
    and length the smallest of these budgets that no larger one beats."""
    rows = recorded("mix")
    groups: defaultdict[tuple[float, int], list[Row]] = defaultdict(list)
    for row in rows:
        coverage = parameters(row).get("coverage", 0.0)
        groups[coverage, 0 if coverage else int(row["kv_budget"])].append(row)
    named = {
        f"`coverage` {coverage}" if coverage else f"a budget of {kv_budget} tokens": group
        for (coverage, kv_budget), group in sorted(groups.items())
    }
    fixed = [row for (coverage, _), group in groups.items() if not coverage for row in group]
    named["the smallest of these budgets that will do, by hand"] = [
        smallest_that_will_do([row for row in fixed if (row["family"], row["size"]) == kind])
        for kind in dict.fromkeys((row["family"], row["size"]) for row in fixed)
    ]
    lines = []
    for name, group in named.items():
        parts = [[row for row in group if row["size"] == size] for size in SIZES]
        held = [mean(float(row["mean_kv_tokens"]) for row in part) for part in [*parts, group]]
        correct = [mean(map(share_right, part)) for part in [*parts, group]]
        lines.append(
            [
                name,
                *(f"{percent:.0f}" for percent in correct),
                *(f"{percent:.0f}" for percent in held),
            ]
        )
    sizes = [*SIZES, "all"]
    header = ["`distinct` with", *(f"right, {size}" for size in sizes)]
    return table([*header, *(f"KV tokens, {size}" for size in sizes)], lines, rows, "mix")


def smallest_that_will_do(rows: Sequence[Row]) -> Row:
    """Of rows that differ in their budget only, the smallest budget with the most right traces."""
    most = max(int(row["right"]) for row in rows)
    return min((r for r in rows if int(r["right"]) == most), key=lambda row: int(row["kv_budget"]))
