"""Tables of conversations: what each way of serving them remembers, holds, computes and costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench.lib.record import recorded
from bench.lib.table_text import Row, ratio_with_interval, spread, table

#: columns that say how a conversation is served
WAY = ("policy", "kv_budget", "kv_reuse", "kv_params")


def way(row: Row) -> list[str]:
    """Its columns as cells of a table; without a budget there is no policy."""
    if not row["policy"]:
        return ["none", "", ""]
    return [f"`{row['policy']}`", row["kv_budget"], row["kv_reuse"]]


def most(rows: Sequence[Row]) -> list[Row]:
    """The rows with the most conversations."""
    count = max(int(row["conversations"]) for row in rows)
    return [row for row in rows if int(row["conversations"]) == count]


def conversation() -> str:
    """Accuracy by turn; memory and computation in the last one."""
    shown = most(recorded("conversation"))
    turns: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in shown:
        turns[tuple(row[name] for name in WAY)].append(row)
    last = max(int(row["turn"]) for row in shown)
    header = ["policy", "`kv_budget`", "`kv_reuse`", *(f"turn {i}" for i in range(1, last + 1))]
    header += [f"KV tokens held after turn {last}", f"prompt tokens computed, turns 2 to {last}"]
    lines = []
    for rows in turns.values():
        right = [f"{100 * float(row['accuracy']):.1f}" for row in rows]
        computed = sum(float(row["computed_tokens"]) for row in rows[1:])
        held = float(rows[-1]["held_kv_tokens"])
        lines.append([*way(rows[0]), *right, f"{held:,.0f}", f"{computed:,.0f}"])
    return table(header, lines, shown, "conversation")


def conversation_first_token() -> str:
    rows = recorded("conversation_first_token")
    header = ["policy", "`kv_budget`", "`kv_reuse`", "first token, ms"]
    header += [f"over the same budget without reuse, {spread(rows)}", "prompt tokens computed"]
    lines = [
        [
            *way(row),
            row["first_token_ms_p50"],
            ratio_with_interval(row),
            f"{float(row['computed_tokens_p50']):,.0f}",
        ]
        for row in rows
    ]
    return table(header, lines, rows, "conversation_first_token")


def conversation_pressure() -> str:
    """More conversations at once than the pool holds in full."""
    return _crowds("conversation_pressure")


def conversation_hicache() -> str:
    """The same with HiCache."""
    return _crowds("conversation_hicache")


def _crowds(file: str) -> str:
    rows = recorded(file)
    header = ["conversations", "policy", "`kv_budget`", "`kv_reuse`", "turns per minute"]
    header += [f"over the full cache, {spread(rows)}", "right answers, %"]
    header += ["prompt tokens computed per turn"]
    header += ["requests at once", "retractions"]
    lines = [
        [
            row["conversations"],
            *way(row),
            row["turns_per_minute_p50"],
            ratio_with_interval(row),
            f"{100 * float(row['accuracy']):.1f}",
            f"{float(row['computed_tokens']):,.0f}",
            row["peak_running"],
            row["retractions"],
        ]
        for row in rows
    ]
    return table(header, lines, rows, file)


def gain_with_hicache() -> list[str]:
    """The same for servers with HiCache."""
    rows = recorded("conversation_hicache")
    shown = [row for row in rows if row["kv_reuse"] == "budget"]
    ratio = float(shown[0]["hicache_ratio"])
    return [
        f"the same, with HiCache and host memory for {ratio:g} times the pool on both servers",
        f"{_ratios(shown)} times ({spread(shown)})",
    ]


def gain() -> list[str]:
    """Case and result of every crowd: a line of the table of gains."""
    rows = recorded("conversation_pressure")
    crowds = {row["conversations"]: row for row in rows if row["kv_reuse"] == "budget"}
    shown = [crowds[count] for count in sorted(crowds, key=int)]
    full = [row for row in rows if not row["policy"]]
    least, least_of_full = (
        100 * min(float(row["accuracy"]) for row in own) for own in (shown, full)
    )
    held = max(float(one["held_kv_tokens"]) for one in recorded("conversation"))
    row = shown[-1]
    return [
        f"{' or '.join(one['conversations'] for one in shown)} conversations of eight turns at "
        f"once in memory for {int(row['pool_tokens']):,} KV tokens, of which each fills "
        f"{held:,.0f} in full, `kv_reuse` budget, `kv_budget` {row['kv_budget']} "
        f"({row['device']}, `{row['policy']}`)",
        f"{_ratios(shown)} times ({spread(shown)}) the turns per minute of the same server "
        f"without a budget; right answers {least:.1f}%, without a budget {least_of_full:.1f}%",
    ]


def _ratios(rows: Sequence[Row]) -> str:
    names = ("ratio_p50", "ratio_low", "ratio_high")
    of_each = [[float(row[name]) for name in names] for row in rows]
    return " or ".join("{:.2f} [{:.2f}, {:.2f}]".format(*one) for one in of_each)
