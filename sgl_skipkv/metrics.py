"""Prometheus metrics beside SGLang's own, where ``--enable-metrics`` is on.

Every value of a label comes from a tuple here or from the registry of policies, so the number of
series is bounded: what a client sends is never a label.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sgl_skipkv.config import METRIC_PREFIX, SettingError
from sgl_skipkv.policy import names
from sgl_skipkv.request.settings import KEYS
from sgl_skipkv.request.state import RequestState

STATES: Final = ("ready", "unavailable", "refused")
OUTCOMES: Final = ("stop", "length", "abort", "error", "other")
RETURNS: Final = ("restore", "recompute")
MISSES: Final = ("evicted", "diverged", "context", "logprobs", "media")
#: the key whose value is wrong, or another cause
REFUSALS: Final = (
    *KEYS,
    *("unknown_key", "custom_params", "token_ids", "unavailable", "memory", "error"),
)
_TOKEN_ID_FIELDS: Final = ("input_ids", "stop_token_ids")
#: seconds between two updates of the gauges of running requests
_GAUGES_EVERY_S: Final = 1.0
_POLICY: Final = {"policy": names()}


@dataclass(frozen=True)
class Metric:
    """One metric, without SGLang's labels (``model_name``, ``tp_rank``, ``dp_rank``, ...).

    Attributes:
        name: behind ``METRIC_PREFIX``.
        question: of an operator, that it answers.
        text: its help.
        labels: of ours -> all values.
        buckets: of a histogram: upper bounds.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    question: str
    text: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return METRIC_PREFIX + self.name


SCHEDULER_METRICS: Final = (
    Metric(
        *("state", "gauge", "Can this server evict?"),
        "1 for the state that KV eviction is in, 0 for the others.",
        {"state": STATES},
    ),
    Metric(
        *("running_requests", "gauge", "What runs?"),
        "Requests with a budget, a policy or steering that decode.",
        _POLICY,
    ),
    Metric(
        *("kv_tokens", "gauge", "What do they hold?"),
        "KV tokens that running requests hold and that count against their budgets.",
        _POLICY,
    ),
    Metric(
        *("full_kv_tokens", "gauge", "What would they hold without eviction?"),
        "The same tokens, and those evicted since the last prefill of each request.",
        _POLICY,
    ),
    Metric(
        *("kv_budget_tokens", "gauge", "How much may they keep?"),
        "Sum of the kv_budget of running requests that evict.",
        _POLICY,
    ),
    Metric(
        *("compactions_total", "counter", "How often is compacted?"),
        "Compactions of requests; each request that is due in a step counts.",
        _POLICY,
    ),
    Metric(
        *("compaction_seconds", "histogram", "What does it cost the scheduler?"),
        "Host seconds of all compactions of one scheduler step. On a GPU their kernels may run "
        "on after that.",
        buckets=(2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    ),
    Metric(
        *("evicted_tokens_total", "counter", "How many slots does it free?"),
        "KV tokens that were evicted and whose slots were freed.",
        _POLICY,
    ),
    Metric(
        *("evicted_sentences_total", "counter", "How many sentences are evicted as a whole?"),
        "Sentences without a KV token left, counted when their request ends.",
        _POLICY,
    ),
    Metric(
        *("requests_total", "counter", "How do requests end?"),
        "Requests with a budget, a policy or steering that ended. error: of the plugin, or "
        "neither restorable nor recomputable; abort: by the client or by SGLang.",
        {**_POLICY, "outcome": OUTCOMES},
    ),
    Metric(
        *("returned_requests_total", "counter", "What do retractions cost?"),
        "Retracted requests that run again: restored from host memory, or recomputed, which "
        "starts their eviction anew.",
        {"how": RETURNS},
    ),
    Metric(
        *("reused_tokens_total", "counter", "Do next turns reuse KV?"),
        "Prompt tokens of requests with kv_reuse whose KV came from a history.",
    ),
    Metric(
        *("reuse_misses_total", "counter", "Why do they not?"),
        "Requests with kv_reuse that could not reuse a history, or not all of it.",
        {"reason": MISSES},
    ),
)
REFUSALS_METRIC: Final = Metric(
    *("refusals_total", "counter", "What is refused?"),
    "Requests that were refused: the key with a wrong value, or another cause. memory, and "
    "unavailable where new weights could not be measured, are 503, error is 500, all others 400.",
    {"reason": REFUSALS},
)
METRICS: Final = (*SCHEDULER_METRICS, REFUSALS_METRIC)


class Refusals:
    """Counts refused requests, in the main process and in the schedulers.

    Args:
        labels: of SGLang's collector in this process; None: metrics are off, and nothing is done.
        metrics: that this process exports.
    """

    def __init__(
        self,
        labels: Mapping[str, object] | None = None,
        metrics: Sequence[Metric] = (REFUSALS_METRIC,),
    ) -> None:
        self.on = labels is not None
        if labels is None:
            return
        self._labels = tuple(labels.values())
        self._known = {metric.name: metric for metric in metrics}
        self._exported = {metric.name: _export(metric, [*labels]) for metric in metrics}
        self._series: dict[tuple[str, ...], Any] = {}
        self._begin()

    def _begin(self, policy: str | None = None) -> None:
        """Export series from 0 on, so that a first event is an increase: those of a policy begin
        with its first request, all others with the server."""
        chosen = {} if policy is None else {"policy": (policy,)}
        for metric in self._known.values():
            if ("policy" in metric.labels) == bool(chosen):
                for values in itertools.product(*{**metric.labels, **chosen}.values()):
                    self._of(metric.name, *values)

    def _of(self, name: str, *values: str) -> Any:
        """The series with these values of our labels."""
        key = (name, *values)
        if (series := self._series.get(key)) is None:
            allowed = self._known[name].labels.values()
            assert all(v in known for v, known in zip(values, allowed, strict=True)), key
            series = self._series[key] = self._exported[name].labels(*self._labels, *values)
        return series

    def refused(self, reason: str) -> None:
        """Count one refused request; the reason is one of ``REFUSALS``."""
        if self.on:
            self._of("refusals_total", reason).inc()

    def refused_for(self, error: ValueError) -> None:
        """Count the request that was refused with this error."""
        self.refused(reason_of(error))


def reason_of(error: ValueError) -> str:
    """Which of ``REFUSALS`` an error is: by its field, without what a client wrote."""
    if not isinstance(error, SettingError):
        return "unavailable"
    name = error.field.removeprefix("metadata.").partition(".")[0]
    if name in _TOKEN_ID_FIELDS:
        return "token_ids"
    return name if name in (*KEYS, "custom_params") else "unknown_key"


class Metrics(Refusals):
    """What one scheduler process exports.

    Args:
        labels: as for ``Refusals``.
    """

    def __init__(self, labels: Mapping[str, object] | None = None) -> None:
        super().__init__(labels, METRICS)
        self._policies, self._gauges_due_s = set[str](), 0.0

    def decided(self, state: str) -> None:
        """The server has started: the state that eviction is in, one of ``STATES``."""
        if self.on:
            for label in STATES:
                self._of("state", label).set(label == state)

    def opened(self, state: RequestState) -> None:
        """A request with this state has arrived."""
        if self.on and (policy := state.settings.policy.name) not in self._policies:
            self._policies.add(policy)
            self._begin(policy)

    def compacting(self) -> AbstractContextManager[Any]:
        """Around the compactions of one scheduler step: their seconds."""
        if not self.on:
            return nullcontext()
        timer: AbstractContextManager[Any] = self._of("compaction_seconds").time()
        return timer

    def compacted(self, state: RequestState, evicted_tokens: int) -> None:
        """Count one compaction."""
        if self.on:
            policy = state.settings.policy.name
            self._of("compactions_total", policy).inc()
            self._of("evicted_tokens_total", policy).inc(evicted_tokens)

    def returned(self, how: str) -> None:
        """A retracted request runs again."""
        if self.on:
            self._of("returned_requests_total", how).inc()

    def ended(self, state: RequestState, reason: str | None) -> None:
        """Count a request that has ended, as its summary does.

        Args:
            reason: the type of SGLang's finish reason.
        """
        if not self.on:
            return
        policy = state.settings.policy.name
        outcome = reason if reason in OUTCOMES else "other"
        if outcome == "abort" and state.failure is not None:
            outcome = "error"
        self._of("requests_total", policy, outcome).inc()
        self._of("evicted_sentences_total", policy).inc(state.report.evicted_sentences)
        if state.settings.kv_reuse is not None:
            continued, miss = state.reuse.continued, state.reuse.miss
            if continued is not None:
                self._of("reused_tokens_total").inc(continued.sent_tokens)
            if miss != "none":
                self._of("reuse_misses_total", miss).inc()

    def gauges_due(self) -> bool:
        """Whether the gauges of running requests are a second old."""
        return self.on and time.monotonic() >= self._gauges_due_s

    def running(self, row_tokens: Mapping[RequestState, int]) -> None:
        """Set the gauges of running requests.

        Args:
            row_tokens: of every request in the decode batch that has a state; empty when the last
                one has left it.
        """
        self._gauges_due_s = time.monotonic() + _GAUGES_EVERY_S if row_tokens else 0.0
        sums = {policy: [0, 0, 0, 0] for policy in self._policies}
        for state, tokens in row_tokens.items():
            name, budget = state.settings.policy.name, state.settings.kv_budget
            held = 1, state.budgeted_tokens(tokens), state.full_tokens(tokens), budget or 0
            sums[name] = [a + b for a, b in zip(sums[name], held, strict=True)]
        gauges = "running_requests", "kv_tokens", "full_kv_tokens", "kv_budget_tokens"
        for policy, values in sums.items():
            for name, value in zip(gauges, values, strict=True):
                self._of(name, policy).set(value)


def _export(metric: Metric, labels: Sequence[str]) -> Any:
    """The metric in ``prometheus_client``'s registry.

    Imported here, because SGLang sets the multi-process directory before it builds its collectors,
    and ``prometheus_client`` reads that when it is imported.
    """
    from prometheus_client import Counter, Gauge, Histogram

    name, labels = metric.full_name, [*labels, *metric.labels]
    if metric.kind == "counter":
        return Counter(name, metric.text, labels)
    if metric.kind == "gauge":
        return Gauge(name, metric.text, labels, multiprocess_mode="mostrecent")
    return Histogram(name, metric.text, labels, buckets=metric.buckets)
