"""What the commands print: tables, or with ``--json`` the same values as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

Cell = str | Text


class Column(NamedTuple):
    """One column: its name in JSON, its heading, and how a value is shown."""

    name: str
    heading: str
    show: Callable[[Any], Cell] = str


def table_of(
    title: str, columns: Iterable[Column], rows: Iterable[Mapping[str, Any]], **options: Any
) -> Table:
    """A table of these rows; each has a value for every column's name."""
    columns = tuple(columns)
    table = Table(
        *(column.heading for column in columns), title=title, title_justify="left", **options
    )
    for row in rows:
        table.add_row(*(column.show(row[column.name]) for column in columns))
    return table


def facts_of(title: str, facts: Mapping[str, Cell]) -> Table:
    """A table of names and values, without headings."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def print_json(value: object, *, indent: int | None = 2) -> None:
    """One JSON value on standard output, as programs read it."""
    print(json.dumps(value, indent=indent, allow_nan=False), flush=True)


def plain(markup: str) -> str:
    """The text without its colours."""
    return Text.from_markup(markup).plain
