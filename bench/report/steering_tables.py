"""Tables of steering: strengths, budgets, costs."""

from __future__ import annotations

from bench.lib.record import recorded
from bench.lib.table_text import Row, ratio_table, table
from bench.report.accuracy_tables import accuracy, share_of_trace


def steering_cells(model: str, *, budgeted: bool) -> list[Row]:
    return [
        r for r in recorded("steering") if r["model"] == model and bool(r["kv_budget"]) == budgeted
    ]


def how_steered(row: Row) -> str:
    """Off, or the two numbers; gamma 0 is SEAL."""
    if not row["steering"]:
        return "off"
    fixed = "fixed (SEAL)" if float(row["gamma"]) == 0 else f"gamma {float(row['gamma']):g}"
    return f"alpha_0 {float(row['steering']):g}, {fixed}"


def steering_numbers(row: Row, full: Row) -> list[str]:
    tokens, before = float(row["output_tokens"]), float(full["output_tokens"])
    return [
        accuracy(row),
        f"{tokens:,.0f} ({100 * (tokens / before - 1):+.0f}%)",
        f"{100 * float(row['nonexecution_share']):.1f}%",
        f"{100 * float(row['similar_share']):.1f}%",
    ]


_STEERING_HEADER = ["right", "output tokens", "non-execution sentences", "similar sentences"]


def strength(model: str) -> str:
    """Every strength by itself, without a budget."""
    rows = steering_cells(model, budgeted=False)
    problems = max(int(row["problems"]) for row in rows if row["steering"])
    rows = [row for row in rows if int(row["problems"]) == problems]
    full = next(row for row in rows if not row["steering"])
    order = sorted(rows, key=lambda row: (float(row["gamma"] or -1), float(row["steering"] or 0.0)))
    lines = [[how_steered(row), *steering_numbers(row, full)] for row in order]
    return table(["steering", *_STEERING_HEADER], lines, rows, "steering")


def steering_budget() -> str:
    """The shape of the paper's table 2: component by component."""
    rows = steering_cells("wanderer", budgeted=True)
    full = next(
        row
        for row in steering_cells("wanderer", budgeted=False)
        if not row["steering"] and row["problems"] == rows[0]["problems"]
    )
    order = sorted(
        rows,
        key=lambda row: (
            int(row["kv_budget"]),
            ("rkv", "skipkv", "skipkv+").index(row["policy"]),
            *(bool(row["steering"]), float(row["gamma"] or 0)),
        ),
    )
    lines = [
        [
            f"{share_of_trace(row, full)}%",
            f"`{row['policy']}`",
            how_steered(row),
            *steering_numbers(row, full),
        ]
        for row in order
    ]
    lines.append(["FullKV", "", "off", *steering_numbers(full, full)])
    return table(["budget", "policy", "steering", *_STEERING_HEADER], lines, rows, "steering")


def without_checks() -> str:
    rows = recorded("without_checks")
    header = ["model", "checks in the solution", "passages", "wrong passages"]
    names = ("model", "checks", "passages", "wrong_passages")
    lines = [[row[name] for name in names] for row in rows]
    return table(header, lines, rows, "without_checks")


def steering_cost() -> str:
    what = "throughput, every request steered, over the same requests not steered"
    return ratio_table("steering_cost", what, recorded("steering_cost"))
