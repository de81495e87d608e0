"""Draw the conversation's rows: docs/figures/conversation.svg.

    python -m bench.conversation.figure
    python -m bench.conversation.figure --policy streaming --kv-budget 64

By turn, for one policy and budget: right answers, KV tokens held, prompt tokens computed. Beside
it, for all of them: right answers in the last turn against the KV tokens held then.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes

from bench.accuracy.figure import ROOT, STYLE_PARAMETERS, percent, plt, quiet, save
from bench.lib.policies import styles
from bench.lib.record import recorded

Row = dict[str, str]
#: kv_reuse, or no budget at all -> label, colour, marker
WAYS = {
    "full": ("full cache", "#444444", "s"),
    "off": ("budget, no reuse", "#56b4e9", "D"),
    "keep": ('kv_reuse "keep"', "#009e73", "^"),
    "budget": ('kv_reuse "budget"', "#d55e00", "o"),
}


def way(row: Row) -> str:
    return row["kv_reuse"] if row["policy"] else "full"


def by_turn(axes: Axes, rows: list[Row], column: str, title: str) -> None:
    """A line per way; the accuracy with its 95% interval."""
    for name, (label, colour, marker) in WAYS.items():
        points = [row for row in rows if way(row) == name]
        turns = [int(row["turn"]) for row in points]
        scale = 100 if column == "accuracy" else 1
        values = [scale * float(row[column]) for row in points]
        axes.plot(turns, values, color=colour, marker=marker, markersize=4, label=label)
        if column == "accuracy":
            low, high = (
                [percent(row, f"wilson_{end}") for row in points] for end in ("low", "high")
            )
            axes.fill_between(turns, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("turn")
    axes.set_title(title, fontsize=9)
    quiet(axes)


def traded(axes: Axes, rows: list[Row]) -> None:
    """One point per way, policy and budget, of the last turn: ways by the colours of the other
    panels, policies by markers."""
    last = max(int(row["turn"]) for row in rows)
    for row in (row for row in rows if int(row["turn"]) == last):
        marker = styles()[row["policy"]][1] if row["policy"] else "*"
        held = float(row["held_kv_tokens"])
        axes.plot(held, percent(row), color=WAYS[way(row)][1], marker=marker, markersize=6)
    for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"]):
        look = {"color": "#888888", "marker": styles()[policy][1], "linestyle": "none"}
        axes.plot([], [], **look, label=policy)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel(f"KV tokens held after turn {last}")
    axes.set_title(f"turn {last}: right answers, %, every policy and budget", fontsize=9)
    quiet(axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "conversation.svg")
    parser.add_argument("--policy", default="distinct")
    parser.add_argument("--kv-budget", default="128")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE_PARAMETERS)
    rows = recorded("conversation")
    most = max(int(row["conversations"]) for row in rows)
    rows = [row for row in rows if int(row["conversations"]) == most]
    asked = (arguments.policy, arguments.kv_budget)
    shown = [row for row in rows if (row["policy"], row["kv_budget"]) in (asked, ("", ""))]
    canvas, panels = plt.subplots(2, 2, figsize=(9.5, 6.8))
    right, held, computed, all_of_them = panels.flat
    by_turn(right, shown, "accuracy", f"right answers, %: {asked[0]}, kv_budget {asked[1]}")
    by_turn(held, shown, "held_kv_tokens", "KV tokens held after the turn")
    by_turn(computed, shown, "computed_tokens", "prompt tokens computed in the turn")
    right.legend(frameon=False, fontsize=8, loc="lower left")
    traded(all_of_them, rows)
    canvas.tight_layout()
    save(canvas, arguments.out)


if __name__ == "__main__":
    main()
