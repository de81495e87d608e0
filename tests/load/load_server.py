"""The servers of the load jobs: every check of SGLang on, and what they say about themselves."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests
from fleet import STEERING_GAMMA, tiny_vector
from load_client import Call, Outcome, run_load
from load_rows import Findings
from metric_counts import counts_of_metrics, counts_of_trace, differences
from servers import Server

from sgl_skipkv.cli.scrape import Scrape

INTERVAL = 16
START_WITHIN_S = 600
FAMILY = "qwen2"
SETTINGS: dict[str, Any] = {"check_ledger": True, "kv_interval": INTERVAL}


class LoadServer(Server):
    """A tiny random model behind the real server.

    Args:
        pool_tokens: of the KV pool.
        retract_every: scheduler steps between two forced retractions; None: none is forced.
        vector: whether requests can be steered.
        poison: whether freed KV becomes NaN.
        chunk: prompt tokens that are computed at a time.
        more: of the environment.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        pool_tokens: int,
        plugin: bool = True,
        retract_every: int | None = None,
        vector: bool = False,
        poison: bool = False,
        chunk: int = 256,
        more: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        arguments = ["--max-total-tokens", str(pool_tokens), "--chunked-prefill-size", str(chunk)]
        arguments.append("--enable-metrics")
        environment = dict(more or {})
        if retract_every is not None:
            environment["SGLANG_TEST_RETRACT"] = "1"
            environment["SGLANG_TEST_RETRACT_INTERVAL"] = str(retract_every)
        if plugin:
            config = folder / "skipkv.json"
            config.write_text(json.dumps({**SETTINGS, "poison_evicted": poison}))
            arguments += ["--skipkv-config", str(config)]
        if vector:
            tiny_vector(1).save(folder / "vector.safetensors")
            arguments += ["--steering-vector", str(folder / "vector.safetensors")]
            arguments += ["--steering-gamma", str(STEERING_GAMMA)]
        super().__init__(model, folder, arguments, plugin=plugin, env=environment)
        self.evicts = plugin

    def ready(self, findings: Findings) -> str:
        """Its address, once it answers."""
        begun = time.perf_counter()
        self.wait_ready(START_WITHIN_S)
        findings.note("seconds until the server is ready", time.perf_counter() - begun)
        return str(self.url)

    def descendants(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def part(self, name: str) -> psutil.Process:
        if name == "parent":
            return psutil.Process(self.process.pid)
        title = f"sglang::{name}"
        return next(one for one in self.descendants() if title in " ".join(one.cmdline()))

    def scheduler_mb(self) -> float:
        """Resident memory of the scheduler, idle."""
        self.wait_idle()
        return float(self.part("scheduler").memory_info().rss / 1e6)

    def largest(self, name: str, logged: int = 0) -> int:
        """The largest value of a field of SGLang's decode log since ``logged`` characters."""
        found = re.findall(rf"Decode batch, .*?{name}: (\d+)", self.log[logged:])
        return max((int(value) for value in found), default=0)

    def trace_counts(self) -> Counter[str]:
        """How often the trace reports each event, and how many tokens were evicted; nothing without
        the plugin."""
        counts: Counter[str] = Counter()
        if not self.trace_path.exists():
            return counts
        with self.trace_path.open() as lines:
            for event in map(json.loads, lines):
                counts[event["event"]] += 1
                if event["event"] == "compact":
                    counts["evicted_tokens"] += event["before"] - event["after"]
        return counts

    def report_metrics(self, findings: Findings) -> None:
        """Its metrics count what its trace does, from the start on."""
        counts = counts_of_metrics(Scrape(self.get("/metrics")))
        wrong = differences(counts_of_trace([self.trace_path]), counts)
        findings.happened("counts in the metrics", len(counts), 1)
        findings.exactly("counts that differ from the trace", len(wrong), 0)
        for text in wrong[:5]:
            print(text)

    def report_clean(self, findings: Findings) -> None:
        """Nothing leaked, nothing complained, every event was counted, and it still serves."""
        self.wait_idle()
        if self.evicts and self.trace_path.stat().st_size:
            self.report_metrics(findings)
        self.post("/flush_cache")
        findings.exactly("tokens in use after /flush_cache", self.used_tokens(), 0)
        healthy = requests.get(self.url + "/health_generate", timeout=60)
        findings.exactly("/health_generate", healthy.status_code, 200)
        lines = self.complaints()
        findings.exactly("complaints in the log", len(lines), 0)
        for line in lines[:5]:
            print(line)


def without_plugin(
    model: Path, folder: Path, findings: Findings, calls: Sequence[Call], parallel: int, **how: Any
) -> list[Outcome]:
    """The same requests to a server without the plugin, which has no limits."""
    plain = findings.plain()
    with LoadServer(model, folder / "base", plugin=False, **how) as base:
        outcomes = run_load(base.ready(plain), calls, parallel, f"{findings.job} base")
        report_outcomes(plain, outcomes)
        base.report_clean(plain)
    return outcomes


def report_outcomes(findings: Findings, outcomes: Sequence[Outcome]) -> None:
    """Every request ended in a way that its client asked for."""
    bad = [outcome for outcome in outcomes if not outcome.wanted]
    findings.exactly("requests that ended unexpectedly", len(bad), 0)
    for outcome in bad[:5]:
        print(outcome.status, outcome.ended, outcome.error, dict(outcome.call.keys))


def report_trace(
    findings: Findings, counts: Mapping[str, int], compactions: int, returns: int = 0
) -> None:
    """Evictions happened, and so did returns of retracted requests where some are asked for."""
    findings.happened("compactions", counts["compact"], compactions)
    findings.note("evicted tokens", counts["evicted_tokens"])
    if returns:
        came_back: dict[str, Any] = {kind: counts[kind] for kind in ("restore", "recompute")}
        findings.happened(
            "retracted requests with a budget that came back", sum(came_back.values()), returns
        )
        findings.note("of them from host memory", came_back["restore"])
