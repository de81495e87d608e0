"""A server with SGLang's own checks on, and the requests that tests send it."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sgl_skipkv.cli.server_process import HTTPFailure, ServerProcess

__all__ = ["HTTPFailure", "Server", "judged", "logprob_gap", "output_logprobs"]

# They raise and end the server, which fails the test.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_INVARIANT_CHECK": "2",
}
#: of a body, beside the sampling parameters
_TOP = ("rid", "stream", "require_reasoning", "image_data", "routed_dp_rank")
_TOP += ("return_logprob", "logprob_start_len", "lora_path")
#: float32 rounding between two kernels
_LOGPROB_TOLERANCE = 2e-4
BAD_LOG_WORDS = ("leak", "double free", "use-after-free", "Scheduler hit", "Traceback")


class Server(ServerProcess):
    """A real server, with our plugin and a trace, or without either."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        *,
        plugin: bool = True,
        trace: bool = True,
        env: Mapping[str, str] | None = None,
        captures: bool = False,
    ) -> None:
        self.trace_path = folder / "trace.jsonl"
        self._read_bytes: dict[Path, int] = defaultdict(int)
        self._events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        environment = {**STRICT, **(env or {})}
        # The pool's size is given; the fraction would only ask how much memory other servers left.
        pool = ("--max-total-tokens", "8192", "--mem-fraction-static", "0.98")
        arguments = [*pool, "--decode-log-interval", "1", *arguments]
        if not plugin:
            environment["SGLANG_PLUGINS"] = "none-such"
        elif trace:
            arguments += ["--skipkv-trace", str(self.trace_path)]
        super().__init__(model, folder, arguments, environment, captures=captures)

    def stop(self, grace_s: float = 0) -> None:
        """At once: ``assert_clean`` has looked at what there is to see."""
        super().stop(grace_s)

    def wait_exit(self) -> int:
        """The exit status of a server that ends by itself."""
        return self.process.wait(timeout=400)

    def generate(self, input_ids: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """Greedy, exactly ``tokens`` tokens, with log-probabilities unless ``return_logprob`` says
        otherwise."""
        top = {name: sampling.pop(name) for name in _TOP if name in sampling}
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
        body = {"input_ids": list(input_ids), "sampling_params": params, "return_logprob": True}
        return self.post("/generate", {**body, **top})

    def generate_all(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All at once, each from its own connection; answers in the requests' order."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: self.generate(**call), calls))

    @property
    def trace_files(self) -> list[Path]:
        """One of each replica and each attention group."""
        path = self.trace_path
        return sorted(path.parent.glob(f"{path.stem}*{path.suffix}"))

    def events(self, rid: str) -> list[dict[str, Any]]:
        """The trace lines of one request; of the files, only what is new is read."""
        for path in self.trace_files:
            with path.open("rb") as file:
                file.seek(self._read_bytes[path])
                lines, end, _ = file.read().rpartition(b"\n")
            self._read_bytes[path] += len(lines + end)
            for line in lines.splitlines():
                event = json.loads(line)
                self._events[event["rid"]].append(event)
        return list(self._events[rid])

    def wait_idle(self) -> None:
        """Until nothing runs, so that SGLang's idle checks have run."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            load = self.get("/v1/loads?include=core")["loads"][0]
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                return
            time.sleep(0.1)
        raise TimeoutError("server did not become idle")

    def used_tokens(self) -> int:
        """SGLang's own count of KV tokens in use, cached prompts not counted."""
        return int(self.get("/v1/loads?include=core")["loads"][0]["num_used_tokens"])

    def complaints(self) -> list[str]:
        """Lines of the log that nobody wants to see."""
        return [line for line in self.log.splitlines() if any(w in line for w in BAD_LOG_WORDS)]

    def assert_clean(self) -> None:
        """No complaint of SGLang's checks, and the server still serves."""
        self.wait_idle()
        assert not (lines := self.complaints()), lines[:5]
        assert self.process.poll() is None


def judged(
    judge: Callable[..., Any], server: Server, asked: Mapping[str, Any], answer: Mapping[str, Any]
) -> list[str]:
    """The request's events by name, if every token of it is what the oracle's ``judge`` says."""
    rid, ids, events = asked["rid"], answer["output_ids"], server.events(asked["rid"])
    verdict = judge(asked["input_ids"], ids, events)
    gap = logprob_gap(answer, verdict.logprobs.tolist())
    assert verdict.wrong == [] and gap <= _LOGPROB_TOLERANCE, (rid, verdict.wrong[:5], gap)
    return [event["event"] for event in events]


def logprob_gap(answer: Mapping[str, Any], others: Iterable[float]) -> float:
    """The largest difference of its log-probabilities from these, token by token."""
    return max(abs(a - b) for a, b in zip(output_logprobs(answer), others, strict=True))


def output_logprobs(answer: Mapping[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
