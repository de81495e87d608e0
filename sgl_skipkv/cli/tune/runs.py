"""The same prompts under several settings, one setting after the other, through a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

from sgl_skipkv.cli.prompts import Prompt
from sgl_skipkv.cli.server_process import Endpoint
from sgl_skipkv.config import SettingError

#: for one answer: a long one on a slow machine takes hours
_TIMEOUT_S: Final = 86_400
_IDLE_S: Final = 60


@dataclass(frozen=True)
class Setting:
    """A policy and its budget.

    Attributes:
        kv_budget: tokens; None for the full cache.
    """

    policy: str
    kv_budget: int | None

    def __str__(self) -> str:
        return "full cache" if self.kv_budget is None else f"{self.policy} {self.kv_budget}"


FULL: Final = Setting("full", None)


@dataclass(frozen=True)
class Output:
    """What one request generated, and the KV tokens that it held beside its prompt.

    Attributes:
        logprobs: of its tokens; empty if they were not asked for.
        cut_off: whether it ran into ``max_new_tokens``.
    """

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    cut_off: bool
    mean_kv_tokens: float
    peak_kv_tokens: int
    compactions: int


@dataclass(frozen=True)
class Run:
    """Every prompt under one setting; ``seconds`` from the first request to the last answer."""

    setting: Setting
    outputs: Sequence[Output]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(output.ids) for output in self.outputs) / self.seconds


@dataclass(frozen=True)
class Runner:
    """Sends the prompts, greedy.

    Attributes:
        server: that it asks.
        owned: whether nobody else uses the server; its radix cache is flushed before each run, so
            that no run finds the prompts of an earlier one.
        kv_params: of every policy.
        parallel: requests in flight.
        logprobs: whether to ask for them.
    """

    server: Endpoint
    owned: bool
    prompts: Sequence[Prompt]
    kv_params: Mapping[str, Any]
    max_new_tokens: int
    parallel: int
    logprobs: bool

    def run(self, setting: Setting, answered: Callable[[int], object]) -> Run:
        """All prompts under this setting.

        Args:
            answered: is told each prompt's index as its answer arrives.

        Raises:
            HTTPFailure: the server refused a request.
            SettingError: the setting does not arrive at the server.
        """
        if self.owned:
            # SGLang flushes when it is idle, which it is a moment after the last answer.
            self.server.post(f"/flush_cache?timeout={_IDLE_S}")
        body = self._body(setting)
        start = time.perf_counter()
        pool = ThreadPoolExecutor(self.parallel)
        futures = {pool.submit(self._ask, prompt, body): i for i, prompt in enumerate(self.prompts)}
        try:
            for future in as_completed(futures):
                future.result()
                answered(futures[future])
        finally:  # without waiting: after an error or a signal the server ends as well
            pool.shutdown(wait=False, cancel_futures=True)
        seconds = time.perf_counter() - start
        return Run(setting, [_output(future.result(), setting) for future in futures], seconds)

    def _body(self, setting: Setting) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": self.max_new_tokens}
        keys: dict[str, Any] = {"kv_policy": setting.policy}
        if setting.kv_budget is not None:
            keys |= {"kv_budget": setting.kv_budget, "kv_params": dict(self.kv_params)}
        return {"sampling_params": {**params, **keys}, "return_logprob": self.logprobs}

    def _ask(self, prompt: Prompt, body: Mapping[str, Any]) -> Any:
        sent = {"input_ids": prompt.ids, **body}
        return self.server.post("/generate", sent, timeout=_TIMEOUT_S)


def _output(answer: Mapping[str, Any], setting: Setting) -> Output:
    info = answer["meta_info"]
    held = info.get("skipkv", {})
    arrived = held.get("policy"), held.get("kv_budget")
    expected = setting.policy, setting.kv_budget
    if arrived[0] != expected[0] or (setting != FULL and arrived != expected):
        choices = "skipkv doctor --url says where budgets arrive"
        raise SettingError("url", f"a server where {setting} arrives", held, choices)
    return Output(
        text=answer["text"],
        ids=answer["output_ids"],
        logprobs=[entry[0] for entry in info.get("output_token_logprobs", ())],
        cut_off=info["finish_reason"]["type"] == "length",
        mean_kv_tokens=held["mean_kv_tokens"],
        peak_kv_tokens=held["peak_kv_tokens"],
        compactions=held["compactions"],
    )
