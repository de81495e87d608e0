"""A million calls of our hooks with arguments that make no sense: does anything get out?

    python tests/fuzz/fuzz_hooks.py --calls 1000000     # one line per hook

An exception that leaves a hook ends SGLang's scheduler, and with it every request of everybody. The
first one ends this program with 1; ``hook_calls.py`` says what is called.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), str(ROOT / "tests" / "helpers")])

from hook_calls import Escaped, HookCalls
from pool_content import plugin_and_topology
from row_table import show

from sgl_skipkv.cli.progress import track

PART = 20_000
logging.disable()  # requests that hooks have refused are not news


def fuzz_hooks(calls: int, seed: int) -> list[dict[str, Any]]:
    """In parts of their own seed, so that a failure names a short run that shows it.

    Raises:
        SystemExit: something got out of a hook.
    """
    hooks: list[HookCalls] = []
    for number in track(range(0, calls, PART), f"hooks, {PART} calls each"):
        hooks.append(HookCalls(seed + number))
        try:
            hooks[-1].run(min(PART, calls - number))
        except Escaped as error:
            raise SystemExit(f"seed {seed + number}: {error}") from error
    sizes = {"calls": calls, "seed": seed}
    return [
        {
            **sizes,
            "hook": name,
            "times": sum(part.calls[name] for part in hooks),
            "refused": sum(part.refused[name] for part in hooks),
            "escaped": 0,
        }
        for name in hooks[0].hooks
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="append to bench/rows")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with plugin_and_topology():
        rows = fuzz_hooks(arguments.calls, arguments.seed)
    title = f"hook calls, {time.perf_counter() - start:.0f} s"
    show(rows, title, record="hook_calls" if arguments.record else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
