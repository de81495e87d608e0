"""Write the documents' tables: results from the rows, policies and parameters from their classes.

python -m bench.report            # rewrite README.md and files in docs/ between their markers
python -m bench.report --check    # exit 1 if one of them says something else
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from bench.lib.table_text import ROOT
from bench.report import (
    accuracy_tables,
    conversation_tables,
    default_tables,
    device_tables,
    family_tables,
    goal_table,
    metric_tables,
    model_tables,
    page_tables,
    policy_tables,
    public_tables,
    rank_tables,
    steering_tables,
    system_tables,
    tune_tables,
)

README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
SECTION = re.compile(r"(<!-- (?:rows|table): (\w+) -->)\n.*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    "policies": policy_tables.policies,
    "parameters": policy_tables.parameters,
    "demo": accuracy_tables.demo,
    "comparison": lambda: accuracy_tables.comparison(("hard",)),
    "comparison_others": lambda: accuracy_tables.comparison(("easy", "medium")),
    "comparison_sampled": lambda: accuracy_tables.comparison(
        accuracy_tables.LEVELS, "sampled", accuracy_tables.SAMPLED
    ),
    "components": accuracy_tables.components,
    "prompt": accuracy_tables.prompt,
    "thresholds": accuracy_tables.thresholds,
    "interval": accuracy_tables.interval,
    "batch_size": accuracy_tables.batch_size,
    "layers": accuracy_tables.layers,
    "leaderboard": family_tables.leaderboard,
    "families": family_tables.families,
    "families_sampled": lambda: family_tables.families("sampled", ("distinct", "skipkv+")),
    "sampled_policies": family_tables.sampled_policies,
    "right_traces": family_tables.right_traces,
    "long_traces": family_tables.long_traces,
    "many_long_traces": family_tables.many_long_traces,
    "unseen": family_tables.unseen,
    "unseen_answers": accuracy_tables.unseen,
    "needed_in_total": family_tables.needed_in_total,
    "needed_by_family": family_tables.needed_by_family,
    "parts": default_tables.parts,
    "beginnings": default_tables.beginnings,
    "signals": default_tables.signals,
    "heads": default_tables.heads,
    "quotas": default_tables.quotas,
    "sizes": default_tables.sizes,
    "mix": default_tables.mix,
    "public_nats": public_tables.nats,
    "public_recall": public_tables.recall,
    "needed_tokens": accuracy_tables.needed_tokens,
    "parity": accuracy_tables.parity,
    "tune": tune_tables.tune,
    "peer": accuracy_tables.peer,
    "conversation": conversation_tables.conversation,
    "conversation_first_token": conversation_tables.conversation_first_token,
    "conversation_pressure": conversation_tables.conversation_pressure,
    "conversation_hicache": conversation_tables.conversation_hicache,
    "off_cost": system_tables.off_cost,
    "explorer": system_tables.explorer,
    "similarity": accuracy_tables.similarity,
    "strength": lambda: steering_tables.strength("wanderer"),
    "strength_reasoner": lambda: steering_tables.strength("reasoner"),
    "steering_budget": steering_tables.steering_budget,
    "steering_cost": steering_tables.steering_cost,
    "without_checks": steering_tables.without_checks,
    "fuzz": system_tables.fuzz,
    "goals": goal_table.goals,
    "hook_calls": system_tables.hook_calls,
    "metrics": metric_tables.metrics,
    "monitoring": metric_tables.monitoring,
    "load": system_tables.load,
    "planted_bugs": system_tables.planted_bugs,
    "launches": system_tables.launches,
    "models": model_tables.models,
    "pages": page_tables.pages,
    "page_runs": page_tables.page_runs,
    "ranks": rank_tables.ranks,
    "rank_runs": rank_tables.rank_runs,
    "rank_costs": rank_tables.rank_costs,
    "serve_latency": system_tables.serve_latency,
    "serve_pressure": system_tables.serve_pressure,
    "compaction_cost": system_tables.compaction_cost,
    "serve_compaction": system_tables.serve_compaction,
    "compile": system_tables.compiled,
    "kernels": device_tables.kernels,
    "gains": device_tables.gains,
    "serve_steady": device_tables.serve_steady,
    "serve_ample": device_tables.serve_ample,
    "kernel_floors": system_tables.kernel_floors,
    "decode": device_tables.decode,
    "decode_floors": system_tables.decode_floors,
}


def rendered(readme: str) -> str:
    """The text with every ``<!-- rows: NAME -->`` and ``<!-- table: NAME -->`` section replaced.

    Raises:
        KeyError: a section that no table is for.
    """

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return SECTION.sub(fill, readme)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    changed = 0
    for document in DOCUMENTS:
        old = document.read_text()
        new = rendered(old)
        changed += new != old
        if not arguments.check:
            document.write_text(new)
    return int(arguments.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
