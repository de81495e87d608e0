"""Tables of the system: servers under load, memory under fuzzing, kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import zip_longest
from math import inf

from bench.lib.record import recorded
from bench.lib.table_text import (
    PLAIN,
    Row,
    budget,
    markdown,
    ratio_table,
    ratio_with_interval,
    spread,
    table,
)

#: generated tokens of the papers' largest table
LONGEST = 16384
#: lives until a planted bug is found, and how many of those that took longest are named
SOON, LATER, SHOWN_BUGS = 10, 100, 6


def on_cpu(name: str) -> list[Row]:
    """What runs on any machine: a GPU's rows are no continuation of these."""
    return [row for row in recorded(name) if "CPU" in row["device"]]


def off_cost() -> str:
    what = "throughput with the plugin and no budget, over SGLang without it"
    return ratio_table("off_cost", what, on_cpu("off_cost")[-1:])


def serve_latency() -> str:
    rows = on_cpu("serve_latency")
    header = ["neighbours", "requests", "compactions", "most in one step", "median step, ms"]
    header += ["p99 step, ms", "longest step, ms"]
    names = ("neighbours", "calls", "compactions", "most_compactions_in_a_step", "p50_ms")
    lines = [[row[name] for name in (*names, "p99_ms", "longest_ms")] for row in rows]
    return table(header, lines, rows, "serve_latency")


def serve_pressure() -> str:
    rows = on_cpu("serve_pressure")
    header = ["`kv_budget`", "tokens/s", f"over the full cache, {spread(rows)}"]
    header += ["requests at once", "by arithmetic", "retractions"]
    lines = [
        [
            budget(row),
            f"{float(row['tokens_per_s_p50']):,.0f}",
            ratio_with_interval(row),
            f"{row['peak_running']} of {row['calls']}",
            row["fits_by_arithmetic"],
            row["retractions"],
        ]
        for row in rows
    ]
    return table(header, lines, rows, "serve_pressure")


def compaction_cost() -> str:
    rows = recorded("compaction_cost")
    lines = [
        [
            f"`{row['policy']}`",
            row["ms_p50"],
            row["base_ms_p50"],
            ratio_with_interval(row),
        ]
        for row in rows
    ]
    base = rows[-1]
    header = ["policy", "ms, median"]
    header.append(f"`{base['base']}` beside it, ms")
    header.append(f"over that, {spread(rows)}")
    return table(header, lines, rows, "compaction_cost")


def serve_compaction() -> str:
    rows = on_cpu("serve_compaction")
    header = ["requests in the batch", "compactions", "step, ms", "a compaction, ms"]
    header += ["in steps, median", "in steps, 90th percentile", "of the time"]
    names = ("calls", "compactions", "step_ms_p50", "compaction_ms_p50", "in_steps_p50")
    lines = [
        [*(row[name] for name in (*names, "in_steps_p90")), f"{float(row['share_of_time']):.1%}"]
        for row in rows
    ]
    return table(header, lines, rows, "serve_compaction")


def launches() -> str:
    rows = recorded("launches")
    counts = [name for name in rows[-1] if name.startswith("operations_")]
    header = ["policy", *(f"requests due: {name.removeprefix('operations_')}" for name in counts)]
    lines = [[f"`{row['policy']}`", *(row[name] for name in counts)] for row in rows]
    return table(header, lines, rows, "launches")


def explorer() -> str:
    rows = recorded("explorer")
    header = ["generated tokens", "requests side by side", "page, bytes", "data, bytes"]
    header += ["first paint, ms", "text painted, ms", "slider step, ms, median", "longest"]
    header += ["computed in it, ms, median", "longest", "load of the machine"]
    names = ("tokens", "side_by_side", "page_bytes", "data_bytes", "first_paint_ms")
    lines = [
        [
            *(f"{int(row[name]):,}" for name in (*names, "text_painted_ms")),
            *(row[f"step_{kind}"] for kind in ("ms_p50", "ms_max", "cpu_ms_p50", "cpu_ms_max")),
            row["machine_load"],
        ]
        for row in rows
    ]
    return f"Chromium {rows[-1]['chromium']}, headless.\n\n" + table(
        header, lines, rows, "explorer"
    )


def fuzz() -> str:
    """Two events side by side. An event that most seeds lack has been counted only since then."""
    found = recorded("fuzz")
    seeds = len({row["seed"] for row in found})
    known = Counter(row["event"] for row in found)
    lives = sum({row["seed"]: int(row["lives"]) for row in found}.values())
    what = f"in {lives:,} lives of {found[-1]['steps']} steps, without a failure"
    times: dict[str, int] = {}
    for row in found:
        times[row["event"]] = times.get(row["event"], 0) + int(row["times"])
    events = [[event, f"{n:,}"] for event, n in times.items() if 2 * known[event] >= seeds]
    half = (len(events) + 1) // 2
    pairs = zip_longest(events[:half], events[half:], fillvalue=["", ""])
    lines = [[*left, *right] for left, right in pairs]
    return table([what, "times", "and", "times"], lines, found, "fuzz")


def planted_bugs() -> str:
    """Per seed how soon they are found; then those that took longest on any seed."""
    found = recorded("planted_bugs")
    seeds = list(dict.fromkeys(row["seed"] for row in found))
    lives: dict[str, dict[str, str]] = defaultdict(dict)
    for row in found:
        lives[row["bug"]][row["seed"]] = row["lives"]
    header = ["seed", "planted bugs", f"found within {SOON} lives", f"within {LATER}", "later"]
    lines = []
    for seed in seeds:
        until = [_lives(of[seed]) for of in lives.values()]
        within = [sum(one <= bound for one in until) for bound in (SOON, LATER)]
        later = len(until) - within[1] - until.count(inf)
        lines.append([seed, *map(str, (len(until), *within, later, until.count(inf)))])
    last = sorted(lives, key=lambda bug: -max(map(_lives, lives[bug].values())))[:SHOWN_BUGS]
    rare = [[bug, *(lives[bug][seed] or "never" for seed in seeds)] for bug in last]
    header_of_last = ["found last, after so many lives", *(f"seed {seed}" for seed in seeds)]
    return "\n\n".join(
        [
            markdown([*header, "not found"], lines),
            table(header_of_last, rare, found, "planted_bugs"),
        ]
    )


def _lives(value: str) -> float:
    return float(value) if value else inf


def hook_calls() -> str:
    """A line per hook that refuses, and one for all others."""
    found = recorded("hook_calls")
    header = ["hook", "calls", "answered with an error of ours", "exceptions that got out"]
    groups = {f"`{row['hook']}`": [row] for row in found if row["refused"] != "0"}
    others = [row for row in found if row["refused"] == "0"]
    groups[", ".join(f"`{row['hook']}`" for row in others)] = others
    lines = []
    for names, own in groups.items():
        counts = (sum(int(row[one]) for row in own) for one in ("times", "refused", "escaped"))
        lines.append([names, *(f"{count:,}" for count in counts)])
    return table(header, lines, found, "hook_calls")


def load() -> str:
    """A line per job: how many limits it held, and the one that it came nearest to."""
    found = sorted(recorded("load"), key=lambda row: row["job"])
    header = ["job", "counted", "limits held", "ended unexpectedly"]
    header += ["complaints of SGLang's checks", "compactions", "retractions"]
    header.append("nearest to its limit")
    lines = []
    for job in dict.fromkeys(row["job"] for row in found):
        own = [r for r in found if r["job"] == job and not r["quantity"].endswith(PLAIN)]
        limited = [row for row in own if row["limit"]]
        held = sum(row["ok"] == "yes" for row in limited)
        lines.append([job, _counted(own), f"{held} of {len(limited)}"])
        lines[-1] += [_sum(own, name) for name in (UNEXPECTED, COMPLAINTS)]
        lines[-1] += [_sum(own, *COMPACTIONS), _sum(own, "retractions"), _nearest(limited)]
    return table(header, lines, found, "load")


UNEXPECTED, COMPLAINTS = "requests that ended unexpectedly", "complaints in the log"
COMPACTIONS = ("compactions", "compactions among aborts", "compactions among disconnects")
#: what a job counts -> its name here; the first that it has
COUNTED = {
    "requests": "requests",
    "bodies": "bodies",
    "turns": "turns",
    "answers": "answers",
    "clients told by an error or a close": "clients",
}
#: quantities whose names need their job, and those that are set and not found
NAMED = {"slowest of them, seconds": "slowest wrong start, seconds"}
SET = ("of them in the pool",)


def _counted(rows: list[Row]) -> str:
    found = ((_sum(rows, quantity), name) for quantity, name in COUNTED.items())
    return next((f"{value} {name}" for value, name in found if value), "")


def _sum(rows: list[Row], *quantities: str) -> str:
    """Empty where a job does not count that."""
    values = [int(float(row["value"])) for row in rows if row["quantity"] in quantities]
    return f"{sum(values):,}" if values else ""


def _nearest(rows: list[Row]) -> str:
    """Of the largest values that a job allows, the one that took most of it."""
    upper = [row for row in rows if "<" in row["limit"] and row["quantity"] not in SET]
    of = {row["quantity"]: (float(row["value"]), float(row["limit"][2:])) for row in upper}
    quantity, (value, limit) = max(of.items(), key=lambda one: one[1][0] / one[1][1])
    return f"{NAMED.get(quantity, quantity)}: {value:g} of {limit:g}"


def compiled() -> str:
    """One line per kernel, with the most that any of its variants takes."""
    every = recorded("compile")
    architectures = list(dict.fromkeys(row["architecture"] for row in every))
    header = ["kernel", "variants", *(f"registers, {name}" for name in architectures)]
    header += ["spilled bytes, all", "shared bytes, sm_90"]
    lines = []
    for kernel in dict.fromkeys(row["kernel"] for row in every):
        variants = [row for row in every if row["kernel"] == kernel]
        by_architecture = {
            name: [row for row in variants if row["architecture"] == name] for name in architectures
        }
        registers = [most("registers", rows) for rows in by_architecture.values()]
        spilled = sum(int(row["spilled_bytes"]) for row in variants)
        shared = most("shared_bytes", by_architecture["sm_90"])
        count = len({row["case"] for row in variants})
        lines.append([f"`{kernel}`", str(count), *registers, str(spilled), shared])
    return table(header, lines, every, "compile")


def most(column: str, rows: list[Row]) -> str:
    return str(max(int(row[column]) for row in rows))


def kernel_floors() -> str:
    rows = recorded("kernel_floors")
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
        for row in rows
    ]
    return table(header, lines, rows, "kernel_floors")


def decode_floors() -> str:
    rows = recorded("decode_floors")
    header = ["model, rates", "generated tokens", "`kv_budget`", "requests", "weights, ms"]
    header += ["attention, ms", "compactions, ms", "tokens/s at most", "over the full cache"]
    lines = [
        [
            f"{row['size']}, {row['copy_tb_per_s']} TB/s, {float(row['tflop_per_s']):.0f} TFLOP/s",
            f"{int(row['generated_tokens']):,}",
            budget(row),
            f"{int(row['batch']):,}",
            *(f"{float(row[f'{part}_ms']):.2f}" for part in ("weights", "attention")),
            f"{float(row['compactions_ms']):.3f}",
            f"{float(row['tokens_per_s']):,.0f}",
            f"{float(row['over_full_cache']):.2f}",
        ]
        for row in rows
        if int(row["generated_tokens"]) == LONGEST
    ]
    return table(header, lines, rows, "decode_floors")
