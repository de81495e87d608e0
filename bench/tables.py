"""Write the documents' result tables from the rows: what is quoted is what was measured.

python bench/tables.py            # rewrite README.md and four files in docs/ between their markers
python bench/tables.py --check    # exit 1 if one of them says something else
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = (
    README,
    *(ROOT / "docs" / f"{one}.md" for one in ("results", "steering", "performance", "reliability")),
)
LEVELS = ("easy", "medium", "hard")
#: order of policies in tables; the same as in the figures
POLICIES = (
    *("skipkv+", "skipkv", "rkv", "snapkv", "h2o", "tova", "raas", "lazy", "rpc"),
    *("streaming", "random"),
)
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


def right(row: Row) -> str:
    """Accuracy in percent, with its interval."""
    low, high = (100 * float(row[f"wilson_{side}"]) for side in ("low", "high"))
    return f"{100 * float(row['accuracy']):.1f} [{low:.0f}, {high:.0f}]"


def share(row: Row, full: Row) -> int:
    """Budget in percent of the mean trace of FullKV."""
    return round(100 * int(row["kv_budget"]) / float(full["output_tokens"]))


def comparison(levels: tuple[str, ...], sampling: str = "greedy") -> str:
    """Level and policy down, budgets across."""
    found = [
        row
        for row in rows("accuracy")
        if row["level"] in levels and row["sampling"] == sampling and row["model"] == "reasoner"
    ]
    most = max(int(row["problems"]) for row in found)
    found = [row for row in found if int(row["problems"]) == most]
    lines, shares = [], (8, 15, 25, 35, 50)
    for level in levels:
        here = [row for row in found if row["level"] == level]
        full = next(row for row in here if row["policy"] == "full")
        lines.append([level, f"FullKV ({float(full['output_tokens']):,.0f} tokens)"])
        lines[-1] += [right(full), *[""] * (len(shares) - 1)]
        for policy in POLICIES:
            cells = {share(row, full): right(row) for row in here if row["policy"] == policy}
            if cells:
                lines.append([level, f"`{policy}`", *(cells.get(one, "-") for one in shares)])
    header = ["level", "policy", *(f"budget {one}%" for one in shares)]
    return table(header, lines, found, "accuracy")


def ablation(label: Callable[[Row], str | None], first: str) -> str:
    """The rows that ``label`` names, as settings down and budgets across."""
    named = [(label(row), row) for row in rows("ablations")]
    full = next(row for _, row in named if row["policy"] == "full")
    chosen = [(name, row) for name, row in named if name is not None]
    shares = sorted({share_of_cache(row, full) for _, row in chosen})
    lines = []
    for name in dict.fromkeys(name for name, _ in chosen):
        cells = {share_of_cache(row, full): right(row) for other, row in chosen if other == name}
        lines.append([name, *(cells.get(one, "-") for one in shares)])
    header = [first, *(f"budget {one}%" for one in shares)]
    lines.append(["FullKV", right(full), *[""] * (len(shares) - 1)])
    return table(header, lines, [row for _, row in chosen], "ablations")


def share_of_cache(row: Row, full: Row) -> int:
    """Budget in percent of the mean trace, without a prompt that it counts."""
    counted = float(full["prompt_tokens"]) if knobs(row).get("count_prompt") else 0.0
    return round(100 * (int(row["kv_budget"]) - counted) / float(full["output_tokens"]))


def knobs(row: Row) -> dict[str, object]:
    found: dict[str, object] = json.loads(row["kv_params"])
    return found


def components() -> str:
    names = {
        ("random", ()): "nothing (`random`)",
        ("rkv", ()): "tokens only (`rkv`)",
        ("skipkv", ()): "+ sentences (`skipkv`)",
        ("skipkv+", (("ending", 0),)): "+ recent tokens (`skipkv+`, `ending` 0)",
        ("skipkv+", (("recent", 0),)): "+ endings, no recent tokens (`skipkv+`, `recent` 0)",
        ("skipkv+", ()): "+ both (`skipkv+`)",
    }

    def label(row: Row) -> str | None:
        params = knobs(row)
        base = params.pop("interval", None) == 32 and params.pop("tau", 0.85) == 0.85
        return names.get((row["policy"], tuple(params.items()))) if base else None

    return ablation(label, "what decides")


def prompt() -> str:
    def label(row: Row) -> str | None:
        params = knobs(row)
        base = params.pop("interval", None) == 32 and params.pop("tau", 0.85) == 0.85
        free = params.pop("count_prompt", False) and not params.pop("protect_prompt", True)
        loose = row["kv_budget"] and (free or (not params and int(row["kv_budget"]) > 300))
        if not base or params or not loose:
            return None
        return f"`{row['policy']}`, " + ("evictable and counted" if free else "pinned")

    return ablation(label, "prompt")


def thresholds() -> str:
    def label(row: Row) -> str | None:
        params = knobs(row)
        plain = row["policy"] == "skipkv" and params.pop("interval", None) == 32
        tau, sigma = params.pop("tau", 0.95), params.pop("sigma", 0.1)
        loose = row["kv_budget"] and int(row["kv_budget"]) > 300
        return f"`tau` {tau}, `sigma` {sigma}" if plain and loose and not params else None

    return ablation(label, "`skipkv`")


def interval() -> str:
    def label(row: Row) -> str | None:
        params = knobs(row)
        tokens, tau = params.pop("interval", None), params.pop("tau", None)
        loose = row["kv_budget"] and int(row["kv_budget"]) > 300
        if params or tau != 0.85 or not loose or not row["policy"].startswith("skipkv"):
            return None
        return f"`{row['policy']}`, `interval` {tokens}"

    return ablation(label, "policy")


def batch_size() -> str:
    found = rows("batch_size")
    header = ["policy", "batch", "right", "compactions", "same kept sets as alone", "same outputs"]
    lines = [
        [
            f"`{row['policy']}`",
            row["batch"],
            right(row),
            row["compactions"],
            f"{row['same_kept_sets_as_alone']} of {row['problems']}",
            f"{row['same_outputs_as_alone']} of {row['problems']}",
        ]
        for row in found
    ]
    return table(header, lines, found, "batch_size")


def layers() -> str:
    found = rows("layers")
    header = ["layer", "shared set that it would have chosen", "attention lost: one set for all"]
    header += ["its own set", "a set per head"]
    names = ("overlap", "lost_shared", "lost_per_layer", "lost_per_head")
    lines = [[row["layer"], *(f"{100 * float(row[name]):.1f}%" for name in names)] for row in found]
    return table(header, lines, found, "layers")


def needed_tokens() -> str:
    found = rows("needed_tokens")
    header = ["kept of old sentences", "tokens before the delimiter", "and the delimiter"]
    header += ["recent tokens", "old tokens kept, per trace", "wrong next tokens, per trace"]
    names = ("sentences", "tokens_before_delimiter", "with_delimiter", "recent_tokens")
    lines = [[row[name] for name in (*names, "old_tokens", "wrong_tokens")] for row in found]
    return table(header, lines, found, "needed_tokens")


def peer() -> str:
    found = rows("peer")
    header = ["package", "policy", "`kv_budget`", "requests at once", "right", "output tokens"]
    header += ["tokens/s"]
    lines = [
        [
            row["package"],
            f"`{row['policy']}`",
            budget(row),
            row["requests_at_once"],
            right(row),
            row["output_tokens"],
            row["tokens_per_s"],
        ]
        for row in found
    ]
    return table(header, lines, found, "peer")


def paired_ratio(name: str, what: str, found: list[Row]) -> str:
    """Median ratio of paired rounds with its interval."""
    lines = [
        [row["ratio_p50"], f"{row['ratio_low']}-{row['ratio_high']}", row["rounds"]]
        for row in found
    ]
    return table([what, "95% interval", "paired rounds"], lines, found, name)


def off_cost() -> str:
    what = "throughput with the plugin and no budget, over SGLang without it"
    return paired_ratio("off_cost", what, rows("off_cost")[-1:])


def similarity() -> str:
    found = rows("similarity")
    header = ["pair of sentences", "pairs", "cosine, 1st percentile", "median", "99th"]
    lines = [
        [row["pair"], row["pairs"], row["cosine_p1"], row["cosine_p50"], row["cosine_p99"]]
        for row in found
    ]
    return table(header, lines, found, "similarity")


def steering_cells(model: str, *, budgeted: bool) -> list[Row]:
    return [r for r in rows("steering") if r["model"] == model and bool(r["kv_budget"]) == budgeted]


def how_steered(row: Row) -> str:
    """Off, or the two numbers; gamma 0 is SEAL."""
    if not row["steering"]:
        return "off"
    fixed = "fixed (SEAL)" if float(row["gamma"]) == 0 else f"gamma {float(row['gamma']):g}"
    return f"alpha_0 {float(row['steering']):g}, {fixed}"


def steering_numbers(row: Row, full: Row) -> list[str]:
    tokens, before = float(row["output_tokens"]), float(full["output_tokens"])
    return [
        right(row),
        f"{tokens:,.0f} ({100 * (tokens / before - 1):+.0f}%)",
        f"{100 * float(row['nonexecution_share']):.1f}%",
        f"{100 * float(row['similar_share']):.1f}%",
    ]


_STEERING_HEADER = ["right", "output tokens", "non-execution sentences", "similar sentences"]


def strength(model: str) -> str:
    """Every strength by itself, without a budget."""
    found = steering_cells(model, budgeted=False)
    problems = max(int(row["problems"]) for row in found if row["steering"])
    found = [row for row in found if int(row["problems"]) == problems]
    full = next(row for row in found if not row["steering"])
    order = sorted(
        found, key=lambda row: (float(row["gamma"] or -1), float(row["steering"] or 0.0))
    )
    lines = [[how_steered(row), *steering_numbers(row, full)] for row in order]
    return table(["steering", *_STEERING_HEADER], lines, found, "steering")


def steering_budget() -> str:
    """The shape of the paper's table 2: component by component."""
    found = steering_cells("wanderer", budgeted=True)
    full = next(
        row
        for row in steering_cells("wanderer", budgeted=False)
        if not row["steering"] and row["problems"] == found[0]["problems"]
    )
    order = sorted(
        found,
        key=lambda row: (
            int(row["kv_budget"]),
            ("rkv", "skipkv", "skipkv+").index(row["policy"]),
            *(bool(row["steering"]), float(row["gamma"] or 0)),
        ),
    )
    lines = [
        [
            f"{share(row, full)}%",
            f"`{row['policy']}`",
            how_steered(row),
            *steering_numbers(row, full),
        ]
        for row in order
    ]
    lines.append(["FullKV", "", "off", *steering_numbers(full, full)])
    return table(["budget", "policy", "steering", *_STEERING_HEADER], lines, found, "steering")


def without_checks() -> str:
    found = rows("without_checks")
    header = ["model", "checks in the solution", "passages", "wrong passages"]
    names = ("model", "checks", "passages", "wrong_passages")
    lines = [[row[name] for name in names] for row in found]
    return table(header, lines, found, "without_checks")


def serve_latency() -> str:
    found = rows("serve_latency")
    header = ["neighbours", "calls", "compactions", "most in one step", "median step, ms"]
    header += ["p99 step, ms", "longest step, ms"]
    names = ("neighbours", "calls", "compactions", "most_compactions_in_a_step", "p50_ms")
    lines = [[row[name] for name in (*names, "p99_ms", "longest_ms")] for row in found]
    return table(header, lines, found, "serve_latency")


def serve_pressure() -> str:
    found = rows("serve_pressure")
    header = ["`kv_budget`", "tokens/s", "over the full cache", "calls at once", "by arithmetic"]
    header += ["retractions"]
    lines = [
        [
            budget(row),
            f"{float(row['tokens_per_s_p50']):,.0f}",
            f"{row['ratio_p50']} [{row['ratio_low']}, {row['ratio_high']}]",
            f"{row['peak_running']} of {row['calls']}",
            row["fits_by_arithmetic"],
            row["retractions"],
        ]
        for row in found
    ]
    return table(header, lines, found, "serve_pressure")


def serve_compaction() -> str:
    found = rows("serve_compaction")
    header = ["calls in the batch", "compactions", "step, ms", "a compaction, ms"]
    header += ["in steps, median", "in steps, 90th percentile", "of the time"]
    names = ("calls", "compactions", "step_ms_p50", "compaction_ms_p50", "in_steps_p50")
    lines = [
        [*(row[name] for name in (*names, "in_steps_p90")), f"{float(row['share_of_time']):.1%}"]
        for row in found
    ]
    return table(header, lines, found, "serve_compaction")


def fuzz() -> str:
    found = rows("fuzz")
    lives = sum({row["seed"]: int(row["lives"]) for row in found}.values())
    what = f"in {lives:,} lives of {found[-1]['steps']} steps, without a failure"
    times: dict[str, int] = {}
    for row in found:
        times[row["event"]] = times.get(row["event"], 0) + int(row["times"])
    lines = [[event, f"{count:,}"] for event, count in times.items()]
    return table([what, "times"], lines, found, "fuzz")


def planted_bugs() -> str:
    found = rows("planted_bugs")
    seeds = list(dict.fromkeys(row["seed"] for row in found))
    lives = {(row["bug"], row["seed"]): row["lives"] or "never" for row in found}
    lines = [
        [bug, *(lives[bug, seed] for seed in seeds)]
        for bug in dict.fromkeys(row["bug"] for row in found)
    ]
    return table(["bug", *(f"seed {seed}" for seed in seeds)], lines, found, "planted_bugs")


def steering_cost() -> str:
    what = "throughput, every call steered, over the same calls not steered"
    return paired_ratio("steering_cost", what, rows("steering_cost"))


def compiled() -> str:
    """One line per variant; registers on every architecture, the rest on an H100."""
    found = rows("compile")
    latest = {(row["kernel"], row["case"], row["architecture"]): row for row in found}
    architectures = list(dict.fromkeys(row["architecture"] for row in found))
    header = ["kernel", "variant", *(f"registers, {one}" for one in architectures)]
    header += ["spilled bytes, all", "shared bytes, sm_90", "warps", "stages"]
    lines = []
    for kernel, case in dict.fromkeys((row["kernel"], row["case"]) for row in found):
        each = [latest[kernel, case, one] for one in architectures]
        on_h100 = latest[kernel, case, "sm_90"]
        spilled = sum(int(row["spilled_bytes"]) for row in each)
        lines.append([f"`{kernel}`", case, *(row["registers"] for row in each), str(spilled)])
        lines[-1] += [on_h100[name] for name in ("shared_bytes", "warps", "stages")]
    return table(header, lines, found, "compile")


def kernel_floors() -> str:
    found = rows("kernel_floors")
    header = ["kernel", "cached tokens of a request", "bytes", "operations", "memory floor, us"]
    header += ["compute floor, us", "what binds"]
    lines = [
        [
            f"`{row['kernel']}`",
            f"{int(row['cached_tokens']):,}" if row["cached_tokens"] else "",
            f"{int(row['bytes']):,}",
            f"{int(row['operations']):,} ({row['arithmetic']})" if int(row["operations"]) else "0",
            f"{float(row['memory_us']):,.2f}",
            f"{float(row['compute_us']):,.2f}",
            row["binds"],
        ]
        for row in found
    ]
    return table(header, lines, found, "kernel_floors")


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "comparison": lambda: comparison(("hard",)),
    "comparison_all": lambda: comparison(LEVELS),
    "comparison_sampled": lambda: comparison(("easy", "medium"), "sampled"),
    "components": components,
    "prompt": prompt,
    "thresholds": thresholds,
    "interval": interval,
    "batch_size": batch_size,
    "layers": layers,
    "needed_tokens": needed_tokens,
    "peer": peer,
    "off_cost": off_cost,
    "similarity": similarity,
    "strength": lambda: strength("wanderer"),
    "strength_reasoner": lambda: strength("reasoner"),
    "steering_budget": steering_budget,
    "steering_cost": steering_cost,
    "without_checks": without_checks,
    "fuzz": fuzz,
    "planted_bugs": planted_bugs,
    "serve_latency": serve_latency,
    "serve_pressure": serve_pressure,
    "serve_compaction": serve_compaction,
    "compile": compiled,
    "kernel_floors": kernel_floors,
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
