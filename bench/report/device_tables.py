"""Tables of what a GPU measured: kernels against their floors, a decode loop, and servers."""

from __future__ import annotations

from bench.lib.record import recorded
from bench.lib.table_text import Row, budget, markdown, ratio_with_interval, spread, table
from bench.report import conversation_tables


def on_gpu(name: str) -> list[Row]:
    """A GPU's rows of a file; none where the file is not there yet."""
    return [row for row in recorded(name) if "CPU" not in row["device"]]


def kernels(rows: list[Row] | None = None) -> str:
    """A table per device: the last row of every kernel, shape and kind of keys."""
    rows = on_gpu("kernels") if rows is None else rows
    if not rows:
        return "No rows yet: `python -m bench.kernels` on a GPU makes them."
    devices = dict.fromkeys(row["device"] for row in rows)
    return "\n\n".join(
        _kernels([row for row in rows if row["device"] == device]) for device in devices
    )


def _kernels(here: list[Row]) -> str:
    named = ("kernel", "shape", "keys", "dtype")
    last = list({tuple(row[name] for name in named): row for row in here}.values())
    header = ["kernel", "requests x tokens x layers", "keys", "time, us", "floor, us"]
    header += ["over its floor", "what binds"]
    plain = any(row["reference_over_time"] for row in last)  # it was timed, too
    header += ["plain torch takes"] * plain
    has_attention = any(row["time_over_decode_attention"] for row in last)
    header += ["over a step's decode attention"] * has_attention
    lines = [
        [
            f"`{row['kernel']}`",
            f"{row['requests']} x {int(row['tokens']):,} x {row['layers']}",
            f"{row['keys']}, {row['dtype']}",
            *(f"{float(row[name]):,.2f}" for name in ("time_us_p50", "floor_us")),
            f"{float(row['ratio_to_floor']):.2f}",
            row["binds"],
            *([_times_as_long(row["reference_over_time"])] * plain),
            *([row["time_over_decode_attention"]] * has_attention),
        ]
        for row in last
    ]
    return table(header, lines, last, "kernels")


def _times_as_long(ratio: str) -> str:
    """Empty where plain torch was not run."""
    return f"{float(ratio):.1f} times as long" if ratio else ""


def last_decode_rows(rows: list[Row]) -> list[Row]:
    """The last row of every length and budget, of the device, size and policy of the last row.

    As many requests as fit; rows of ``--batch`` stand for themselves.
    """
    rows = [row for row in rows if "--batch" not in row["command"]]
    same = ("device", "size", "dtype", "attention")
    last = rows[-1]
    here = [row for row in rows if all(row[name] == last[name] for name in same)]
    here = [row for row in here if row["policy"] in ("", last["policy"])]
    return list({(row["kv_budget"], row["generated_tokens"]): row for row in here}.values())


def decode(rows: list[Row] | None = None) -> str:
    """Tokens per second, over the full cache's of the same length, and compactions' share."""
    rows = on_gpu("decode") if rows is None else rows
    if not rows:
        return "No rows yet: `python -m bench.decode` on a GPU makes them."
    last = last_decode_rows(rows)
    full = {row["generated_tokens"]: row for row in last if not row["kv_budget"]}
    header = ["generated tokens", "`kv_budget`", "requests", "step, ms", "compactions, of the time"]
    header += ["tokens/s", "over the full cache"]
    lines = []
    for row in last:
        rate, of_length = float(row["tokens_per_s"]), full.get(row["generated_tokens"])
        ratio = f"{rate / float(of_length['tokens_per_s']):.2f}" if of_length else ""
        lines.append([f"{int(row['generated_tokens']):,}", budget(row), f"{int(row['batch']):,}"])
        lines[-1] += [row["step_ms_p50"], f"{float(row['compaction_share']):.1%}"]
        lines[-1] += [f"{rate:,.0f}", ratio]
    return table(header, lines, last, "decode")


def serve_steady() -> str:
    """Servers with full memory."""
    last = _steady_rows()
    header = ["`kv_budget`", "KV pool, tokens", "requests at once", "by arithmetic", "tokens/s"]
    header.append("over the full cache")
    lines = []
    for row in last:
        rate, full = float(row["tokens_per_s"]), float(last[0]["tokens_per_s"])
        lines.append([budget(row), f"{int(row['pool_tokens']):,}"])
        lines[-1] += [f"{float(row['running']):.0f}", row["fits_by_arithmetic"]]
        lines[-1] += [f"{rate:,.0f}", f"{rate / full:.2f}"]
    return table(header, lines, last, "serve_steady")


def gains() -> str:
    """What budgets gain and cost, in a line each: the first table of docs/performance.md."""
    full, budgeted = _steady_rows()
    ample = {(row["plugin"], row["kv_budget"]): row for row in on_gpu("serve_ample")}
    (with_budget,) = (row for (plugin, kv_budget), row in ample.items() if plugin and kv_budget)
    off = recorded("off_cost")[-1]
    ratio = float(budgeted["tokens_per_s"]) / float(full["tokens_per_s"])
    # If the full cache ran as many requests as fit, and each as fast.
    least = ratio * float(full["running"]) / float(full["fits_by_arithmetic"])
    same = f"the same {with_budget['device'].removeprefix('NVIDIA ')}"
    plain = "of SGLang without the plugin"
    lines = [
        [
            f"KV memory full, outputs of 16K tokens, `kv_budget` {budgeted['kv_budget']} "
            f"({budgeted['device']}, {int(budgeted['pool_tokens']):,} KV tokens as beside a 7B "
            "model on 80 GB, its shapes with random weights, `distinct`)",
            f"{ratio:.2f} times the tokens/s {plain} (one run of each); {least:.1f} if that one "
            "ran as many requests as fit by arithmetic",
        ],
        conversation_tables.gain(),
        conversation_tables.gain_with_hicache(),
        [
            f"memory for all requests, `kv_budget` {with_budget['kv_budget']} ({same})",
            f"{_rounded(with_budget)} {plain}",
        ],
        [
            f"eviction enabled at start, no request with a budget ({same})",
            f"{_rounded(ample['with', ''])} {plain}",
        ],
        [
            f"eviction not enabled ({off['device']}; not measured on a GPU)",
            f"{_rounded(off)} {plain}",
        ],
    ]
    return markdown(["case", "result"], lines)


def _rounded(row: Row) -> str:
    """A ratio of paired rounds, and what its brackets are."""
    ratio, low, high = (float(row[name]) for name in ("ratio_p50", "ratio_low", "ratio_high"))
    return f"{ratio:.3f} [{low:.3f}, {high:.3f}] ({spread([row])})"


def _steady_rows() -> list[Row]:
    """The last row of each budget, of the device of the last row; the full cache's first."""
    rows = on_gpu("serve_steady")
    here = [row for row in rows if row["device"] == rows[-1]["device"]]
    return [*{row["kv_budget"]: row for row in here}.values()]


def serve_ample() -> str:
    """Servers whose memory holds every request."""
    rows = on_gpu("serve_ample")
    header = ["SGLang", "`kv_budget`", "requests at once", "tokens/s"]
    header.append(f"over SGLang without the plugin, {spread(rows)}")
    names = {"without": "without the plugin", "with": "with it, eviction enabled at start"}
    lines = [
        [
            *(names[row["plugin"]], budget(row), row["calls"]),
            f"{float(row['tokens_per_s_p50']):,.0f}",
            ratio_with_interval(row),
        ]
        for row in rows
    ]
    return table(header, lines, rows, "serve_ample")
