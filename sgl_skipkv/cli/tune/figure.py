"""The comparison as a figure: score and throughput against the KV of a request."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_skipkv.cli.tune.compare import Row
from sgl_skipkv.cli.tune.show import Report
from sgl_skipkv.config import SettingError, Unabridged, why_unopened


def check_figure(path: Path) -> None:
    """Refuse a figure that could not be drawn, before a run of minutes.

    Raises:
        SettingError: no matplotlib, no such folder, a type of file that it does not write, or a
            place where nothing can be written.
    """
    if find_spec("matplotlib") is None:
        expected, choices = (
            "the package matplotlib",
            "pip install 'sgl-skipkv[bench]', or no figure",
        )
        raise SettingError("figure", expected, "an environment without it", choices)
    if path.suffix not in _UNDATED:
        raise SettingError("figure", "a file of a known type", Unabridged(path), ".svg, .png, .pdf")
    if not path.absolute().parent.is_dir():
        choices = "another path, or create the folder"
        raise SettingError("figure", "a file in a folder that exists", Unabridged(path), choices)
    try:
        _try_to_write(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _try_to_write(path: Path) -> None:
    """Raise what writing would raise, and change nothing."""
    if path.exists():
        with path.open("ab"):
            return
    with tempfile.TemporaryFile(dir=path.absolute().parent):  # never has a name there
        return


def _unwritable(path: Path, error: OSError) -> SettingError:
    got = Unabridged(f"{path}: {why_unopened(error)}")
    return SettingError("figure", "a file that can be written", got, "another path")


def draw(report: Report, path: Path) -> None:
    """Write the figure: points with 95% intervals, a line per policy, the full cache as a star.

    Raises:
        SettingError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    timed = report.comparison.timed
    canvas = Figure(figsize=(9.0 if timed else 5.0, 3.6), layout="constrained")
    panels = canvas.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _scores(report, panels[0])
    if timed:
        _throughput(report, panels[1])
    for axes in panels:
        axes.set_xlabel("KV tokens of a request beside its prompt, mean")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    try:
        canvas.savefig(path, metadata=_UNDATED[path.suffix])
    except OSError as error:
        raise _unwritable(path, error) from error


#: without a date the same numbers give the same file
_UNDATED: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {},
}


def _by_policy(report: Report) -> dict[str, list[Row]]:
    by_policy: dict[str, list[Row]] = {}
    for row in sorted(report.settings, key=lambda row: row.mean_kv_tokens):
        by_policy.setdefault(row.policy, []).append(row)
    return by_policy


def _scores(report: Report, axes: Any) -> None:
    for policy, rows in _by_policy(report).items():
        scores = [100 * row.score for row in rows]
        below = [100 * (row.score - row.score_low) for row in rows]
        above = [100 * (row.score_high - row.score) for row in rows]
        held = [row.mean_kv_tokens for row in rows]
        axes.errorbar(held, scores, yerr=[below, above], marker="o", capsize=2, label=policy)
    full = report.rows[0]
    axes.plot([full.mean_kv_tokens], [100 * full.score], "*", ms=11, color="#444", label="full")
    if (chosen := report.chosen) is not None:
        at = chosen.mean_kv_tokens, 100 * chosen.score
        axes.plot(*at, "o", ms=14, mfc="none", mec="#444", label="recommended", linestyle="none")
    name = "right answers" if report.comparison.keyed else "equal tokens"
    axes.set_ylabel(f"{name}, %")
    axes.set_title(f"{len(report.comparison.prompts)} prompts, 95% intervals", fontsize=9)


def _throughput(report: Report, axes: Any) -> None:
    for policy, rows in _by_policy(report).items():
        held, ratios = [row.mean_kv_tokens for row in rows], [row.throughput_ratio for row in rows]
        axes.plot(held, ratios, marker="o", label=policy)
    runs = [row.throughput_ratio or 0.0 for row in (report.rows[0], report.rows[-1])]
    axes.axhspan(min(runs), max(runs), color="#444", alpha=0.2, linewidth=0)
    axes.set_ylabel("tokens/s, ratio to the full cache")
    axes.set_title("grey: the two runs of the full cache", fontsize=9)
    axes.set_ylim(bottom=0)
