"""Draw the serving rows: docs/figures/serve.svg.

    python -m bench.serving.figure

A pool that is too small: tokens per second and requests at once, with each budget and with a full
cache. Beside it the time between two tokens while the neighbours compact.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes

from bench.accuracy.figure import ROOT, STYLE_PARAMETERS, plt, quiet, save
from bench.lib.record import recorded

Row = dict[str, str]
FULL, OURS, TAIL = "#444444", "#d55e00", "#e69f00"
TIMES = {"p50_ms": "p50", "p99_ms": "p99", "longest_ms": "longest"}


def latest(name: str, key: str) -> list[Row]:
    """The last row of every way, of the device and size of the last row."""
    rows = recorded(name)
    here = [row for row in rows if all(row[one] == rows[-1][one] for one in ("device", "tokens"))]
    return list({row[key]: row for row in here}.values())


def bars(axes: Axes, names: list[str], values: list[float], colours: list[str], title: str) -> None:
    axes.bar(names, values, color=colours, width=0.6)
    for place, value in enumerate(values):
        axes.annotate(f"{value:,.0f}", (place, value), ha="center", va="bottom", fontsize=8)
    axes.set_title(title, fontsize=9)
    quiet(axes)


def draw(pressure: list[Row], latency: list[Row], path: Path) -> None:
    canvas, panels = plt.subplot_mosaic("AB;CC", figsize=(9.5, 6.6))
    rate, running, gaps = panels["A"], panels["B"], panels["C"]
    names = [f"budget {row['kv_budget']}" if row["kv_budget"] else "full" for row in pressure]
    colours = [OURS if row["kv_budget"] else FULL for row in pressure]
    pool = f"{int(pressure[0]['pool_tokens']):,} KV tokens for {pressure[0]['calls']} calls"
    rates = [float(row["tokens_per_s_p50"]) for row in pressure]
    bars(rate, names, rates, colours, f"tokens per second, {pool}")
    for place, row in enumerate(pressure):
        if row["kv_budget"]:
            low, high = (f"{float(row[f'ratio_{end}']):.2f}" for end in ("low", "high"))
            how = {"ha": "center", "va": "top", "fontsize": 8, "color": "white"}
            how |= {"xytext": (0, -4), "textcoords": "offset points"}
            text = f"{low} to\n{high} x full\nin {row['rounds']} rounds"
            rate.annotate(text, (place, rates[place]), **how)
    calls = [float(row["peak_running"]) for row in pressure]
    line = f"line: arithmetic, at most {pressure[0]['calls']} calls"
    bars(running, names, calls, colours, f"requests at once ({line})")
    for place, row in enumerate(pressure):
        limit = min(int(row["fits_by_arithmetic"]), int(row["calls"]))
        running.hlines(limit, place - 0.4, place + 0.4, color="#0072b2", linewidth=1.5)
    for place, row in enumerate(latency):
        for shift, name, colour in zip((-0.27, 0.0, 0.27), TIMES, (FULL, TAIL, OURS), strict=True):
            value = float(row[name])
            gaps.bar(place + shift, value, width=0.25, color=colour, label=TIMES[name])
            where = (place + shift, value)
            gaps.annotate(f"{value:.0f}", where, ha="center", va="bottom", fontsize=8)
    gaps.set_xticks(range(len(latency)), [row["neighbours"] for row in latency], fontsize=8)
    gaps.set_title(f"ms between two tokens beside {latency[0]['calls']} calls", fontsize=9)
    handles, labels = gaps.get_legend_handles_labels()
    gaps.legend(handles[: len(TIMES)], labels[: len(TIMES)], frameon=False, fontsize=8)
    quiet(gaps)
    canvas.tight_layout()
    save(canvas, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "serve.svg")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE_PARAMETERS)
    draw(
        latest("serve_pressure", "kv_budget"), latest("serve_latency", "neighbours"), arguments.out
    )


if __name__ == "__main__":
    main()
