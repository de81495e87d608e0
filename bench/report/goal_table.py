"""The goals of reliability as one table: what plain SGLang does in the same run, and what we do.

Every cell is read from the rows of ``tests/fuzz/fuzz.py``, ``tests/fuzz/fuzz_hooks.py`` and
``tests/load/load.py``.
"""

from __future__ import annotations

from bench.lib.record import recorded
from bench.lib.table_text import PLAIN, Row, table

#: what SGLang without the plugin cannot be asked
NONE = "-"


class Load:
    """The rows of the load jobs, by job and quantity."""

    def __init__(self) -> None:
        self.rows = recorded("load")

    def value(self, job: str, quantity: str) -> str:
        """The last value of that name."""
        matching = [r for r in self.rows if r["job"] == job and r["quantity"] == quantity]
        return matching[-1]["value"] if matching else "not run"

    def both(self, job: str, pattern: str, *quantities: str) -> tuple[str, str]:
        """A cell for SGLang without the plugin and one for ours, of the same quantities."""
        plain, ours = (
            pattern.format(*(self.value(job, quantity + suffix) for quantity in quantities))
            for suffix in (PLAIN, "")
        )
        return plain, ours

    def complaints(self) -> tuple[str, str]:
        """Lines of SGLang's checks in all logs, without the plugin and with it."""
        counts = [
            sum(int(float(row["value"])) for row in self.rows if row["quantity"] == quantity)
            for quantity in (f"complaints in the log{PLAIN}", "complaints in the log")
        ]
        return str(counts[0]), str(counts[1])

    def jobs(self) -> str:
        return ", ".join(sorted({row["job"] for row in self.rows}))


def goals() -> str:
    """The table in Markdown."""
    sources = [*recorded("fuzz")[-1:], *recorded("planted_bugs")[-1:], *recorded("hook_calls")[-1:]]
    load = Load()
    return table(
        ["goal", "plain SGLang", "with the plugin and budgets on"],
        [list(line) for line in lines(load)],
        [*sources, *load.rows],
        "load",
    )


def lines(load: Load) -> list[tuple[str, str, str]]:
    """Goal, plain, ours."""
    retracted, retracted_ours = load.both("L1", "{}, {}", *RETRACTED)
    fuzz, hooks = recorded("fuzz"), recorded("hook_calls")
    lives = sum({row["seed"]: int(row["lives"]) for row in fuzz}.values())
    calls = sum(int(row["times"]) for row in hooks)
    escaped = sum(int(row["escaped"]) for row in hooks)
    alone = "identical answers: without a budget"
    return [
        ("G1 random lives of 50 steps without a failure", NONE, f"{lives:,}"),
        ("G2 planted bugs found", NONE, planted(recorded("planted_bugs"))),
        (
            "G3 no budget sent, 16 at once: answers like those of plain SGLang, one at a time; "
            "largest difference of a log-probability",
            *(same(load, who, "16 at once") for who in ("base", "ours")),
        ),
        (
            "G4 no budget sent, budgeted neighbours: answers like those of plain SGLang",
            NONE,
            f"{load.value('L0', alone)}, all",
        ),
        (
            "G5 forced retractions, answers with a token or log-probability too few",
            retracted,
            f"{retracted_ours}, among {load.value('L1', 'compactions')} compactions",
        ),
        (f"G6 complaints of SGLang's checks in {load.jobs()}", *load.complaints()),
        (
            "G7 soak of 10,000 requests: ended unexpectedly; growth of the scheduler, MB",
            *load.both("L5", "{}; {}", "requests that ended unexpectedly", "its growth since, MB"),
        ),
        (
            "G8 wrong values sent, not refused with 400; p99 of an answer, ms",
            *load.both("L4", "{}, {}; {}", *REFUSED),
        ),
        (
            "G9 hook calls with hostile arguments, exceptions that got out",
            NONE,
            f"{calls:,}, {escaped}",
        ),
        (
            "G10 wrong starts that end with one line; slowest end, seconds",
            NONE,
            f"{load.value('L4', 'wrong starts that end with one line')} of 4; "
            f"{load.value('L4', 'slowest of them, seconds')}",
        ),
        (
            "G11 300 aborts and 300 hang-ups until idle, seconds",
            *load.both("L2", "{} and {}", "seconds of aborts", "seconds of disconnects"),
        ),
        (
            "G12 `kill -9`: slowest end of a server, seconds; clients left waiting; processes "
            "left behind; clean starts",
            *load.both("L7", "{}; {}; {}; {}", *KILLED),
        ),
        (
            "G13 conversations in a quarter of the KV memory that they need: turns, and those that "
            "the masking oracle explains; histories continued, lost; turns restored, recomputed",
            NONE,
            "{}, {}; {}, {}; {}, {}".format(*(load.value("L8", name) for name in CROWDED)),
        ),
        (
            "G14 no budget sent, among these conversations: answers like those of plain SGLang",
            NONE,
            f"{load.value('L8', 'identical answers: without a budget, beside conversations')}, all",
        ),
        (
            "G15 everything at once: requests; of them ended unexpectedly; known answers without a "
            "budget, of them identical",
            *load.both("L9", "{}; {}; {}, {}", *MIXED, *KNOWN),
        ),
        (
            "G16 known answers with a budget, not recomputed, among all that; of them identical",
            NONE,
            "{}, {}".format(*(load.value("L9", name) for name in KNOWN_BUDGETED)),
        ),
    ]


MIXED = ("requests", "requests that ended unexpectedly")
KNOWN = ("known answers without a budget", "identical answers: without a budget, in the storm")
KNOWN_BUDGETED = (
    "known answers with a budget",
    "identical answers: with a budget, in the storm",
)
RETRACTED = ("retractions", "answers with a token or log-probability too few")
REFUSED = (
    "wrong values sent",
    "wrong values not refused with 400",
    "p99 of an answer to a wrong value, ms",
)
KILLED = (
    "slowest end, seconds",
    "clients left waiting",
    "processes left behind",
    "clean starts",
)
CROWDED = (
    "turns",
    "turns that the masking oracle explains",
    "turns that continued a history",
    "histories lost",
    "turns restored",
    "turns recomputed",
)


def planted(rows: list[Row]) -> str:
    bugs = {row["bug"] for row in rows}
    never = {row["bug"] for row in rows if not row["lives"]}
    seeds = len({row["seed"] for row in rows})
    worst = max(int(row["lives"]) for row in rows if row["lives"])
    return f"{len(bugs) - len(never)} of {len(bugs)} on {seeds} seeds, the last after {worst} lives"


def same(load: Load, who: str, how: str) -> str:
    name = f"{who}, {how}"
    return (
        f"{load.value('L3', f'identical answers: {name}')} of 64; "
        f"{load.value('L3', f'difference of log-probabilities: {name}')}"
    )
