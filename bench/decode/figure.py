"""Draw the decode rows: docs/figures/decode.svg.

    python -m bench.decode.figure

Against the length of a generation: tokens per second of a full cache and of every budget, and how
many times the full cache's they are. Lines are rows of one device; what other papers report stands
beside them with its own device and model, and no line of ours was taken on those.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from bench.accuracy.figure import ROOT, STYLE_PARAMETERS, plt, quiet, save
from bench.lib.record import recorded
from bench.report.device_tables import last_decode_rows

Row = dict[str, str]
#: budget -> colour, marker; in this order
STYLE = (
    ("#444444", "*"),
    ("#d55e00", "o"),
    ("#0072b2", "s"),
    ("#009e73", "^"),
    ("#cc79a7", "v"),
    ("#e69f00", "D"),
)


class Published(NamedTuple):
    """A published measurement, on another device than ours.

    Attributes:
        generated_tokens: per request; None where only the task is named.
        tokens_per_s: None where the paper counts samples.
        ratio: to a full cache in the same table.
    """

    where: str
    generated_tokens: int | None
    tokens_per_s: float | None
    ratio: float | None


#: R-KV (arXiv 2505.24133) table 3; SkipKV (arXiv 2512.07993), GSM8K, 25.4, 20.0 and 4.07 samples
#: per minute; R-KV's SGLang port, GSM8K, 1,628 against 1,792 tokens/s with the flags that it needs
PUBLISHED = (
    Published("R-KV: full, A100-80G, Llama-3-8B", 16384, 347.0, None),
    Published("R-KV: budget 1024, A100-80G, Llama-3-8B", 16384, 3189.0, 9.2),
    Published("SkipKV: budget 512, A100-40G, R1-Qwen-7B, GSM8K", None, None, 25.4 / 4.07),
    Published("R-KV: budget 512, in SkipKV's table", None, None, 20.0 / 4.07),
    Published(
        "R-KV's SGLang port: budget 512, H100, Qwen2.5-Math-7B, GSM8K", None, None, 1628 / 1792
    ),
)
MARKERS, DASHES = ("P", "X", "d", "h", "8"), ("-", "-", "--", ":", "-.")


def lines(axes: Axes, rows: list[Row], value: Callable[[Row], float], *, full: bool) -> None:
    budgets = sorted({row["kv_budget"] for row in rows}, key=lambda one: int(one or 0))
    for budget, (colour, marker) in zip(budgets, STYLE, strict=False):
        if budget or full:
            points = [row for row in rows if row["kv_budget"] == budget]
            points.sort(key=lambda row: int(row["generated_tokens"]))
            axes.plot(
                [int(row["generated_tokens"]) for row in points],
                [value(row) for row in points],
                **{"color": colour, "marker": marker, "markersize": 5},
                label=f"budget {budget}" if budget else "full cache",
            )


def draw(rows: list[Row], path: Path) -> None:
    """Throughput, and its ratio to the full cache's at the same length."""
    full = {row["generated_tokens"]: row for row in rows if not row["kv_budget"]}

    def rate(row: Row) -> float:
        return float(row["tokens_per_s"])

    def ratio(row: Row) -> float:
        return rate(row) / rate(full[row["generated_tokens"]])

    canvas, (left, right) = plt.subplots(1, 2, figsize=(9.5, 5.4))
    lines(left, rows, rate, full=True)
    lines(right, [row for row in rows if row["generated_tokens"] in full], ratio, full=False)
    for one, marker, dashes in zip(PUBLISHED, MARKERS, DASHES, strict=True):
        point = {"marker": marker, "markersize": 7, "linestyle": "none", "fillstyle": "none"}
        look = {"color": "#888888", "label": one.where}
        if one.tokens_per_s is not None:
            left.plot([one.generated_tokens], [one.tokens_per_s], **point, **look)
        if one.ratio is not None and one.generated_tokens is not None:
            right.plot([one.generated_tokens], [one.ratio], **point, **look)
        elif one.ratio is not None:
            right.axhline(one.ratio, linestyle=dashes, linewidth=1, **look)
    lengths = sorted({int(row["generated_tokens"]) for row in rows})
    names: dict[str, object] = {}
    for axes, title in ((left, "tokens per second"), (right, "times the full cache's")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{one:,}" for one in lengths])
        axes.minorticks_off()
        axes.set_xlabel("generated tokens per request")
        axes.set_title(f"{title}; ours on {rows[-1]['device']}", fontsize=9)
        handles, labels = axes.get_legend_handles_labels()
        names |= dict(zip(labels, handles, strict=True))
        quiet(axes)
    below = {"loc": "lower center", "ncols": 2, "frameon": False, "fontsize": 8}
    canvas.legend(list(names.values()), list(names), **below)
    canvas.tight_layout(rect=(0, 0.3, 1, 1))
    save(canvas, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "decode.svg")
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE_PARAMETERS)
    rows = recorded("decode")
    if not rows:
        parser.error("bench/rows/decode.csv: no rows; python -m bench.decode makes them")
    draw(last_decode_rows(rows), arguments.out)


if __name__ == "__main__":
    main()
