"""Long runs of the state machine, and how soon it finds planted bugs.

    python tests/fuzz/fuzz.py --examples 20000          # make fuzz
    python tests/fuzz/fuzz.py --examples 20000 --record # goes on behind the lives on record
    python tests/fuzz/fuzz.py --hicache --examples 2000 # with HiCache behind the pool
    python tests/fuzz/fuzz.py --decode --examples 2000  # a decode server of PD disaggregation
    python tests/fuzz/fuzz.py --windows --examples 2000 # window layers with a pool of their own
    python tests/fuzz/fuzz.py --states --examples 2000  # layers with a state instead of KV
    python tests/fuzz/fuzz.py --drafts --examples 2000  # speculative decoding
    python tests/fuzz/fuzz.py --planted --seeds 1 2 3   # one line per bug and seed
    python tests/fuzz/fuzz.py --planted --soonest       # one line per bug: what make test-slow runs

The first prints how often everything happened; the second how many lives pass before each planted
bug is found. Both end with 1 if something is wrong: an invariant that does not hold, a bug that
stays.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), str(ROOT / "tests" / "helpers")])

from bug_lives import IN_HOST, IN_PAGES, RARE, SOONEST
from planted_bugs import FOUND, bugs, plant
from planted_decode_bugs import decode_bugs
from planted_draft_bugs import draft_bugs
from planted_state_bugs import state_bugs
from planted_window_bugs import window_bugs
from pool_content import plugin_and_topology
from pool_decode_machine import DecodePoolMachine
from pool_draft_machine import DraftPoolMachine
from pool_machine import HostPoolMachine, PagedPoolMachine, PoolMachine, run_machine
from pool_state_machine import StatePoolMachine
from pool_window_machine import WindowPoolMachine
from row_table import show

from bench.lib.record import append_row, recorded
from sgl_skipkv.cli.progress import track

T = TypeVar("T")
Row = dict[str, Any]
STEPS = 50
KINDS = {
    **{"": PagedPoolMachine, "hicache": HostPoolMachine},
    **{"decode": DecodePoolMachine, "windows": WindowPoolMachine, "states": StatePoolMachine},
    "drafts": DraftPoolMachine,
}
OF_KINDS: tuple[tuple[Callable[[], Any], type[PoolMachine]], ...] = (
    *((decode_bugs, DecodePoolMachine), (window_bugs, WindowPoolMachine)),
    *((state_bugs, StatePoolMachine), (draft_bugs, DraftPoolMachine)),
)
PART, RECORDED_AT_ONCE = 500, 2_000
logging.disable()  # requests that the machine has refused are not news


_worker = ExitStack()


def start_worker() -> None:
    """SGLang with our hooks, as long as this process lives."""
    _worker.enter_context(plugin_and_topology())


def side_by_side(work: Callable[..., T], tasks: Sequence[Any], workers: int, unit: str) -> list[T]:
    """``work`` on every task in processes; results in the tasks' order.

    Each task draws from seeds of its own, so who runs it does not matter.
    """
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker) as pool:
        running = [pool.submit(work, *task) for task in tasks]
        try:
            return [task.result() for task in track(running, f"{work.__name__}, {unit}")]
        finally:
            pool.shutdown(cancel_futures=True)


def fuzz(examples: int, seed: int, workers: int, kind: str = "") -> list[Row]:
    """Lives in parts of their own seed, so that a failure names a short run that shows it.

    Args:
        kind: a key of ``KINDS``.

    Raises:
        SystemExit: an invariant does not hold.
    """
    numbers = range(0, examples, PART)
    parts = [(min(PART, examples - number), seed + number, kind) for number in numbers]
    total: Counter[str] = Counter()
    for events in side_by_side(some_lives, parts, workers, f"{PART} lives"):
        total += events
    sizes = {"lives": examples, "steps": STEPS, "seed": seed}
    return [{**sizes, "event": name, "times": count} for name, count in sorted(total.items())]


def fuzz_on(examples: int, seed: int, workers: int) -> list[Row]:
    """The same in steps, each recorded when it is done; those on record are not run again.

    Raises:
        SystemExit: an invariant does not hold.
    """
    done = {row["seed"] for row in recorded("fuzz")}
    rows: list[Row] = []
    for start in range(seed, seed + examples, RECORDED_AT_ONCE):
        if str(start) not in done:
            found = fuzz(min(RECORDED_AT_ONCE, seed + examples - start), start, workers)
            for row in found:
                append_row("fuzz", row)
            rows += found
    return rows


def some_lives(count: int, seed: int, kind: str) -> Counter[str]:
    """What happened in them.

    Raises:
        SystemExit: an invariant does not hold.
    """
    try:
        return run_machine(count, steps=STEPS, seed=seed, kind=KINDS[kind])
    except FOUND as error:
        raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}") from error


def planted(
    seeds: Sequence[int], most: int, workers: int, *, soonest: bool = False, pages: bool = False
) -> list[Row]:
    """Lives that pass until each planted bug is found; empty where it never is.

    Args:
        most: lives per bug and seed.
        soonest: a few lives of one seed after the other, from a known one on, until one finds it.
        pages: only bugs of pages of several tokens.
    """
    names = [name for name, *_ in bugs() if not (soonest and name in RARE)]
    names = [name for name in names if name in IN_PAGES or not pages]
    if soonest:
        return side_by_side(soonest_of, [(name,) for name in names], workers, "bug")
    tasks = [(name, seed, most) for name in names for seed in seeds]
    return side_by_side(lives_until, tasks, workers, "bug")


def lives_until(name: str, seed: int, most: int) -> Row:
    """A planted bug is found."""
    with planted_bug(name):
        found = found_after(name, seed, most)
    return {"bug": name, "seed": seed, "lives": "" if found is None else found}


def soonest_of(name: str) -> Row:
    """The first seed whose first lives find a planted bug."""
    with planted_bug(name):
        for seed in range(SOONEST.get(name, 4), 400):
            found = found_after(name, seed, 8)
            if found is not None:
                return {"bug": name, "seed": seed, "lives": found}
    return {"bug": name, "seed": "", "lives": ""}


@contextmanager
def planted_bug(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, *next(rest for known, *rest in bugs() if known == name))
        yield


def found_after(name: str, seed: int, most: int) -> int | None:
    kind: type[PoolMachine] = PagedPoolMachine if name in IN_PAGES else PoolMachine
    if name in IN_HOST:
        kind = HostPoolMachine
    for bugs_of, own in OF_KINDS:
        if any(name in changes for changes in bugs_of().values()):
            kind = own
    try:
        run_machine(most, steps=STEPS, seed=seed, kind=kind)
    except FOUND:
        return PoolMachine.lives
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--hicache", action="store_true", help="lives with HiCache, not recorded")
    parser.add_argument("--decode", action="store_true", help="a decode server's, not recorded")
    parser.add_argument("--windows", action="store_true", help="two pools, not recorded")
    parser.add_argument("--states", action="store_true", help="hybrid models, not recorded")
    parser.add_argument("--drafts", action="store_true", help="speculation, not recorded")
    parser.add_argument("--planted", action="store_true", help="plant bugs instead")
    parser.add_argument("--pages", action="store_true", help="only bugs of pages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--soonest", action="store_true", help="with seeds that find a bug in their first lives"
    )
    parser.add_argument("--most", type=int, default=3_000, help="lives per planted bug and seed")
    parser.add_argument("--report", type=Path, help="write the rows, as JSON")
    parser.add_argument(
        "--record", action="store_true", help="append to bench/rows; random lives go on there"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes that run the parts"
    )
    arguments = parser.parse_args()
    seeds, workers = arguments.seeds, arguments.workers
    if arguments.planted:
        which = {"soonest": arguments.soonest, "pages": arguments.pages}
        rows = planted(seeds, arguments.most, workers, **which)
        show(rows, "planted bugs", record="planted_bugs" if arguments.record else None)
    else:
        sizes = arguments.examples, seeds[0], workers
        kind = next((name for name in KINDS if name and getattr(arguments, name)), "")
        rows = fuzz_on(*sizes) if arguments.record else fuzz(*sizes, kind)
        if rows:
            show(rows, "random lives")
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(rows))
    return int(any(row.get("lives") == "" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
