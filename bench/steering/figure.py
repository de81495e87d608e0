"""Draw the steering rows: docs/figures/steering.svg and steering_budget.svg.

    python -m bench.steering.figure

Against alpha_0, one line per gamma, and against the KV budget, one line per policy and steering:
right answers, output tokens, and what the traces are made of (the paper's figure 14). Nothing is
drawn that is not in a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bench.accuracy.figure import ROOT, STYLE_PARAMETERS, band, percent, plt, quiet, save, share
from bench.lib.policies import styles
from bench.lib.record import recorded

Row = dict[str, str]
#: gamma -> colour, marker
STYLE = {0.0: ("#666666", "s"), 0.02: ("#d55e00", "o"), 0.05: ("#0072b2", "^")}
#: title -> column, and whether the axis is percent
PANELS: dict[str, Callable[[Row], float]] = {
    "right answers, %": percent,
    "output tokens": lambda row: float(row["output_tokens"]),
    "non-execution sentences, %": lambda row: percent(row, "nonexecution_share"),
    "similar sentences, %": lambda row: percent(row, "similar_share"),
}


#: policy, steering -> label, line
BUDGET_LINES = {
    ("rkv", "off"): ("rkv", "-"),
    ("skipkv", "off"): ("skipkv", "-"),
    ("skipkv", "fixed"): ("skipkv, fixed (SEAL)", ":"),
    ("skipkv", "adaptive"): ("skipkv, adaptive", "--"),
    ("skipkv+", "off"): ("skipkv+", "-"),
    ("skipkv+", "fixed"): ("skipkv+, fixed (SEAL)", ":"),
    ("skipkv+", "adaptive"): ("skipkv+, adaptive", "--"),
}


def steering_of(row: Row) -> str:
    if not row["steering"]:
        return "off"
    return "fixed" if float(row["gamma"]) == 0 else "adaptive"


def draw_budgets(rows: list[Row], full: Row, path: Path) -> None:
    """One panel per number, against the budget in percent of the unsteered trace."""
    canvas, axes = plt.subplots(2, 2, figsize=(10, 6))
    for panel, (title, value) in zip(axes.flat, PANELS.items(), strict=True):
        for (policy, steering), (label, line) in BUDGET_LINES.items():
            colour, marker = styles()[policy]
            here = [r for r in rows if r["policy"] == policy and steering_of(r) == steering]
            here.sort(key=lambda row: int(row["kv_budget"]))
            panel.plot(
                [share(row, full) for row in here],
                [value(row) for row in here],
                **{"color": colour, "marker": marker, "linestyle": line, "markersize": 4},
                label=label,
            )
        panel.axhline(value(full), color="#444444", linestyle="--", linewidth=1, label="FullKV")
        panel.set_xlabel("KV budget, % of the unsteered trace")
        panel.set_title(title, fontsize=9)
        panel.set_ylim(bottom=0)
        quiet(panel)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="center right", frameon=False, fontsize=8)
    canvas.tight_layout(rect=(0, 0, 1 - 1.7 / canvas.get_figwidth(), 1))
    save(canvas, path)


def draw_strengths(rows: list[Row], path: Path) -> None:
    """One panel per number."""
    off = next(row for row in rows if not row["steering"])
    canvas, axes = plt.subplots(2, 2, figsize=(9.5, 6))
    for panel, (title, value) in zip(axes.flat, PANELS.items(), strict=True):
        for gamma, (colour, marker) in STYLE.items():
            here = [row for row in rows if row["steering"] and float(row["gamma"]) == gamma]
            here.sort(key=lambda row: float(row["steering"]))
            xs = [float(row["steering"]) for row in here]
            label = "fixed (SEAL)" if gamma == 0 else f"gamma {gamma:g}"
            panel.plot(
                *(xs, [value(row) for row in here]),
                **{"color": colour, "marker": marker, "markersize": 4, "label": label},
            )
            if value is percent:
                band(panel, xs, here, colour)
        panel.axhline(value(off), color="#444444", linestyle="--", linewidth=1, label="off")
        panel.set_xscale("log")
        panel.set_xlabel("alpha_0")
        panel.set_title(title, fontsize=9)
        quiet(panel)
        panel.set_ylim(bottom=0)
    axes.flat[0].legend(frameon=False, fontsize=8)
    canvas.tight_layout()
    save(canvas, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="wanderer")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE_PARAMETERS)
    rows = [row for row in recorded("steering") if row["model"] == arguments.model]
    strengths = [row for row in rows if not row["kv_budget"]]
    problems = max(int(row["problems"]) for row in strengths if row["steering"])
    chosen = [row for row in strengths if int(row["problems"]) == problems]
    draw_strengths(chosen, arguments.out / "steering.svg")
    budgets = [row for row in rows if row["kv_budget"]]
    if budgets:
        of_budgets = [row for row in strengths if row["problems"] == budgets[0]["problems"]]
        full = next(row for row in of_budgets if not row["steering"])
        draw_budgets(budgets, full, arguments.out / "steering_budget.svg")


if __name__ == "__main__":
    main()
