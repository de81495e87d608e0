"""Tables whose captions fit a line: a long command is left to its rows."""

from __future__ import annotations

import shlex

from bench.lib import table_text
from bench.lib.table_text import MOST_COMMANDS, Row

#: characters of a command that a caption prints
LONGEST_COMMAND = 120


def table(header: list[str], lines: list[list[str]], source: list[Row], name: str) -> str:
    """As ``table_text.table``; where a command is too long, of each what runs and no flags."""
    commands = {row["command"] for row in source}
    if len(commands) > MOST_COMMANDS or all(len(one) <= LONGEST_COMMAND for one in commands):
        return table_text.table(header, lines, source, name)
    shorter = [{**row, "command": without_flags(row["command"])} for row in source]
    text = table_text.table(header, lines, shorter, name)
    return f"{text} The rows' `command` column has all flags."


def without_flags(command: str) -> str:
    """``python -m bench.decode``, or the script."""
    words = shlex.split(command)
    return shlex.join(words[: 3 if words[1] == "-m" else 2])
