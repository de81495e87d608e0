"""What ``examples/monitoring`` says of a real server under load, by a real Prometheus.

    python tests/load/monitoring.py    # make monitoring; Debian: apt install prometheus

promtool checks the configuration and fires each alert. Prometheus scrapes a server while requests
with budgets are retracted, refused, aborted and continued. Then every expression of the dashboard
has to have data, and the counters in Prometheus have to be those of the trace. Ends with 1 if not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), *(str(ROOT / "tests" / one) for one in ("helpers", "load", "api"))])

from isolated import isolate

isolate()  # before anything imports sglang

import requests
from load_calls import budget_keys, prompt_ids
from load_client import Call, run_load
from load_server import FAMILY, START_WITHIN_S, LoadServer
from metric_counts import COUNTED, Counts, counts_of_trace, differences
from row_table import show
from tiny_models import save_model

from sgl_skipkv.cli.server_process import claimed_port
from sgl_skipkv.config import METRIC_PREFIX

MONITORING = ROOT / "examples" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "skipkv.json"
POLICIES = ("distinct", "skipkv", "rkv", "streaming")
#: what this load does not do; everything else has to be more than 0 at some time
MAY_BE_ZERO = {"errors", "waiting"}
#: what they leave fits the pool, or none would be continued
CONVERSATIONS, POOL_TOKENS = 8, 2048
SCRAPED_EVERY_S, RATE_INTERVAL = 1, "10s"
Row = dict[str, Any]


def check_files(promtool: str) -> list[Row]:
    """The configuration is valid, and every alert fires when it should."""
    rows = []
    for what, *command in (
        ("configuration", "check", "config", str(MONITORING / "prometheus.yml")),
        ("alerts fire", "test", "rules", str(Path(__file__).with_name("alerts_test.yml"))),
    ):
        done = subprocess.run([promtool, *command], text=True, capture_output=True, check=False)
        if done.returncode:
            print(done.stdout, done.stderr)
        rows.append(row("promtool", what, 1, int(done.returncode == 0), done.returncode == 0))
    return rows


def row(panel: str, what: str, series: int, largest: float, ok: bool) -> Row:
    shown = float(f"{largest:.4g}")
    named = {"panel": panel, "what": what, "series": series, "largest": shown}
    return {**named, "ok": "yes" if ok else "no"}


@contextmanager
def prometheus(binary: str, target: str, folder: Path) -> Iterator[str]:
    """Prometheus with our configuration, for this server, and its address."""
    text = (MONITORING / "prometheus.yml").read_text()
    text = text.replace("127.0.0.1:30000", target)
    text = text.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPED_EVERY_S}s")
    folder.mkdir()
    config = folder / "prometheus.yml"
    config.write_text(text)
    shutil.copy(MONITORING / "alerts.yml", folder)
    with claimed_port() as claim, (folder / "log").open("w") as log:
        address = f"127.0.0.1:{claim.getsockname()[1]}"
        options = {"config.file": config, "storage.tsdb.path": folder / "data"}
        options["web.listen-address"] = address
        process = subprocess.Popen(
            [binary, *(f"--{name}={value}" for name, value in options.items())],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://{address}"
            wait_for(url)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def wait_for(url: str) -> None:
    """Until it answers.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if requests.get(f"{url}/-/ready", timeout=5).status_code == 200:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.2)
    raise TimeoutError("prometheus is not ready after 60 s")


def wait_for_scrape(url: str) -> None:
    """Until Prometheus has what a server without requests says, so that rates have a beginning.

    Raises:
        TimeoutError: it gets nothing of ours from the server.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if ask(url, "query", query=f"{METRIC_PREFIX}state"):
            time.sleep(3 * SCRAPED_EVERY_S)
            return
        time.sleep(0.2)
    targets = requests.get(f"{url}/api/v1/targets", timeout=30).json()["data"]["activeTargets"]
    raise TimeoutError(f"nothing was scraped: {[one['lastError'] for one in targets]}")


def load(server: LoadServer, count: int) -> None:
    """Budgets of every kind, conversations that go on or do not, aborts, and wrong values."""
    rng = random.Random(10)
    calls = []
    for i in range(count):
        keys = budget_keys(rng.choice([None, 32, 48, 64]), POLICIES[i % len(POLICIES)])
        calls.append(Call(prompt_ids(rng, 8), 200, keys))
    calls[::6] = [replace(call, ending="abort", abort_after_s=0.5) for call in calls[::6]]
    calls[1::8] = [replace(call, keys={"kv_budget": 0}) for call in calls[1::8]]
    run_load(server.url, calls, 16, "budgets")
    keys = {**budget_keys(40, "rkv"), "kv_reuse": "keep"}
    first = [Call(prompt_ids(rng, 10**6), 90, keys) for _ in range(CONVERSATIONS)]
    answers = run_load(server.url, first, 8, "first turns")
    turns = []
    for call, outcome in zip(first, answers, strict=True):
        said = (*call.input_ids, *outcome.output_ids)
        turns.append(replace(call, input_ids=(*said, *prompt_ids(rng, 8))))
        turns.append(replace(call, input_ids=(*said[:90], *prompt_ids(rng, 8))))  # another text
    run_load(server.url, turns, 8, "next turns")


def ask(url: str, path: str, **params: Any) -> list[dict[str, Any]]:
    """The series that answer a query.

    Raises:
        ValueError: Prometheus refuses it.
    """
    answer = requests.get(f"{url}/api/v1/{path}", params=params, timeout=30).json()
    if answer["status"] != "success":
        raise ValueError(f"{params['query']}: {answer['error']}")
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def panels(url: str, start: float, end: float) -> list[Row]:
    """Every expression of the dashboard, over the time of the load."""
    rows = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
            query = query.replace("$instance", ".*")
            series = ask(url, "query_range", query=query, start=start, end=end, step=1)
            values = [float(value) for one in series for _, value in one["values"]]
            largest = max((value for value in values if value == value), default=0.0)
            ok = bool(series) and (largest > 0 or target["legendFormat"] in MAY_BE_ZERO)
            rows.append(row(panel["title"], target["legendFormat"], len(series), largest, ok))
    return rows


def alerts(url: str) -> Row:
    """Prometheus has evaluated the rules without an error."""
    groups = requests.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    firing = sum(rule["state"] == "firing" for rule in rules)
    healthy = [rule for rule in rules if rule["health"] == "ok"]
    return row("alerts", "evaluated", len(healthy), firing, len(healthy) == len(rules) > 0)


def counts_in_prometheus(url: str) -> Counts:
    """As ``counts_of_metrics``, from the database."""
    counts: Counts = Counter()
    for name, labels in COUNTED.items():
        query = f"sum by ({', '.join(labels)}) ({METRIC_PREFIX}{name})"
        for one in ask(url, "query", query=query):
            values = (one["metric"][label] for label in labels)
            values = ("abort" if value == "error" else value for value in values)
            counts[name, *values] += int(float(one["value"][1]))
    return +counts


def run(prometheus_binary: str, folder: Path, count: int) -> list[Row]:
    """A server under load and a Prometheus that watches it."""
    model = save_model(FAMILY, folder / "model")
    with LoadServer(model, folder / "server", pool_tokens=POOL_TOKENS, retract_every=25) as server:
        server.wait_ready(START_WITHIN_S)
        target = server.url.removeprefix("http://")
        with prometheus(prometheus_binary, target, folder / "prometheus") as url:
            wait_for_scrape(url)
            start = time.time()
            load(server, count)
            server.wait_idle()
            time.sleep(3 * SCRAPED_EVERY_S)
            rows = [*panels(url, start, time.time()), alerts(url)]
            trace, seen = counts_of_trace([server.trace_path]), counts_in_prometheus(url)
            wrong = differences(trace, seen)
            print("\n".join(wrong))
            rows.append(row("counters", "as in the trace", len(seen), len(wrong), not wrong))
        server.assert_clean()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--record", action="store_true", help="append to bench/rows/monitoring.csv")
    arguments = parser.parse_args()
    binaries = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    found = [path for path in binaries.values() if path is not None]
    if len(found) < len(binaries):
        parser.error("expected prometheus and promtool on the PATH; Debian: apt install prometheus")
    folder = Path(tempfile.mkdtemp(prefix="monitoring-"))
    print("logs and traces, kept if anything goes wrong:", folder)
    rows = [*check_files(found[1]), *run(found[0], folder, arguments.requests)]
    show(rows, "monitoring", record="monitoring" if arguments.record else None)
    missed = any(one["ok"] == "no" for one in rows)
    if not missed:
        shutil.rmtree(folder)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
