"""What one compaction costs under one policy over another, paired, without a server.

    python -m bench.serving.compaction_cost
    python -m bench.serving.compaction_cost --policies distinct h2o --rounds 41

The same right traces of ``examples/reasoner`` under the same budget, one policy after the other in
each round: seconds in ``Runtime.compact``, per compaction, one request at a time, plain torch. One
row per policy in bench/rows/compaction_cost.csv: the median of the paired ratios to the last policy
named and its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from tqdm import tqdm

from bench.lib.forced import ForcedModel
from bench.lib.pairs import paired_ratio
from bench.lib.record import append_row
from bench.reasoner.check_families import FOLDER, encode
from bench.reasoner.families.base import Task
from bench.reasoner.problems import heldout_problem, solution_text
from sgl_skipkv import policy
from sgl_skipkv.eviction.runtime import Runtime

MODEL = FOLDER.with_name("reasoner")


class Clock:
    """Seconds and calls of ``Runtime.compact`` while it is entered."""

    def __enter__(self) -> Clock:
        self.seconds, self.calls, self._compact = 0.0, 0, Runtime.compact
        compact = self._compact

        def timed(runtime: Runtime, *args: Any) -> Any:
            start = time.perf_counter()
            found = compact(runtime, *args)
            self.seconds, self.calls = self.seconds + time.perf_counter() - start, self.calls + 1
            return found

        Runtime.compact = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Runtime.compact = self._compact  # type: ignore[method-assign]

    @property
    def per_call_ms(self) -> float:
        return 1e3 * self.seconds / self.calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", nargs="+", choices=policy.names(), default=["distinct", "rkv"]
    )
    parser.add_argument("--kv-budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=21, help="traces, after one to warm up")
    arguments = parser.parse_args()
    forced, found = ForcedModel(MODEL), dict[str, list[float]]()
    for number in tqdm(range(arguments.rounds + 1), unit="round"):
        problem = heldout_problem("hard", number)
        task = Task("reasoner", None, problem.prompt, solution_text(problem), problem.answer)
        ids, prompt = encode(forced.tokenizer, task)
        names = arguments.policies if number % 2 else reversed(arguments.policies)
        for name in names:  # whoever is first changes each time
            keys = {"kv_budget": arguments.kv_budget, "kv_policy": name}
            with Clock() as clock:
                forced.run(ids, prompt, {**keys, "kv_params": {"interval": arguments.interval}})
            if number:
                found.setdefault(name, []).append(clock.per_call_ms)
    base = arguments.policies[-1]
    for name in arguments.policies[:-1]:
        row = {
            "metric": f"one compaction of {name} over one of {base}",
            **paired_ratio(found[name], found[base]),
            "ms_p50": round(statistics.median(found[name]), 3),
            "base_ms_p50": round(statistics.median(found[base]), 3),
            **{one: getattr(arguments, one) for one in ("kv_budget", "interval", "rounds")},
        }
        append_row("compaction_cost", row)


if __name__ == "__main__":
    main()
