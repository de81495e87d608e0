"""What every table is made of: rows of a file, and Markdown that says where they come from."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, str]
#: ends a quantity of bench/rows/load.csv that was measured without the plugin
PLAIN = ", plain SGLang"
#: a table of more runs leaves the commands to its rows
MOST_COMMANDS = 3
#: of fewer paired rounds the bootstrap interval of the median is the smallest and the largest one
FEWEST_ROUNDS = 6
#: characters of a command that a caption prints
LONGEST_COMMAND = 120


def markdown(header: list[str], lines: list[list[str]]) -> str:
    text = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*text, *(f"| {' | '.join(line)} |" for line in lines)])


def table(header: list[str], lines: list[list[str]], source: list[Row], name: str) -> str:
    """A Markdown table, and where its numbers come from."""
    last = source[-1]
    versions = f"SGLang {last['sglang']}, torch {last['torch']}"
    origin = _origin(list(dict.fromkeys(row["command"] for row in source)), name)
    dates = sorted({row["date"] for row in source})
    made = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    caption = f"{last['device']}, {versions}, {made}: {origin}"
    return "\n".join([markdown(header, lines), "", caption])


def _origin(commands: list[str], name: str) -> str:
    """The commands that made rows of a file, as far as they fit a caption."""
    file = f"`bench/rows/{name}.csv`"
    if len(commands) > MOST_COMMANDS:
        return f"{len(commands)} commands, each in its rows of {file}."
    fit = all(len(command) <= LONGEST_COMMAND for command in commands)
    shown = commands if fit else dict.fromkeys(map(without_flags, commands))
    flags = "" if fit else " The rows' `command` column has all flags."
    return f"{', '.join(f'`{command}`' for command in shown)} ({file}).{flags}"


def without_flags(command: str) -> str:
    """``python -m bench.decode``, or the script."""
    words = shlex.split(command)
    return shlex.join(words[: 3 if words[1] == "-m" else 2])


def parameters(row: Row) -> dict[str, Any]:
    """The ``kv_params`` of a row."""
    values: dict[str, Any] = json.loads(row["kv_params"])
    return values


def budget(row: Row) -> str:
    return row["kv_budget"] or "none"


def spread(rows: list[Row]) -> str:
    """What the brackets of paired rounds are: an interval of the median, of few their range."""
    rounds = sorted({int(row["rounds"]) for row in rows})
    few = rounds[0] < FEWEST_ROUNDS
    return f"range of {' or '.join(map(str, rounds))} rounds" if few else "95% interval"


def ratio_with_interval(row: Row) -> str:
    return f"{row['ratio_p50']} [{row['ratio_low']}, {row['ratio_high']}]"


def ratio_table(name: str, what: str, rows: list[Row]) -> str:
    """Median ratio of paired rounds with its interval."""
    lines = [
        [row["ratio_p50"], f"{row['ratio_low']}-{row['ratio_high']}", row["rounds"]] for row in rows
    ]
    return table([what, spread(rows), "paired rounds"], lines, rows, name)
