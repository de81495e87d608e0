"""Tables of the metrics, and of what a real Prometheus found in the dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from bench.lib.record import recorded
from bench.lib.table_text import markdown, table
from sgl_skipkv.metrics import METRICS


def metrics() -> str:
    """Every metric, from the code."""

    def labels_of(labels: dict[str, Sequence[str]]) -> str:
        return "; ".join(
            "`policy`: the policies' names" if name == "policy" else f"`{name}`: {', '.join(known)}"
            for name, known in labels.items()
        )

    header = ["question", "metric", "kind", "labels", "meaning"]
    lines = [
        [
            metric.question,
            f"`{metric.full_name}`",
            metric.kind,
            labels_of({**metric.labels}),
            metric.text,
        ]
        for metric in METRICS
    ]
    return markdown(header, lines)


def monitoring() -> str:
    rows = recorded("monitoring")
    header = ["panel", "what", "series", "largest value", "as it should be"]
    lines = [
        [row["panel"], f"`{row['what']}`", row["series"], row["largest"], row["ok"]] for row in rows
    ]
    return table(header, lines, rows, "monitoring")
