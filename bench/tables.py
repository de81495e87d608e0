"""Write README's result tables from the rows: what is quoted is what was measured.

python bench/tables.py            # rewrite README.md between its markers
python bench/tables.py --check    # exit 1 if README.md says something else
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (ROOT / "bench" / "rows" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def table(header: list[str], lines: list[list[str]], source: list[Row], name: str) -> str:
    """A Markdown table, and where its numbers come from."""
    text = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    text += [f"| {' | '.join(line)} |" for line in lines]
    commands = ", ".join(dict.fromkeys(f"`{row['command']}`" for row in source))
    last = source[-1]
    versions = f"SGLang {last['sglang']}, torch {last['torch']}"
    return "\n".join(
        [
            *text,
            "",
            f"{last['device']}, {versions}, {last['date']}: {commands} (`bench/rows/{name}.csv`).",
        ]
    )


def budget(row: Row) -> str:
    return row["kv_budget"] or "none"


def demo() -> str:
    found = rows("demo")
    header = ["`kv_budget`", "right", "output tokens", "peak KV tokens of a call", "compactions"]
    header += ["evicted sentences", "peak running calls", "tokens/s"]
    lines = [
        [
            budget(row),
            f"{row['right']} of {row['problems']}",
            f"{int(row['output_tokens']):,}",
            f"{int(row['peak_kv_tokens']):,}",
            row["compactions"],
            row["evicted_sentences"],
            row["peak_running"],
            row["tokens_per_s"],
        ]
        for row in found
    ]
    return table(header, lines, found, "demo")


def heldout() -> str:
    found = rows("heldout")
    header = ["level", "policy", "`kv_budget`", "right", "95% interval", "mean output tokens"]
    header += ["peak KV tokens"]
    lines = [
        [
            row["level"],
            row["policy"],
            budget(row),
            f"{row['right']} of {row['problems']}",
            f"{100 * float(row['wilson_low']):.1f}-{100 * float(row['wilson_high']):.1f}%",
            row["output_tokens_mean"],
            f"{int(row['peak_kv_tokens_max']):,}",
        ]
        for row in found
    ]
    return table(header, lines, found, "heldout")


def off_cost() -> str:
    found = rows("off_cost")[-1:]
    header = ["throughput with the plugin and no budget, over SGLang without it", "95% interval"]
    header += ["paired rounds"]
    lines = [
        [row["ratio_p50"], f"{row['ratio_low']}-{row['ratio_high']}", row["rounds"]]
        for row in found
    ]
    return table(header, lines, found, "off_cost")


def similarity() -> str:
    found = rows("similarity")
    header = ["pair of sentences", "pairs", "cosine, 1st percentile", "median", "99th"]
    lines = [
        [row["pair"], row["pairs"], row["cosine_p1"], row["cosine_p50"], row["cosine_p99"]]
        for row in found
    ]
    return table(header, lines, found, "similarity")


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "heldout": heldout,
    "off_cost": off_cost,
    "similarity": similarity,
}


def rendered(readme: str) -> str:
    """The text with every ``<!-- rows: NAME -->`` section replaced.

    Raises:
        KeyError: a section that no table is for.
    """

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- rows: (\w+) -->)\n.*?(<!-- end -->)", fill, readme, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    old = README.read_text()
    new = rendered(old)
    if arguments.check:
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
