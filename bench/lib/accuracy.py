"""Columns of a row that says how many answers are right."""

from __future__ import annotations

from sgl_skipkv.cli.tune.intervals import wilson


def wilson_columns(right: int, n: int) -> dict[str, float]:
    """The Wilson interval of ``right`` of ``n``, with four digits."""
    low, high = wilson(right, n)
    return {"wilson_low": round(low, 4), "wilson_high": round(high, 4)}


def accuracy_columns(right: int, n: int) -> dict[str, float]:
    """Right ones, their share and its Wilson interval, with four digits."""
    return {"right": right, "accuracy": round(right / n, 4), **wilson_columns(right, n)}
