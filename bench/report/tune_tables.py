"""The table of ``skipkv tune`` on bundled problems."""

from __future__ import annotations

from bench.lib.record import recorded
from bench.lib.table_text import Row, budget, table


def tune() -> str:
    """The last run."""
    rows = recorded("tune")
    last = rows[max(i for i, row in enumerate(rows) if row["number"] == "0") :]
    header = ["`kv_policy`", "`kv_budget`", "right, % [95%]", "points to full"]
    header += ["KV tokens, mean", "peak", "tokens/s", "to full"]
    lines = [
        [
            f"**`{row['policy']}`**" if row["recommended"] == "1" else f"`{row['policy']}`",
            budget(row),
            "{} [{}, {}]".format(*percents(row, "score", "score_low", "score_high")),
            "{} [{}, {}]".format(*percents(row, "difference", "difference_low", "difference_high")),
            *(f"{float(row[name]):,.0f}" for name in ("mean_kv_tokens", "peak_kv_tokens")),
            f"{float(row['tokens_per_s']):,.0f}",
            f"{float(row['throughput_ratio']):.2f}",
        ]
        for row in last
    ]
    took = f"{last[0]['prompts']} prompts in {last[0]['seconds']} seconds with the server's start"
    cpu = f"{last[0]['cpu_seconds']} seconds of CPU"
    return f"{table(header, lines, last, 'tune')} {took}, {cpu}; bold: recommended."


def percents(row: Row, *names: str) -> list[str]:
    return [f"{100 * float(row[name]):.1f}" for name in names]
