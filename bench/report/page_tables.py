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
    """A line per page size; of repeated runs the last."""
    last = {(row["run"], row["page_tokens"], row["quantity"]): row for row in recorded("page_runs")}
    header = ["page size", "turns, reuse as in pages of one", "compactions, as in pages of one"]
    header += ["wrong tokens", "restores", "recomputed instead", "restored requests, as without"]
    header.append("bytes moved, over the survivors' KV")
    lines = []
    for page in sorted({row["page_tokens"] for row in last.values()}, key=int):
        here = [row for row in last.values() if row["page_tokens"] == page]
        columns = [
            [_values(here, run, quantity) for quantity in quantities]
            for run, *quantities in (
                ("conversations", "turns", "that reuse what pages of one do"),
                ("conversations", "compactions", "of them as pages of one"),
                ("conversations", "wrong tokens"),
                ("restores", "restores"),
                ("restores", "recomputed instead"),
                ("restores", "requests restored", "of them as pages of one, never retracted"),
            )
        ]
        moved = _values(here, "moved bytes", "read and written")
        cells = [", ".join(f"{sum(one):,.0f}" for one in column if one) for column in columns]
        lines.append([page, *cells, f"{max(moved):g}" if moved else ""])
    return table(header, lines, [*last.values()], "page_runs")


def _values(rows: list[Row], run: str, quantity: str) -> list[float]:
    """Of all models, or of all kept sets."""
    return [
        float(row["value"])
        for row in rows
        if row["run"].startswith(run) and row["quantity"].startswith(quantity)
    ]
