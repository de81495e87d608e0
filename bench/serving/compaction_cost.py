"""What one compaction costs under one policy over another, paired, without a server.

    python -m bench.serving.compaction_cost
    python -m bench.serving.compaction_cost --policies distinct h2o --rounds 41

The same right traces of ``examples/reasoner`` under the same budget, one policy after the other in
each round: seconds in ``Compactor.compact``, per compaction, one request at a time, plain torch.
One row per policy in bench/rows/compaction_cost.csv: the median of the paired ratios to the last
policy named, the base, and its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics

from bench.lib.forced import REASONER_MODEL, forced_model, reasoner_trace
from bench.lib.pairs import paired_ratio
from bench.lib.policies import compared
from bench.lib.record import append_row
from sgl_skipkv.cli.progress import track

BASE = "rkv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    others = [name for name in compared() if name != BASE]
    parser.add_argument("--policies", nargs="+", choices=compared(), default=[*others, BASE])
    parser.add_argument("--kv-budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=21, help="traces, after one to warm up")
    arguments = parser.parse_args()
    forced, found = forced_model(REASONER_MODEL), dict[str, list[float]]()
    for number in track(range(arguments.rounds + 1), "rounds"):
        ids, prompt = reasoner_trace(forced, "hard", number)
        names = arguments.policies if number % 2 else reversed(arguments.policies)
        for name in names:  # whoever is first changes each time
            keys = {"kv_budget": arguments.kv_budget, "kv_policy": name}
            keys["kv_params"] = {"interval": arguments.interval}
            one = forced.run(ids, prompt, keys)
            if number:
                found.setdefault(name, []).append(1e3 * one.compaction_s / len(one.kept))
    *policies, base = arguments.policies
    for name in policies:
        row = {
            **{"policy": name, "base": base},
            **paired_ratio(found[name], found[base]),
            "ms_p50": round(statistics.median(found[name]), 3),
            "base_ms_p50": round(statistics.median(found[base]), 3),
            **{one: getattr(arguments, one) for one in ("kv_budget", "interval", "rounds")},
        }
        append_row("compaction_cost", row)


if __name__ == "__main__":
    main()
