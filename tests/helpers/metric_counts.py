"""What a server's trace says of its requests, and what its metrics say: the same counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bench.lib.trace import read_trace
from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.config import METRIC_PREFIX

Counts = Counter[tuple[str, ...]]
#: counter -> labels that both know
COUNTED = {
    "compactions_total": ("policy",),
    "evicted_tokens_total": ("policy",),
    "evicted_sentences_total": ("policy",),
    "requests_total": ("policy", "outcome"),
    "returned_requests_total": ("how",),
    "reused_tokens_total": (),
    "reuse_misses_total": ("reason",),
}


def counts_of_trace(paths: Iterable[Path]) -> Counts:
    """Of every event of these files; the trace tells an error from no other abort."""
    counts: Counts = Counter()
    for event in (event for path in paths for event in read_trace(path)):
        if event["event"] == "compact":
            counts["compactions_total", event["policy"]] += 1
            counts["evicted_tokens_total", event["policy"]] += event["before"] - event["after"]
        elif event["event"] == "finish":
            policy, reason = event["policy"], event["finish_reason"]
            counts["requests_total", policy, reason] += 1
            counts["evicted_sentences_total", policy] += event["evicted_sentences"]
            counts[("reused_tokens_total",)] += event.get("reused_tokens", 0)
            if (miss := event.get("kv_reuse_miss", "none")) != "none":
                counts["reuse_misses_total", miss] += 1
        else:
            counts["returned_requests_total", event["event"]] += 1
    return +counts


def counts_of_metrics(scrape: Scrape) -> Counts:
    """Of every rank and process."""
    counts: Counts = Counter()
    for name, labels in COUNTED.items():
        for sample in scrape.samples(METRIC_PREFIX + name):
            values = (sample.labels[label] for label in labels)
            values = ("abort" if value == "error" else value for value in values)
            counts[name, *values] += int(sample.value)
    return +counts


def differences(trace: Counts, metrics: Counts) -> list[str]:
    """What is counted differently, in words."""
    return [
        f"{' '.join(key)}: {trace[key]} by the trace, {metrics[key]} by the metrics"
        for key in sorted(trace.keys() | metrics.keys())
        if trace[key] != metrics[key]
    ]
