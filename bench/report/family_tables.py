"""Tables of the five families: every policy on right traces, and answers of a few."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from statistics import mean

from bench.lib.policies import compared
from bench.lib.record import recorded
from bench.lib.table_text import Row, table
from bench.reasoner.families.base import SIZES
from bench.reasoner.families.registry import FAMILIES, HELDOUT
from bench.report.accuracy_tables import accuracy, share_of_trace

SHARES = (8, 15, 25, 35)
#: of the tables of single cells: the default, and the best of the others
SHOWN = ("distinct", "skipkv+", "streaming")
PLAIN = '{"interval": 32}'
#: problems per cell of the comparison of all policies, and of what was looked at more closely;
#: budgets follow from the problems
COMPARED, MANY = "10", "200"
#: sizes on which every policy ran
RANKED = ("short", "middle")
Place = tuple[str, str, int]


def cells(
    sizes: Collection[str], problems: str = COMPARED
) -> tuple[dict[Place, dict[str, Row]], list[Row]]:
    """(family, size, share) -> policy -> its row, of cells with so many problems; and all rows.
    Budgets of one family and size are in the order of the shares."""
    rows = [
        row
        for row in recorded("forced")
        if row["model"] == "families"
        and row["size"] in sizes
        and row["kv_params"] == PLAIN
        and row["problems"] == problems
    ]
    budgets: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        budgets[row["family"], row["size"]].add(int(row["kv_budget"]))
    by_place: defaultdict[Place, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        place = row["family"], row["size"]
        order = sorted(budgets[place]).index(int(row["kv_budget"]))
        by_place[(*place, SHARES[order])][row["policy"]] = row
    return by_place, rows


def share_right(row: Row) -> float:
    return 100 * int(row["right"]) / int(row["problems"])


def leaderboard() -> str:
    """Policies by their mean rank on short and middle traces; equal ones share a rank."""
    by_place, rows = cells(RANKED)
    policies = [name for name in compared() if all(name in here for here in by_place.values())]
    ranks: defaultdict[str, list[float]] = defaultdict(list)
    for here in by_place.values():
        for name in policies:
            percent = share_right(here[name])
            better = sum(share_right(here[other]) > percent for other in policies)
            equal = sum(share_right(here[other]) == percent for other in policies)
            ranks[name].append(better + (equal + 1) / 2)
    launched = {row["policy"]: row["operations_16"] for row in recorded("launches")}
    costs = recorded("compaction_cost")
    spent = {row["policy"]: f"{row['ms_p50']} ({row['ratio_p50']})" for row in costs}
    spent[costs[-1]["base"]] = f"{costs[-1]['base_ms_p50']} (1)"
    lines = []
    for name in sorted(policies, key=lambda name: mean(ranks[name])):
        at = {s: [share_right(by_place[p][name]) for p in by_place if p[2] == s] for s in SHARES}
        worst = min(
            (p for p in by_place if p[2] == 25), key=lambda p: share_right(by_place[p][name])
        )
        lines.append(
            [
                f"`{name}`",
                f"{mean(ranks[name]):.1f}",
                *(f"{mean(at[share]):.0f}" for share in SHARES),
                f"{share_right(by_place[worst][name]):.0f} (`{worst[0]}`, {worst[1]})",
                launched[name],
                spent[name],
            ]
        )
    header = ["policy", "mean rank", *(f"budget {share}%" for share in SHARES), "worst cell at 25%"]
    header += ["operations per compaction", "ms per compaction (over `rkv`'s)"]
    return table(header, lines, rows, "forced")


def families(sampling: str = "greedy", policies: Collection[str] = SHOWN) -> str:
    """Answers through the real server, of the families' model: family, size and policy down."""
    rows = [
        row
        for row in recorded("accuracy")
        if (row["model"], row["sampling"]) == ("families", sampling)
    ]
    levels = [f"{family}-{size}" for size in SIZES for family in FAMILIES]
    unbudgeted = [row for row in rows if row["policy"] == "full" and row["level"] in levels]
    lines = []
    known: set[tuple[str, str, int]] = set()  # with as many problems or more
    for full in sorted(unbudgeted, key=lambda row: (levels.index(row["level"]), -_problems(row))):
        name, _, size = full["level"].rpartition("-")
        start = [f"`{name}`", f"{size}, {float(full['output_tokens']):,.0f} tokens"]
        start += [full["problems"], accuracy(full)]
        for policy in policies:
            own = {
                (full["level"], policy, _nearest_share(row, full)): accuracy(row)
                for row in rows
                if row["policy"] == policy
                and (row["level"], row["problems"]) == (full["level"], full["problems"])
            }
            if own.keys() - known:
                shown = [own.get((full["level"], policy, one), "-") for one in SHARES]
                lines.append([*start, f"`{policy}`", *shown])
                start = [""] * len(start)
            known |= own.keys()
    header = ["family", "size", "problems", "FullKV", "policy"]
    return table([*header, *(f"budget {one}%" for one in SHARES)], lines, rows, "accuracy")


def sampled_policies() -> str:
    """Sampled answers of short traces at a quarter of them: policy down, family across."""
    rows = [
        row
        for row in recorded("accuracy")
        if (row["model"], row["sampling"]) == ("families", "sampled")
        and row["level"].endswith("-short")
    ]
    fulls = {row["level"]: row for row in rows if row["policy"] == "full"}
    quarter = [
        row
        for row in rows
        if row["policy"] == "full" or _nearest_share(row, fulls[row["level"]]) == 25
    ]
    by_policy: defaultdict[str, dict[str, Row]] = defaultdict(dict)
    for row in quarter:
        by_policy[row["policy"]][row["level"].removesuffix("-short")] = row
    means = {
        name: mean(100 * float(by_family[family]["accuracy"]) for family in FAMILIES)
        for name, by_family in by_policy.items()
        if len(by_family) == len(FAMILIES)
    }
    lines = [
        [
            "FullKV" if name == "full" else f"`{name}`",
            *(accuracy(by_policy[name][family]) for family in FAMILIES),
            f"{means[name]:.1f}",
        ]
        for name in sorted(means, key=lambda name: -means[name])
    ]
    header = ["policy", *(f"`{family}`" for family in FAMILIES), "mean"]
    return table(header, lines, quarter, "accuracy")


def _nearest_share(row: Row, full: Row) -> int:
    """Of ``SHARES``: budgets follow from greedy traces, and sampled ones may differ by a point."""
    percent = share_of_trace(row, full)
    return next((share for share in SHARES if abs(share - percent) <= 1), percent)


def _problems(row: Row) -> int:
    return int(row["problems"])


def right_traces() -> str:
    """Single cells of the comparison of all policies, of the default."""
    found, rows = cells(RANKED)
    default = SHOWN[0]
    lines = [
        [f"`{family}`", size, *(right(found[family, size, one][default]) for one in SHARES)]
        for family, size in dict.fromkeys(place[:2] for place in found)
    ]
    shown = [row for row in rows if row["policy"] == default]
    return table(["family", "size", *(f"budget {one}%" for one in SHARES)], lines, shown, "forced")


def long_traces() -> str:
    """Right ones of the long traces, of a few: budget and policy down, family across."""
    by_place, rows = cells(("long",))
    lines = []
    for share in dict.fromkeys(place[2] for place in by_place):
        for name in SHOWN:
            counts = [int(by_place[family, "long", share][name]["right"]) for family in FAMILIES]
            total = f"**{sum(counts)} of {len(counts) * int(COMPARED)}**"
            lines.append([f"{share}%", f"`{name}`", *map(str, counts), total])
    shown = [row for row in rows if row["policy"] in SHOWN]
    header = ["budget", "policy", *(f"`{family}`" for family in FAMILIES), "all"]
    return table(header, lines, shown, "forced")


def many_long_traces() -> str:
    """Right ones of 200 long traces: budget and policy down, family across."""
    by_place, rows = cells(("long",), MANY)
    lines = []
    for share in dict.fromkeys(place[2] for place in by_place):
        for name in SHOWN:
            of_families = [by_place[family, "long", share].get(name) for family in FAMILIES]
            shown = [right(row) if row else "-" for row in of_families]
            lines.append([f"{share}%", f"`{name}`", *shown])
    header = ["budget", "policy", *(f"`{family}`" for family in FAMILIES)]
    return table(header, lines, rows, "forced")


def unseen() -> str:
    """Right traces of the default: problems of the other tables, and problems of none."""
    rows = recorded("unseen")
    by_problems: defaultdict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: int(row["kv_budget"])):
        by_problems[row["family"], row["size"], row["first_problem"]].append(row)
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        for family in FAMILIES:
            pairs = zip(
                by_problems[family, size, "0"], by_problems[family, size, str(HELDOUT)], strict=True
            )
            for seen, other in pairs:
                budget = f"{seen['kv_budget']} tokens"
                lines.append([f"`{family}`", size, budget, right(seen), right(other)])
    header = ["family", "size", "budget", "problems of the other tables", "others"]
    return table(header, lines, rows, "unseen")


def right(row: Row) -> str:
    low, high = (100 * float(row[f"wilson_{side}"]) for side in ("low", "high"))
    return f"{row['right']} of {row['problems']} [{low:.0f}, {high:.0f}]"


def needed_by_family() -> str:
    """Wrong next tokens per long trace under each rule's mask."""
    rows = recorded("needed_by_family")
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    by_rule = {(row["family"], row["rule"]): row for row in rows}
    lines = [
        [f"`{name}`", by_rule[name, family.needed.__name__]["most_old_tokens"]]
        + [by_rule[name, rule]["wrong_tokens"] for rule in rules]
        for name, family in FAMILIES.items()
    ]
    header = ["family", "old tokens of its own rule", *(rule.replace("_", " ") for rule in rules)]
    return table(header, lines, rows, "needed_by_family")


def needed_in_total() -> str:
    """Right ones of short traces when the rule is known: tokens down, family across."""
    rows = recorded("needed_in_total")
    by_total = {(row["family"], row["total_tokens"]): row for row in rows}
    lines = [
        [total, *(f"{by_total[name, total]['right']} of {row['traces']}" for name in FAMILIES)]
        for total, row in {row["total_tokens"]: row for row in rows}.items()
    ]
    header = ["tokens", *(f"`{name}`" for name in FAMILIES)]
    return table(header, lines, rows, "needed_in_total")
