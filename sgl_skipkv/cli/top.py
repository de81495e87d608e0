"""``skipkv top``: what a running server evicts, looked at every few seconds."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any, Final

import requests
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sgl_skipkv.cli.scrape import Scrape, scrape
from sgl_skipkv.cli.tables import Column, print_json, table_of
from sgl_skipkv.config import METRIC_PREFIX as PREFIX
from sgl_skipkv.config import SettingError

_COLOURS: Final = {"ready": "green", "unavailable": "yellow", "refused": "red"}
_GAUGES: Final = ("running_requests", "kv_tokens", "full_kv_tokens", "kv_budget_tokens")
_RATES: Final = ("compactions", "evicted_tokens", "requests")


def add_top(commands: Any, tables: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    top = commands.add_parser(
        "top", parents=[tables], help="watch a running server that was started with metrics"
    )
    top.set_defaults(run=show_top)
    top.add_argument("--url", required=True, help="of a server started with --enable-metrics")
    top.add_argument("--api-key", help="where a proxy in front of the server asks for one")
    top.add_argument(
        "--interval",
        type=float,
        default=2.0,
        help="seconds between two readings; default: %(default)s",
    )
    top.add_argument(
        "--once", action="store_true", help="show it once, after one interval, and end"
    )


def show_top(arguments: argparse.Namespace, console: Console) -> int:
    """Show the server until interrupted: a live table, or with ``--json`` one line per look.

    Raises:
        SettingError: no server answers at this URL, or one without metrics.
    """
    if not (math.isfinite(arguments.interval) and arguments.interval >= 0.1):
        expected = "a number of seconds, at least 0.1"
        raise SettingError("interval", expected, arguments.interval, "2, or leave it out")
    url = arguments.url.rstrip("/")
    with requests.Session() as session:
        if arguments.api_key is not None:
            session.headers["Authorization"] = f"Bearer {arguments.api_key}"
        looks = looks_at(session, url, arguments.interval)
        if arguments.once:
            look = next(looks)
            if arguments.json:
                print_json(look)
            else:
                console.print(view(look))
            return 0
        try:
            if arguments.json:
                for look in looks:
                    print_json(look, indent=None)
            with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
                for look in looks:
                    live.update(view(look), refresh=True)
        except KeyboardInterrupt:
            return 0
    return 0


def looks_at(session: requests.Session, url: str, interval_s: float) -> Iterator[dict[str, Any]]:
    """What happened between each two looks, without end.

    Raises:
        SettingError: the server does not answer, or has no metrics of ours.
    """
    before = scrape(session, url)
    while True:
        time.sleep(interval_s)
        now = scrape(session, url)
        yield {"url": url, **compared(before, now)}
        before = now


def compared(before: Scrape, now: Scrape) -> dict[str, Any]:
    """Gauges as they are now, rates since the look before, and totals since the server's start.

    ``policies`` has a row for each policy that a request of this server ever had.
    """
    seconds = now.at_s - before.at_s

    def increase(name: str, **labels: str) -> float:
        total = now.total(name, **labels)
        earlier = before.total(name, **labels)
        return total if total < earlier else total - earlier  # the server was started again

    def rate(name: str, **labels: str) -> float:
        return round(increase(name, **labels) / seconds, 2)

    names = {
        policy
        for name in (*_GAUGES, *(f"{rate}_total" for rate in _RATES))
        for policy in now.by(PREFIX + name, "policy")
    }
    policies = []
    for policy in sorted(names):
        gauges = {name: int(now.total(PREFIX + name, policy=policy)) for name in _GAUGES}
        rates = {f"{name}_per_s": rate(f"{PREFIX}{name}_total", policy=policy) for name in _RATES}
        policies.append({"policy": policy, **gauges, **rates})
    steps = increase(f"{PREFIX}compaction_seconds_count")
    step_s = increase(f"{PREFIX}compaction_seconds_sum")
    states = now.by(f"{PREFIX}state", "state")
    return {
        "seconds": round(seconds, 2),
        "states": {state: int(count) for state, count in states.items() if count},
        "running_requests": int(now.total("sglang:num_running_reqs")),
        "waiting_requests": int(now.total("sglang:num_queue_reqs")),
        "used_tokens": int(now.total("sglang:num_used_tokens")),
        "pool_tokens": int(now.total("sglang:max_total_num_tokens")),
        "tokens_per_s": round(now.total("sglang:gen_throughput"), 1),
        "compacting_share": round(step_s / seconds, 4),
        "compaction_ms": round(1000 * step_s / steps, 2) if steps else None,
        "restored": _count(now, "returned_requests_total", how="restore"),
        "recomputed": _count(now, "returned_requests_total", how="recompute"),
        "errors": _count(now, "requests_total", outcome="error"),
        "refused": _count(now, "refusals_total"),
        "reused_tokens": _count(now, "reused_tokens_total"),
        "policies": policies,
    }


def _count(now: Scrape, name: str, **labels: str) -> int:
    return int(now.total(PREFIX + name, **labels))


def view(look: dict[str, Any]) -> Group:
    """One look, for a terminal."""
    columns = (
        Column("policy", "policy"),
        Column("running_requests", "running", "{:,}".format),
        Column("kv_budget_tokens", "budgets", "{:,}".format),
        Column("kv_tokens", "KV tokens\nheld", "{:,}".format),
        Column("full_kv_tokens", "without\neviction", "{:,}".format),
        Column("compactions_per_s", "compac-\ntions/s", "{:,.1f}".format),
        Column("evicted_tokens_per_s", "evicted\ntokens/s", "{:,.0f}".format),
        Column("requests_per_s", "ended/s", "{:,.2f}".format),
    )
    options: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    title = "requests with a budget, and the KV that counts against it"
    table = table_of(title, columns, look["policies"], **options)
    for column in table.columns:
        column.no_wrap, column.justify = True, "left" if column.header == "policy" else "right"
    return Group(_head(look), table if look["policies"] else Text("no request with a budget yet"))


def _head(look: dict[str, Any]) -> Table:
    states = ", ".join(
        f"[{_COLOURS[state]}]{state}[/]" + (f" x {count}" if count > 1 else "")
        for state, count in look["states"].items()
    )
    share = look["used_tokens"] / look["pool_tokens"] if look["pool_tokens"] else 0.0
    waiting = f", {look['waiting_requests']:,} waiting" if look["waiting_requests"] else ""
    took = "" if look["compaction_ms"] is None else f", {look['compaction_ms']:.2f} ms a step"
    head = Table.grid(padding=(0, 2))
    for name, text in (
        ("server", f"{escape(look['url'])}  {states}"),
        ("requests", f"{look['running_requests']:,} running{waiting}"),
        ("KV pool", f"{look['used_tokens']:,} of {look['pool_tokens']:,} tokens, {share:.0%}"),
        ("decoding", f"{look['tokens_per_s']:,.0f} tokens/s"),
        ("compacting", f"{look['compacting_share']:.1%} of the time{took}"),
        (
            "since the start",
            f"restored {look['restored']:,}, recomputed {look['recomputed']:,}, "
            f"refused {look['refused']:,}, errors {look['errors']:,}, "
            f"tokens reused {look['reused_tokens']:,}",
        ),
    ):
        head.add_row(name, text)
    return head
