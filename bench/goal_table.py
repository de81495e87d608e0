"""The goals of reliability as one table: what plain SGLang does in the same run, and what we do.

Every cell is read from the rows of ``tests/fuzz.py``, ``tests/fuzz_hooks.py`` and
``tests/load.py``.
"""

from __future__ import annotations

from table_text import Row, rows, table

#: where the same job did not run without the plugin
NOT_RUN = "-"


class Load:
    """The rows of the load jobs, by job and quantity."""

    def __init__(self) -> None:
        self.rows = rows("load")

    def value(self, job: str, quantity: str) -> str:
        """The last value of that name."""
        found = [r for r in self.rows if r["job"] == job and r["quantity"] == quantity]
        return found[-1]["value"] if found else "not run"

    def complaints(self) -> int:
        """Lines of SGLang's checks in all logs."""
        found = [row for row in self.rows if row["quantity"] == "complaints in the log"]
        return sum(int(float(row["value"])) for row in found)

    def jobs(self) -> str:
        return ", ".join(sorted({row["job"] for row in self.rows}))


def goals() -> str:
    """The table in Markdown."""
    sources = [*rows("fuzz")[-1:], *rows("planted_bugs")[-1:], *rows("hook_calls")[-1:]]
    load = Load()
    return table(
        ["goal", "plain SGLang", "with the plugin and budgets on"],
        [list(line) for line in lines(load)],
        [*sources, *load.rows],
        "load",
    )


def lines(load: Load) -> list[tuple[str, str, str]]:
    """Goal, plain, ours."""
    fuzz, hooks = rows("fuzz"), rows("hook_calls")
    lives = sum({row["seed"]: int(row["lives"]) for row in fuzz}.values())
    calls = sum(int(row["times"]) for row in hooks)
    escaped = sum(int(row["escaped"]) for row in hooks)
    at_once = "16 at once"
    return [
        ("G1 random lives of 50 steps without a failure", NOT_RUN, f"{lives:,}"),
        ("G2 planted bugs found", NOT_RUN, planted(rows("planted_bugs"))),
        (
            "G3 no budget sent: answers like those of plain SGLang, one at a time; "
            "largest difference of a log-probability",
            *(same(load, who, at_once) for who in ("base", "ours")),
        ),
        (
            "G4 no budget sent, budgeted neighbours: answers like those of plain SGLang",
            NOT_RUN,
            f"{load.value('L0', 'identical answers: without a budget')}, all",
        ),
        (
            "G5 retractions among compactions, answers with a token or log-probability too few",
            NOT_RUN,
            f"{load.value('L1', 'retractions')} among {load.value('L1', 'compactions')}, "
            f"{load.value('L1', 'answers with a token or log-probability too few')}",
        ),
        (f"G6 complaints of SGLang's checks in {load.jobs()}", NOT_RUN, str(load.complaints())),
        (
            "G7 soak of 10,000 calls: ended unasked; growth of the scheduler, MB",
            NOT_RUN,
            f"{load.value('L5', 'calls that ended unasked')}; "
            f"{load.value('L5', 'its growth since, MB')}",
        ),
        (
            "G9 hook calls with hostile arguments, exceptions that got out",
            NOT_RUN,
            f"{calls:,}, {escaped}",
        ),
        (
            "G11 300 aborts and 300 hang-ups until idle, seconds",
            NOT_RUN,
            f"{load.value('L2', 'seconds of aborts')} and "
            f"{load.value('L2', 'seconds of disconnects')}",
        ),
        (
            "G12 `kill -9`: slowest end of the parent in seconds, processes left, clean starts",
            NOT_RUN,
            f"{load.value('L7', 'slowest end of a parent, seconds')}, "
            f"{load.value('L7', 'processes left behind')}, {load.value('L7', 'clean starts')}",
        ),
    ]


def planted(found: list[Row]) -> str:
    bugs = {row["bug"] for row in found}
    never = {row["bug"] for row in found if not row["lives"]}
    seeds = len({row["seed"] for row in found})
    worst = max(int(row["lives"]) for row in found if row["lives"])
    return f"{len(bugs) - len(never)} of {len(bugs)} on {seeds} seeds, the last after {worst} lives"


def same(load: Load, who: str, how: str) -> str:
    name = f"{who}, {how}"
    return (
        f"{load.value('L3', f'identical answers: {name}')} of 64; "
        f"{load.value('L3', f'difference of log-probabilities: {name}')}"
    )
