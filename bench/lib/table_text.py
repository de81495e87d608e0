"""What every table is made of: rows of a file, and Markdown that says where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, str]
#: ends a quantity of bench/rows/load.csv that was measured without the plugin
PLAIN = ", plain SGLang"
#: a table of more runs leaves the commands to its rows
MOST_COMMANDS = 3


def markdown(header: list[str], lines: list[list[str]]) -> str:
    text = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


def table(header: list[str], lines: list[list[str]], source: list[Row], name: str) -> str:
    """A Markdown table, and where its numbers come from."""
    commands = list(dict.fromkeys(f"`{row['command']}`" for row in source))
    file = f"`bench/rows/{name}.csv`"
    if len(commands) > MOST_COMMANDS:
        origin = f"{len(commands)} commands, each in its rows of {file}"
    else:
        origin = f"{', '.join(commands)} ({file})"
    last = source[-1]
    versions = f"SGLang {last['sglang']}, torch {last['torch']}"
    return "\n".join(
        [
            markdown(header, lines),
            "",
            f"{last['device']}, {versions}, {last['date']}: {origin}.",
        ]
    )


def parameters(row: Row) -> dict[str, Any]:
    """The ``kv_params`` of a row."""
    values: dict[str, Any] = json.loads(row["kv_params"])
    return values


def budget(row: Row) -> str:
    return row["kv_budget"] or "none"


def paired_ratio(name: str, what: str, rows: list[Row]) -> str:
    """Median ratio of paired rounds with its interval."""
    lines = [
        [row["ratio_p50"], f"{row['ratio_low']}-{row['ratio_high']}", row["rounds"]] for row in rows
    ]
    return table([what, "95% interval", "paired rounds"], lines, rows, name)
