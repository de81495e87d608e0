"""``skipkv top`` and the progress bar, without a server: what is computed of two looks, and how it
says that there is nothing to look at. A real server: tests/server/test_metrics.py."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.progress import progress, track
from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.cli.top import compared, view

BEFORE = """
sglang:skipkv_state{state="ready",dp_rank="0"} 1.0
sglang:skipkv_state{state="ready",dp_rank="1"} 1.0
sglang:skipkv_state{state="refused",dp_rank="0"} 0.0
sglang:skipkv_running_requests{policy="rkv",dp_rank="0"} 1.0
sglang:skipkv_compactions_total{policy="rkv",dp_rank="0"} 10.0
sglang:skipkv_compactions_total{policy="rkv",dp_rank="1"} 30.0
sglang:skipkv_compaction_seconds_sum{dp_rank="0"} 1.0
sglang:skipkv_compaction_seconds_count{dp_rank="0"} 10.0
"""
NOW = """
sglang:skipkv_state{state="ready",dp_rank="0"} 1.0
sglang:skipkv_state{state="ready",dp_rank="1"} 1.0
sglang:skipkv_running_requests{policy="rkv",dp_rank="0"} 2.0
sglang:skipkv_running_requests{policy="rkv",dp_rank="1"} 3.0
sglang:skipkv_kv_tokens{policy="rkv",dp_rank="0"} 1234.0
sglang:skipkv_compactions_total{policy="rkv",dp_rank="0"} 20.0
sglang:skipkv_compactions_total{policy="rkv",dp_rank="1"} 40.0
sglang:skipkv_compaction_seconds_sum{dp_rank="0"} 1.4
sglang:skipkv_compaction_seconds_count{dp_rank="0"} 18.0
sglang:skipkv_returned_requests_total{how="restore"} 7.0
sglang:skipkv_refusals_total{reason="kv_budget"} 2.0
sglang:skipkv_refusals_total{reason="kv_budget",tp_rank="0"} 1.0
sglang:max_total_num_tokens{dp_rank="0"} 100.0
sglang:num_used_tokens{dp_rank="0"} 25.0
"""


def looks(before: str, now: str, seconds: float = 4.0) -> dict[str, object]:
    first, second = Scrape(before), Scrape(now)
    second.at_s = first.at_s + seconds
    return compared(first, second)


def test_replicas_are_added_and_counters_become_rates() -> None:
    look = looks(BEFORE, NOW)
    assert look["states"] == {"ready": 2}
    assert look["policies"] == [
        {
            **{"policy": "rkv", "running_requests": 5, "kv_tokens": 1234, "full_kv_tokens": 0},
            **{"kv_budget_tokens": 0, "compactions_per_s": 5.0},
            **{"evicted_tokens_per_s": 0.0, "requests_per_s": 0.0},
        }
    ]
    assert (look["compaction_ms"], look["compacting_share"]) == (50.0, 0.1)
    assert (look["restored"], look["recomputed"], look["refused"]) == (7, 0, 3)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(view({"url": "http://[x]", **look}))
    shown = console.export_text()
    assert "ready x 2" in shown and "25 of 100 tokens, 25%" in shown and "http://[x]" in shown
    assert "10.0% of the time, 50.00 ms a step" in shown and "1,234" in shown
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown


def test_a_server_that_was_started_again_has_no_negative_rates() -> None:
    look = looks(NOW, BEFORE)
    (row,) = look["policies"]
    assert row["compactions_per_s"] == 40 / 4


class _Metrics(BaseHTTPRequestHandler):
    """A server in front of which something asks for a key, and that has metrics of its own only."""

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer secret"
        body = b"sglang:num_running_reqs 1.0\n" if allowed else b""
        status = (200 if allowed else 401) if self.path == "/metrics" else 404
        if self.path == "/page/metrics":
            status, body = 200, b"<html>hi</html>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_where_there_is_nothing_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["top", "--once", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    with serving() as url:
        assert f"got '{url} (status 401)'" in told("--url", url)
        without = told("--url", url, "--api-key", "secret")
        assert "url: expected a server with sgl_skipkv" in without
        other = told("--url", url + "/x")
        assert "expected a server with metrics" in other and "--enable-metrics" in other
        page = told("--url", url + "/page")
        assert "expected a server with metrics" in page and "whose /metrics has none" in page
    assert "(nothing listens there)" in told("--url", url)
    assert "(no http:// in front)" in told("--url", url.removeprefix("http://"))
    assert "interval: expected a number of seconds" in told("--url", url, "--interval", "0")


def test_a_bar_says_how_many_how_fast_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, so that --json stays JSON."""
    assert [*track(iter("abc"), "letters", 3)] == ["a", "b", "c"]
    printed = capsys.readouterr()
    assert printed.out == "" and "letters" in printed.err and "3/3" in printed.err
    with progress() as bar:
        clock = iter(range(0, 1000, 4))
        bar.get_time = lambda: float(next(clock))
        task = bar.add_task("slow", total=10)
        for _ in range(4):
            bar.advance(task)
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(bar.get_renderable())
        line = console.export_text()
    assert "slow" in line and "4/10" in line and "15.0/min" in line and "left" in line
