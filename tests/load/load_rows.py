"""What a load job measured, and what had to hold."""

from __future__ import annotations

from bench.lib.table_text import PLAIN

Row = dict[str, str | float]


class Findings:
    """Rows of one job.

    Args:
        job: its name, in every row.
        scale: of the number of requests; what has to happen at least so often shrinks with it.
    """

    def __init__(self, job: str, scale: float) -> None:
        self.job, self.scale, self.suffix = job, scale, ""
        self.rows: list[Row] = []

    def plain(self) -> Findings:
        """What is found of SGLang without the plugin: goes to the same rows, and has no limits."""
        other = Findings(self.job, self.scale)
        other.rows, other.suffix = self.rows, PLAIN
        return other

    def count(self, full: int, least: int = 1) -> int:
        """How many of something this run does, at its scale."""
        return max(least, round(full * self.scale))

    def at_most(self, quantity: str, value: float, limit: float) -> None:
        self._add(quantity, value, f"<= {limit:g}", value <= limit)

    def at_least(self, quantity: str, value: float, limit: float) -> None:
        self._add(quantity, value, f">= {limit:g}", value >= limit)

    def happened(self, quantity: str, times: int, full: int) -> None:
        """A guard against an empty test: ``full`` times at least in a run of full size."""
        self.at_least(quantity, times, self.count(full))

    def exactly(self, quantity: str, value: float, limit: float) -> None:
        self._add(quantity, value, f"= {limit:g}", value == limit)

    def note(self, quantity: str, value: float) -> None:
        """A value without a limit."""
        self._add(quantity, value, "", True)

    def _add(self, quantity: str, value: float, limit: str, ok: bool) -> None:
        shown = value if isinstance(value, int) else float(f"{value:.4g}")
        quantity = quantity + self.suffix
        if self.suffix:
            limit, ok = "", True
        row: Row = {"job": self.job, "quantity": quantity, "value": shown, "limit": limit}
        self.rows.append({**row, "ok": "yes" if ok else "no"})
