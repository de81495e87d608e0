"""One look at the ``/metrics`` of a running server."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import requests
from prometheus_client.parser import text_string_to_metric_families

from sgl_skipkv.cli.no_answer import why_no_answer
from sgl_skipkv.config import METRIC_PREFIX, SettingError

TIMEOUT_S: Final = 10
_CHOICES: Final = "such as http://127.0.0.1:30000, with --api-key where a proxy asks for one"


@dataclass(frozen=True)
class Sample:
    """One series and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


class Scrape:
    """What a server exported at one moment.

    Attributes:
        at_s: when, on the monotonic clock.
    """

    def __init__(self, text: str) -> None:
        self.at_s = time.monotonic()
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append(
                    Sample(sample.name, sample.labels, float(sample.value))
                )

    def samples(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels, of all ranks and processes."""
        return sum(
            sample.value
            for sample in self.samples(name)
            if labels.items() <= {**sample.labels}.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The same for every value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self.samples(name):
            sums[sample.labels.get(label, "")] += sample.value
        return dict(sums)

    @property
    def names(self) -> set[str]:
        return {*self._samples}


def scrape(session: requests.Session, url: str) -> Scrape:
    """Ask the server for its metrics.

    Raises:
        SettingError: nothing answers there, metrics are off, something else answers, or the plugin
            is not loaded.
    """
    expected = "the address of a running server"
    try:
        answer = session.get(url + "/metrics", timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise SettingError("url", expected, f"{url} ({why_no_answer(error)})", _CHOICES) from error
    if answer.status_code == 404:
        choices = "start it with --enable-metrics"
        raise SettingError("url", "a server with metrics", f"{url} without /metrics", choices)
    if answer.status_code != 200:
        raise SettingError("url", expected, f"{url} (status {answer.status_code})", _CHOICES)
    try:
        scraped = Scrape(answer.text)
    except ValueError as error:
        got = f"{url}, whose /metrics has none"
        raise SettingError("url", "a server with metrics", got, _CHOICES) from error
    if f"{METRIC_PREFIX}state" not in scraped.names:
        expected = "a server with sgl_skipkv"
        choices = "install it in the server's environment"
        raise SettingError("url", expected, f"{url} without {METRIC_PREFIX}state", choices)
    return scraped
