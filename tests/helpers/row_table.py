"""What the commands of the tests print, and what they add to ``bench/rows``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib.record import append_row


def show(rows: Sequence[Mapping[str, Any]], title: str, *, record: str | None = None) -> None:
    """One table of everything; ``record`` is the file that the rows go to."""
    table = Table(*rows[0], title=title)
    for row in rows:
        style = "bold red" if row.get("ok") == "no" else None
        table.add_row(*map(str, row.values()), style=style)
    Console(width=110).print(table)
    if record is not None:
        for row in rows:
            append_row(record, row)
