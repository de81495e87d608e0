"""Draw the comparison from its rows: ``docs/figures/*.svg``.

    python -m bench.accuracy.figure                          # bench/rows/accuracy.csv
    python -m bench.accuracy.figure --model families --figures budget
    python -m bench.accuracy.figure --rows quick --model M   # another sweep of
    python -m bench.accuracy

Three figures, a panel per level: accuracy against KV budget, output length against KV budget, and
accuracy against the KV memory of a request at its peak. Nothing is drawn that is not in a row.
Levels that are named ``family-size`` are drawn in a row per size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import matplotlib

from bench.lib.policies import styles
from bench.lib.record import recorded

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("easy", "medium", "hard")
SIZES = ("short", "middle", "long")
#: policies whose lines are drawn thick
OURS = ("distinct", "skipkv+")
DEFAULT_MODEL = "reasoner"
STYLE_PARAMETERS = {"svg.hashsalt": "skipkv", "svg.fonttype": "none", "font.size": 9}
Row = dict[str, str]


def selected(name: str, model: str, sampling: str) -> list[Row]:
    """The rows of one comparison, of each level, policy and share of the trace that with the most
    problems.

    Raises:
        ValueError: there are none.
    """
    rows = [row for row in recorded(name) if row["model"] == model and row["sampling"] == sampling]
    if not rows:
        raise ValueError(f"{name}.csv: no rows of model {model!r}, sampling {sampling!r}")
    same_problems = {(row["level"], row["problems"]): row for row in rows if not row["kv_budget"]}
    cells: dict[tuple[str, str, int], Row] = {}
    for row in sorted(rows, key=lambda row: int(row["problems"])):
        full = same_problems.get((row["level"], row["problems"]))
        if full is not None:
            place = round(share(row, full)) if row["kv_budget"] else 100
            cells[row["level"], row["policy"], place] = row
    return [*cells.values()]


def levels_of(rows: Sequence[Row]) -> list[str]:
    """Levels with a baseline and something to compare, the bundled model's in order of length."""
    there = {row["level"] for row in rows if row["policy"] == "full"}
    there &= {row["level"] for row in rows if row["policy"] != "full"}
    return [level for level in LEVELS if level in there] + sorted(there - set(LEVELS))


def arranged(levels: Sequence[str]) -> list[list[str]]:
    """Levels in rows of panels: of ``family-size`` one row per size, of others a single one."""
    sizes = [[level for level in levels if level.endswith(f"-{size}")] for size in SIZES]
    if sum(map(len, sizes)) < len(levels):
        return [list(levels)]
    return [row for row in sizes if row]


def peak_kib(row: Row) -> float:
    """KV cache of a request at its peak, prompt included, mean over requests."""
    tokens = float(row["peak_kv_tokens"]) + float(row["prompt_tokens"])
    return tokens * int(row["kv_bytes_per_token"]) / 1024


def share(row: Row, full: Row) -> float:
    """Budget in percent of FullKV's mean trace."""
    return 100 * int(row["kv_budget"]) / float(full["output_tokens"])


def percent(row: Row, column: str = "accuracy") -> float:
    return 100 * float(row[column])


def lines(axes: Axes, rows: Sequence[Row], x: Callable[[Row], float], y: Callable[[Row], float],
          interval: bool) -> None:  # fmt: skip
    """One line per policy, with 95% intervals where ``y`` is the accuracy."""
    for policy, (colour, marker) in styles().items():
        points = sorted((row for row in rows if row["policy"] == policy), key=x)
        if not points:
            continue
        xs, ys = [x(row) for row in points], [y(row) for row in points]
        ours = policy in OURS
        axes.plot(
            *(xs, ys),
            **{"color": colour, "marker": marker, "markersize": 5 if ours else 4},
            **{"linewidth": 2.0 if ours else 1.0, "zorder": 3 if ours else 2, "label": policy},
        )
        if interval:
            band(axes, xs, points, colour)


def band(axes: Axes, xs: Sequence[float], points: Sequence[Row], colour: str) -> None:
    """The 95% intervals of accuracies."""
    low = [percent(row, "wilson_low") for row in points]
    high = [percent(row, "wilson_high") for row in points]
    axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)


def quiet(axes: Axes) -> None:
    """The frame of every panel."""
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def save(canvas: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date the same rows give the same file.
    canvas.savefig(path, metadata={"Date": None})
    plt.close(canvas)
    print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def figure(
    rows: Sequence[Row],
    path: Path,
    *,
    x_label: str,
    y_label: str,
    x: Callable[[Row, Row], float],
    y: Callable[[Row], float],
    interval: bool,
    full_at: Callable[[Row], float] | None = None,
) -> None:
    """A panel per level.

    Args:
        x: of a row and its level's FullKV row.
        full_at: where FullKV stands on the x axis; a line across where it has no place there.
    """
    levels = arranged(levels_of(rows))
    columns = max(map(len, levels))
    width = 2.9 if columns < 4 else 2.3
    canvas, panels = plt.subplots(
        *(len(levels), columns),
        **{"figsize": (width * columns + 1.4, 3.4 * len(levels)), "squeeze": False},
        sharey=interval,
        sharex="row" if full_at is None else False,
    )
    most = len({row["policy"] for row in rows if row["policy"] != "full"})
    for axes, level in chain.from_iterable(map(zip_longest, panels, levels)):
        if level is None:
            axes.set_axis_off()
            continue
        here = [row for row in rows if row["level"] == level]
        full = next(row for row in here if row["policy"] == "full")
        budgeted = [row for row in here if row["policy"] != "full"]
        lines(axes, budgeted, lambda row, full=full: x(row, full), y, interval)
        if full_at is None:
            axes.axhline(y(full), color="#444444", linestyle="--", linewidth=1, label="FullKV")
        else:
            axes.plot(
                *([full_at(full)], [y(full)]),
                **{"color": "#444444", "marker": "*", "markersize": 10, "linestyle": "none"},
                label="FullKV",
            )
        axes.set_title(title(level, full, budgeted, most), fontsize=9)
        quiet(axes)
    for axes in panels[-1]:
        axes.set_xlabel(x_label)
    for axes in panels[:, 0]:
        axes.set_ylabel(y_label)
    names: dict[str, object] = {}
    for axes in panels.flat:
        handles, labels = axes.get_legend_handles_labels()
        names.update(zip(labels, handles, strict=True))
    legend = {"loc": "center right", "frameon": False, "fontsize": 8, "title_fontsize": 8}
    legend["title"] = "bands: 95%\nWilson" if interval else None
    canvas.legend(list(names.values()), list(names), **legend)
    canvas.tight_layout(rect=(0, 0, 1 - 1.1 / canvas.get_figwidth(), 1))
    save(canvas, path)


def title(level: str, full: Row, budgeted: Sequence[Row], policies: int) -> str:
    """What a panel shows; where another number of problems or fewer policies ran, that too.

    Args:
        policies: that other panels have.
    """
    ran = sorted({row["policy"] for row in budgeted})
    only = f", only {ran[0]}" if len(ran) == 1 < policies else ""
    fewer = {
        row["problems"]: f"{share(row, full):.0f}%"
        for row in budgeted
        if row["problems"] != full["problems"]
    }
    said = "".join(f" ({count} at {place})" for count, place in fewer.items())
    space = "\n" if said else " "
    tokens = f"mean trace {float(full['output_tokens']):,.0f} tokens"
    return f"{level}{only}\n{full['problems']} problems{said},{space}{tokens}"


BUDGET_LABEL, RIGHT_LABEL = "KV budget, % of the mean FullKV trace", "right answers, %"
FIGURES: dict[str, dict[str, Any]] = {
    "budget": {
        **{"x_label": BUDGET_LABEL, "y_label": RIGHT_LABEL},
        **{"x": share, "y": percent, "interval": True},
    },
    "length": {
        **{"x_label": BUDGET_LABEL, "y_label": "mean output tokens"},
        **{"x": share, "y": lambda row: float(row["output_tokens"]), "interval": False},
    },
    "memory": {
        **{"x_label": "peak KV memory of a request, KiB", "y_label": RIGHT_LABEL},
        **{"x": lambda row, _: peak_kib(row), "y": percent, "interval": True},
        "full_at": peak_kib,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="accuracy")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--sampling", default="greedy", choices=["greedy", "sampled"])
    parser.add_argument("--figures", nargs="+", default=[*FIGURES], choices=FIGURES)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE_PARAMETERS)
    rows = selected(arguments.rows, arguments.model, arguments.sampling)
    stem = arguments.rows
    if arguments.model != DEFAULT_MODEL:
        stem += f"_{arguments.model}"
    if arguments.sampling != "greedy":
        stem += f"_{arguments.sampling}"
    for name in arguments.figures:
        figure(rows, arguments.out / f"{stem}_{name}.svg", **FIGURES[name])


if __name__ == "__main__":
    main()
