"""Tables of what a GPU measured: kernels against their floors, a decode loop, and servers."""

from __future__ import annotations

from bench.lib.record import recorded
from bench.lib.table_text import Row, budget, table


def on_gpu(name: str) -> list[Row]:
    """A GPU's rows of a file; none where the file is not there yet."""
    return [row for row in recorded(name) if "CPU" not in row["device"]]


def kernels(found: list[Row] | None = None) -> str:
    """A table per device: the last row of every kernel, shape and kind of keys."""
    found = on_gpu("kernels") if found is None else found
    if not found:
        return "No rows yet: `python -m bench.kernels` on a GPU makes them."
    devices = dict.fromkeys(row["device"] for row in found)
    return "\n\n".join(
        _kernels([row for row in found if row["device"] == device]) for device in devices
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


def last_decode_rows(found: list[Row]) -> list[Row]:
    """The last row of every length and budget, of the device, size and policy of the last row.

    As many requests as fit; rows of ``--batch`` stand for themselves.
    """
    found = [row for row in found if "--batch" not in row["command"]]
    same = ("device", "size", "dtype", "attention")
    last = found[-1]
    here = [row for row in found if all(row[name] == last[name] for name in same)]
    here = [row for row in here if row["policy"] in ("", last["policy"])]
    return list({(row["kv_budget"], row["generated_tokens"]): row for row in here}.values())


def decode(found: list[Row] | None = None) -> str:
    """Tokens per second, over the full cache's of the same length, and compactions' share."""
    found = on_gpu("decode") if found is None else found
    if not found:
        return "No rows yet: `python -m bench.decode` on a GPU makes them."
    last = last_decode_rows(found)
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
    """Servers with full memory: the last row of each budget, of the device of the last row."""
    found = on_gpu("serve_steady")
    here = [row for row in found if row["device"] == found[-1]["device"]]
    last = {row["kv_budget"]: row for row in here}
    header = ["`kv_budget`", "KV pool, tokens", "requests at once", "by arithmetic", "tokens/s"]
    header.append("over the full cache")
    lines = []
    for row in last.values():
        rate, full = float(row["tokens_per_s"]), float(last[""]["tokens_per_s"])
        lines.append([budget(row), f"{int(row['pool_tokens']):,}"])
        lines[-1] += [f"{float(row['running']):.0f}", row["fits_by_arithmetic"]]
        lines[-1] += [f"{rate:,.0f}", f"{rate / full:.2f}"]
    return table(header, lines, [*last.values()], "serve_steady")


def serve_ample() -> str:
    """Servers whose memory holds every request."""
    found = on_gpu("serve_ample")
    header = ["SGLang", "`kv_budget`", "requests at once", "tokens/s"]
    header.append("over SGLang without the plugin, 95% interval")
    names = {"without": "without the plugin", "with": "with it, eviction enabled at start"}
    lines = [
        [
            *(names[row["plugin"]], budget(row), row["calls"]),
            f"{float(row['tokens_per_s_p50']):,.0f}",
            f"{row['ratio_p50']} [{row['ratio_low']}, {row['ratio_high']}]",
        ]
        for row in found
    ]
    return table(header, lines, found, "serve_ample")
