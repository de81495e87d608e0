"""Draw the steering rows: docs/figures/steering.svg.

    python bench/steering_figure.py

Against alpha_0, one line per gamma: right answers, output tokens, and what the traces are made of
(the paper's figure 14). Nothing is drawn that is not in a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from figures import ROOT, STYLE_PARAMETERS, band, percent, plt, quiet, save
from sweep import existing_rows

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


def draw(rows: list[Row], path: Path) -> None:
    """One panel per number."""
    off = next(row for row in rows if not row["steering"])
    canvas, axes = plt.subplots(1, len(PANELS), figsize=(13.5, 3.2))
    for panel, (title, value) in zip(axes, PANELS.items(), strict=True):
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
    axes[0].legend(frameon=False, fontsize=8)
    canvas.tight_layout()
    save(canvas, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="wanderer")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "steering.svg")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE_PARAMETERS)
    rows = [
        row
        for row in existing_rows("steering")
        if row["model"] == arguments.model and not row["kv_budget"]
    ]
    problems = max(int(row["problems"]) for row in rows if row["steering"])
    draw([row for row in rows if int(row["problems"]) == problems], arguments.out)


if __name__ == "__main__":
    main()
