"""Cells of a comparison, one row each; cells on record are not run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeVar

from bench.lib.record import append_row, recorded
from sgl_skipkv.cli.progress import track

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def is_in(cell: DataclassInstance, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether one of the rows is of this cell."""
    columns = {name: str(value) for name, value in asdict(cell).items()}
    return any(columns.items() <= row.items() for row in rows)


def run_cells(
    name: str, cells: Sequence[C], run: Callable[[C], Mapping[str, Any]], workers: int
) -> None:
    """Append the rows that ``bench/rows/<name>.csv`` lacks, in the cells' order.

    Args:
        run: cell -> its row, without the cell's own columns; picklable.
        workers: processes.
    """
    known = recorded(name)
    todo = [cell for cell in cells if not is_in(cell, known)]
    with ExitStack() as stack:
        each: Callable[..., Iterator[Mapping[str, Any]]] = map
        if workers > 1:
            pool = ProcessPoolExecutor(workers, get_context("spawn"))
            each = stack.enter_context(pool).map
        for cell, row in zip(todo, track(each(run, todo), name, len(todo)), strict=True):
            append_row(name, {**asdict(cell), **row})
