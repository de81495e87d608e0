"""The comparison as a table, and what it says in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from sgl_skipkv.cli.tune.compare import ERROR, Comparison, Row, acceptable, recommended
from sgl_skipkv.cli.tune.intervals import (
    least_difference,
    pairs_for,
    pairs_to_bound,
    quantile,
)

#: points that a user would rather not lose; how many prompts it takes to tell them from none
_FINE_POINTS = 2


@dataclass(frozen=True)
class Report:
    """Everything that one run of the command found.

    Attributes:
        rows: the full cache twice, first and last, and the settings between.
        full_tokens: median output of the full cache.
        tolerance: the largest loss of score that a recommendation may have, in [0, 1].
        notes: sentences about prompts and settings that were left out.
    """

    comparison: Comparison
    rows: Sequence[Row]
    full_tokens: float
    tolerance: float
    notes: Sequence[str] = ()

    @property
    def settings(self) -> Sequence[Row]:
        """The rows that have a budget."""
        return self.rows[1:-1]

    @property
    def tells(self) -> bool:
        """Whether the full cache surely scores more than a recommendation may lose: otherwise any
        setting would do, even one without a right answer.
        """
        return not self.comparison.keyed or self.rows[0].score_low > self.tolerance

    @property
    def chosen(self) -> Row | None:
        return recommended(self.settings, self.tolerance) if self.tells else None

    @property
    def policies(self) -> int:
        return len({row.policy for row in self.settings})


def table(report: Report) -> Table:
    """A line per setting."""
    keyed, timed = report.comparison.keyed, report.comparison.timed
    sure = f"{100 * (1 - 2 * ERROR / report.policies):.3g}%"
    shown = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column("kv_policy", no_wrap=True)
    columns = ["kv_budget\nof output", "right, %\n[95%]" if keyed else "equal tokens\n% [95%]"]
    columns += [f"points to\nfull [{sure}]"]
    columns += [] if keyed else ["log-prob\ndifference"]
    columns += ["KV tokens\nmean, peak"] + (["tokens/s\nto full"] if timed else [])
    for column in columns:
        shown.add_column(column, justify="right", overflow="fold")
    for i, row in enumerate(report.rows):
        again = " again" if i == len(report.rows) - 1 else ""
        budget = "none"
        if row.kv_budget is not None:
            budget = f"{row.kv_budget} {row.kv_budget / report.full_tokens:4.0%}"
        score, low, high = (100 * value for value in (row.score, row.score_low, row.score_high))
        cells = [budget, f"{score:.1f} [{low:.0f}, {high:.0f}]", difference(row) if i else ""]
        if not keyed:
            gap = row.logprob_difference
            cells += ["" if gap is None else f"{gap:.4f}"]
        cells += [f"{row.mean_kv_tokens:,.0f} {row.peak_kv_tokens:6,.0f}"]
        if row.tokens_per_s is not None:
            cells += [f"{row.tokens_per_s:,.0f} {row.throughput_ratio:5.2f}"]
        style = "bold" if row is report.chosen else None
        shown.add_row(f"{row.policy}{again}", *cells, style=style)
    return shown


def difference(row: Row) -> str:
    """In points, with its interval."""
    points = (100 * value for value in (row.difference, row.difference_low, row.difference_high))
    middle, low, high = points
    return f"{middle:+.1f} [{low:+.0f}, {high:+.0f}]"


def sentences(report: Report) -> list[str]:
    """The recommendation, how sure it is, and what else a reader has to know."""
    return [*_recommendation(report), *_notes(report), *report.notes]


def _recommendation(report: Report) -> list[str]:
    z, n = report.comparison.z, len(report.comparison.prompts)
    full, chosen = report.rows[0], report.chosen
    least, tolerance = 100 * least_difference(n, z), 100 * report.tolerance
    enough = pairs_for(_FINE_POINTS / 100, z)
    finer = f"; {enough} could tell {_FINE_POINTS}" if enough > n else ""
    cannot = (
        f"{n} prompts cannot tell a loss of up to {least:.1f} points from none, "
        f"even if every score is equal{finer}."
    )
    if chosen is not None:
        return [
            f"Recommended: kv_policy {chosen.policy}, kv_budget {chosen.kv_budget}. "
            f"{_scored(report, chosen)}; the full cache: {_scored(report, full)}.",
            f"Beside its prompt a request holds {chosen.mean_kv_tokens:,.0f} KV tokens on average "
            f"and {chosen.peak_kv_tokens:,.0f} at its peak, with the full cache "
            f"{full.mean_kv_tokens:,.0f} and {full.peak_kv_tokens:,.0f}.",
            f"How sure: {_seen(chosen)}, and up to {-100 * chosen.difference_low:.1f} points are "
            f"possible ({1 - ERROR:.0%} sure, over all settings together). {cannot}",
        ]
    if not report.tells:
        return [
            f"No recommendation: the full cache itself has {_scored(report, full)}; check the "
            "answers, --suffix and --max-new-tokens.",
            f"Its 95% interval begins at {100 * full.score_low:.1f}%, and a loss of {tolerance:g} "
            "points is tolerated (--tolerance-points), so any budget could pass.",
        ]
    if least > tolerance:
        return [
            "No recommendation: keep the full cache, or give more prompts.",
            f"{cannot} To show {tolerance:g} points (--tolerance-points) takes "
            f"{pairs_for(report.tolerance, z)} or more.",
        ]
    why = f"every budget may lose more than {tolerance:g} points"
    if acceptable(report.settings, report.tolerance):
        why = f"only budgets that evict nothing lose at most {tolerance:g} points"
    return [
        f"No recommendation: keep the full cache, because {why} (--tolerance-points).",
        *_next(report),
        cannot,
    ]


def _next(report: Report) -> list[str]:
    """The nearest setting, and what could show that it is good enough."""
    evicting = [row for row in report.settings if row.compactions]
    if not evicting:
        return ["No budget was small enough to evict anything."]
    best = max(evicting, key=lambda row: (row.difference_low, -row.mean_kv_tokens))
    lines = [
        f"The nearest is kv_policy {best.policy}, kv_budget {best.kv_budget}: "
        f"{_scored(report, best)}, {difference(best)} points."
    ]
    alone = quantile(1 - ERROR)
    enough = pairs_to_bound(best.lost, best.gained, report.tolerance, alone)
    if enough is not None:
        lines.append(
            f"At this rate about {enough} prompts that are not among these can show it: "
            f"--policies {best.policy} --budgets {best.kv_budget} --problems {enough}"
        )
    return lines


def _seen(row: Row) -> str:
    if row.difference < 0:
        return f"{-100 * row.difference:.1f} points were lost"
    return "no loss was seen"


def _scored(report: Report, row: Row) -> str:
    n = len(report.comparison.prompts)
    if report.comparison.keyed:
        return f"{round(row.score * n)} of {n} answers right"
    return f"{100 * row.score:.1f}% of the tokens before the first that differs"


def _notes(report: Report) -> list[str]:
    first, second, n = report.rows[0], report.rows[-1], len(report.comparison.prompts)
    twice = f"The full cache, run twice, gave the same output for {second.equal_outputs} of {n}"
    if first.tokens_per_s is None or second.tokens_per_s is None:
        notes = [f"{twice}.", "No tokens/s: others may have used the server at the same time."]
    else:
        slow, fast = sorted((first.tokens_per_s, second.tokens_per_s))
        rates = f"{slow:,.0f} and {fast:,.0f} tokens/s"
        notes = [
            f"{twice}, at {rates}: smaller differences of tokens/s mean nothing, and larger ones "
            "little where others use the machine."
        ]
    if first.length_limited:
        wrong = ", which counts as wrong" if report.comparison.keyed else ""
        notes.append(
            f"{first.length_limited} of {n} outputs of the full cache ran into --max-new-tokens"
            f"{wrong}."
        )
    return notes
