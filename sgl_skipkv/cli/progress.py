"""One progress bar for everything that takes longer than a few seconds: how many are done, how many
in a second, and how long the rest will take."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

T = TypeVar("T")


class _Rate(ProgressColumn):
    """Per second, or per minute where that is below one, in the task's ``unit`` if it has any."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = f" {task.fields['unit']}" if "unit" in task.fields else ""
        if speed is None:
            return Text(f"-{unit}/s")
        return Text(f"{speed:,.1f}{unit}/s" if speed >= 1 else f"{60 * speed:.1f}{unit}/min")


def progress(*, transient: bool = False) -> Progress:
    """The bar, on standard error: standard output is for results, and where it is not a terminal it
    gets all that is printed while the bar is there."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),
        speed_estimate_period=120,
    )


def step(text: str) -> None:
    """One line on standard error where that is no terminal, which shows no bar until its end."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def track(things: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The things, with a bar of how many have been taken.

    Args:
        total: how many there are, where they have no length.
    """
    with progress() as bar:
        yield from bar.track(things, total, description=what)
