"""Tables of a public model: what each policy costs on texts that people wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from statistics import mean

from bench.lib.record import recorded
from bench.lib.table_text import Row, parameters, table

#: lines of the tables that are the default with another parameter
HALF_RECENT = "`distinct`, `recent` half of the budget"
RECENT = "`distinct`, `recent` 64"


def nats() -> str:
    """Policy down, best first; text and budget across: nats more than with a full cache."""
    return _table({"prose", "code"}, _with_range)


def recall() -> str:
    """Policy down; budget across: facts right, and nats more than with a full cache."""
    return _table({"recall"}, lambda row: f"{row['right']} of {row['groups']} ({_over(row):.2f})")


def _table(kinds: Collection[str], shown: Callable[[Row], str]) -> str:
    rows = [row for row in recorded("public") if row["kind"] in kinds]
    by_place: defaultdict[tuple[str, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        by_place[row["kind"], int(row["kv_budget"])][_name(row)] = row
    places = sorted(by_place)
    names = dict.fromkeys(_name(row) for row in rows)
    order = sorted(
        names, key=lambda name: mean(_over(row[name]) for row in by_place.values() if name in row)
    )
    lines = [
        [name, *(shown(by_place[at][name]) if name in by_place[at] else "-" for at in places)]
        for name in order
    ]
    header = ["policy", *(f"{kind}, {budget} tokens" for kind, budget in places)]
    return table(header, lines, rows, "public")


def _name(row: Row) -> str:
    given, half = parameters(row), int(row["kv_budget"]) // 2
    if given == {"recent": 64}:
        return RECENT
    if given == {"recent": half}:
        return HALF_RECENT
    assert not given, f"no line for {given}"
    return f"`{row['policy']}`"


def _over(row: Row) -> float:
    """Nats per scored token more than with a full cache."""
    return float(row["nats"]) - float(row["full_nats"])


def _with_range(row: Row) -> str:
    low, high = (float(row[f"{which}_over_full"]) for which in ("least", "most"))
    return f"{_over(row):.3f} [{low:.2f}, {high:.2f}]"
