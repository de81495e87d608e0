"""Tables of tensor parallelism: what two ranks kept, what failed on purpose, what gathers cost."""

from __future__ import annotations

from collections import Counter, defaultdict

from bench.lib.record import recorded
from bench.lib.table_text import Row, table

_SUMS = ("compactions", "equal_on_ranks", "as_one_rank", "wrong_tokens")


def ranks() -> str:
    """A line per model and overlap, all policies together."""
    every, together = recorded("ranks"), defaultdict[tuple[str, str], list[Row]](list)
    for row in every:
        together[row["model"], row["overlap"]].append(row)
    header = ["model", "overlap", "policies", "compactions", "of each, at least"]
    header += ["equal on its ranks", "as one rank", "tokens wrong", "largest difference"]
    lines = []
    for (model, overlap), rows in together.items():
        of_all = {name: [int(row[name]) for row in rows if row[name]] for name in _SUMS}
        # In attention groups of one rank there is no other one to compare with.
        sums = [f"{sum(found):,}" if found else "" for found in of_all.values()]
        each = Counter[str]()
        for row in rows:
            each[row["policy"]] += int(row["compactions"])
        gap = max(float(row["logprob_gap"]) for row in rows)
        counts = [str(len(each)), sums[0], str(min(each.values())), *sums[1:]]
        lines.append([model, overlap, *counts, f"{gap:.2g}"])
    return table(header, lines, every, "ranks")


def rank_runs() -> str:
    rows = recorded("rank_runs")
    header = ["run", "quantity", "value", "limit"]
    lines = [[row[name] for name in header] for row in rows]
    return table(header, lines, rows, "rank_runs")


def rank_costs() -> str:
    """Of one due request and of sixteen."""
    rows, by = recorded("rank_costs"), dict[tuple[str, str], Row]()
    for row in rows:
        by[row["policy"], row["due"]] = row
    header = ["policy", "gathers", "bytes sent, 1 request due", "16", "operations, 1 due"]
    header += ["of one rank"]
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        single, many = by[policy, "1"], by[policy, "16"]
        sent = [f"{int(row['sent_bytes']):,}" for row in (single, many)]
        operations = [single["operations"], single["operations_one_rank"]]
        lines.append([f"`{policy}`", single["gathers"], *sent, *operations])
    return table(header, lines, rows, "rank_costs")
