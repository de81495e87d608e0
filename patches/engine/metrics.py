"""Prometheus metrics beside SGLang's own, where ``--enable-metrics`` is on."""

from __future__ import annotations

from typing import Any, get_args

from sgl_skipkv.patches.readiness import Readiness, State


class Metrics:
    """``sglang:skipkv_state`` and counters of compactions and evicted tokens.

    Args:
        collector: SGLang's ``SchedulerMetricsCollector``, for its labels; None: metrics are off.
    """

    def __init__(self, collector: Any | None, readiness: Readiness) -> None:
        self._labels: dict[str, str] | None = None
        if collector is None:
            return
        # Not at import: SGLang chooses the multi-process directory before it builds the collector.
        from prometheus_client import Counter, Gauge

        self._labels = dict(collector.labels)
        names = list(self._labels)
        state = Gauge(
            "sglang:skipkv_state",
            "1 for the state that KV eviction is in.",
            [*names, "state"],
            multiprocess_mode="mostrecent",
        )
        for name in get_args(State):
            state.labels(**self._labels, state=name).set(name == readiness.state)
        self._compactions = Counter(
            "sglang:skipkv_compactions_total", "Compactions of requests with a KV budget.", names
        )
        self._evicted = Counter(
            "sglang:skipkv_evicted_tokens_total", "KV tokens evicted and freed.", names
        )
        self._reused = Counter(
            "sglang:skipkv_reused_tokens_total", "Prompt tokens taken from a history.", names
        )
        self._misses = Counter(
            "sglang:skipkv_reuse_misses_total",
            "Requests that could not reuse a history, or not all of it.",
            [*names, "reason"],
        )

    def reused(self, tokens: int, miss: str) -> None:
        """Count what one finished request reused."""
        if self._labels is not None:
            self._reused.labels(**self._labels).inc(tokens)
            if miss != "none":
                self._misses.labels(**self._labels, reason=miss).inc()

    def compacted(self, requests: int, evicted_tokens: int) -> None:
        """Count the compactions of one scheduler step."""
        if self._labels is not None:
            self._compactions.labels(**self._labels).inc(requests)
            self._evicted.labels(**self._labels).inc(evicted_tokens)
