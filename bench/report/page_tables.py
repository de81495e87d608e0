"""Tables of pages of several tokens: what they kept, and what else was run in them."""

from __future__ import annotations

from collections import defaultdict

from bench.lib.record import recorded
from bench.lib.table_text import Row, table

_SUMS = ("compactions", "as_page_1", "wrong_tokens")


def pages() -> str:
    """A line per model and page size, all policies together; of repeated runs the last."""
    last = {(row["model"], row["page_tokens"], row["policy"]): row for row in recorded("pages")}
    together = defaultdict[tuple[str, str], list[Row]](list)
    for (model, page, _), row in last.items():
        together[model, page].append(row)
    header = ["model", "page size", "overlap", "policies", "compactions", "as pages of one"]
    header += ["wrong tokens", "largest difference"]
    lines = [
        [
            *(model, page, "/".join(sorted({row["overlap"] for row in rows})), str(len(rows))),
            *(f"{sum(int(row[name]) for row in rows):,}" for name in _SUMS),
            f"{max(float(row['logprob_gap']) for row in rows):.2g}",
        ]
        for (model, page), rows in together.items()
    ]
    return table(header, lines, [*last.values()], "pages")


def page_runs() -> str:
    """Of repeated runs the last."""
    last = {(row["run"], row["page_tokens"], row["quantity"]): row for row in recorded("page_runs")}
    header = ["run", "page size", "quantity", "value", "limit", "held"]
    lines = [
        [*place, f"{float(row['value']):g}", row["limit"], row["ok"]] for place, row in last.items()
    ]
    return table(header, lines, [*last.values()], "page_runs")
