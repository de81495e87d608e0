"""Tables of the system: servers under load, memory under fuzzing, kernels."""

from __future__ import annotations

from collections import defaultdict

from bench.lib.record import recorded
from bench.lib.table_text import PLAIN, Row, budget, paired_ratio, table

#: generated tokens of the papers' largest table
LONGEST = 16384


def on_cpu(name: str) -> list[Row]:
    """What runs on any machine: a GPU's rows are no continuation of these."""
    return [row for row in recorded(name) if "CPU" in row["device"]]


def off_cost() -> str:
    what = "throughput with the plugin and no budget, over SGLang without it"
    return paired_ratio("off_cost", what, on_cpu("off_cost")[-1:])


def serve_latency() -> str:
    rows = on_cpu("serve_latency")
    header = ["neighbours", "requests", "compactions", "most in one step", "median step, ms"]
    header += ["p99 step, ms", "longest step, ms"]
    names = ("neighbours", "calls", "compactions", "most_compactions_in_a_step", "p50_ms")
    lines = [[row[name] for name in (*names, "p99_ms", "longest_ms")] for row in rows]
    return table(header, lines, rows, "serve_latency")


def serve_pressure() -> str:
    rows = on_cpu("serve_pressure")
    header = ["`kv_budget`", "tokens/s", "over the full cache", "requests at once", "by arithmetic"]
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
        for row in rows
    ]
    return table(header, lines, rows, "serve_pressure")


def compaction_cost() -> str:
    rows = recorded("compaction_cost")
    lines = [
        [
            f"`{row['policy']}`",
            row["ms_p50"],
            f"{row['ratio_p50']} [{row['ratio_low']}, {row['ratio_high']}]",
        ]
        for row in rows
    ]
    base = rows[-1]
    header = ["policy", "ms, median"]
    header.append(f"over `{base['base']}` ({base['base_ms_p50']} ms), 95% interval")
    return table(header, lines, rows, "compaction_cost")


def serve_compaction() -> str:
    rows = on_cpu("serve_compaction")
    header = ["commit", "requests in the batch", "compactions", "step, ms", "a compaction, ms"]
    header += ["in steps, median", "in steps, 90th percentile", "of the time"]
    names = ("commit", "calls", "compactions", "step_ms_p50", "compaction_ms_p50", "in_steps_p50")
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
    rows = recorded("fuzz")
    lives = sum({row["seed"]: int(row["lives"]) for row in rows}.values())
    what = f"in {lives:,} lives of {rows[-1]['steps']} steps, without a failure"
    times: dict[str, int] = {}
    for row in rows:
        times[row["event"]] = times.get(row["event"], 0) + int(row["times"])
    lines = [[event, f"{count:,}"] for event, count in times.items()]
    return table([what, "times"], lines, rows, "fuzz")


def planted_bugs() -> str:
    rows = recorded("planted_bugs")
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    lives = {(row["bug"], row["seed"]): row["lives"] or "never" for row in rows}
    lines = [
        [bug, *(lives[bug, seed] for seed in seeds)]
        for bug in dict.fromkeys(row["bug"] for row in rows)
    ]
    return table(["bug", *(f"seed {seed}" for seed in seeds)], lines, rows, "planted_bugs")


def hook_calls() -> str:
    rows = recorded("hook_calls")
    header = ["hook", "calls", "answered with an error of ours", "exceptions that got out"]
    lines = [
        [f"`{row['hook']}`", f"{int(row['times']):,}", f"{int(row['refused']):,}", row["escaped"]]
        for row in rows
    ]
    return table(header, lines, rows, "hook_calls")


def load() -> str:
    """Everything that had a limit, beside what SGLang without the plugin did in the same job."""
    rows = sorted(recorded("load"), key=lambda row: row["job"])
    plain: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["quantity"].endswith(PLAIN):
            plain[row["job"], row["quantity"].removesuffix(PLAIN)].append(row["value"])
    lines = []
    for row in rows:
        if row["limit"]:  # a job says some things once per storm or server, plain SGLang in turn
            beside = plain[row["job"], row["quantity"]]
            lines.append([row[name] for name in ("job", "quantity", "value", "limit", "ok")])
            lines[-1].append(beside.pop(0) if beside else "")
    return table(["job", "what", "value", "limit", "held", "plain SGLang"], lines, rows, "load")


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
