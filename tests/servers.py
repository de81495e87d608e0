"""Real SGLang servers for tests: one process each, on loopback, ended by the id it was started with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sgl_skipkv.trace import read_trace

START_TIMEOUT_S = 240

# SGLang's own checks, all on: they raise and end the server, which fails the test.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
BAD_LOG_WORDS = ("leak", "double free", "use-after-free", "Scheduler hit", "Traceback")


class HTTPFailure(Exception):
    """A response that is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


class Server:
    """``python -m sglang.launch_server`` with our plugin, or without it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        args: Sequence[str] = (),
        *,
        plugin: bool = True,
        trace: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log_path, self.trace_path = folder / "server.log", folder / "trace.jsonl"
        command = [
            *(sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--max-total-tokens", "8192"),
            *("--decode-log-interval", "1"),
            "--sleep-on-idle",
            *args,
        ]
        environment = {**os.environ, **STRICT, "SGLANG_PLATFORM": "skipkv_cpu", **(env or {})}
        if not plugin:
            environment["SGLANG_PLUGINS"] = "none-such"
        elif trace:
            command += ["--skipkv-trace", str(self.trace_path)]
        self._log = self.log_path.open("w")
        # Its own session, so that ending the group ends the children it spawned and nothing else.
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.log[-3000:]}")
            if "The server is fired up" in self.log:
                return self
            time.sleep(0.3)
        raise TimeoutError(f"server not ready after {START_TIMEOUT_S} s:\n{self.log[-3000:]}")

    def wait_exit(self) -> int:
        return self.process.wait(timeout=START_TIMEOUT_S)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(timeout=20)
        self._log.close()

    # -- requests --------------------------------------------------------------------------------

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 300) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode() if body is not None else b"",
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise HTTPFailure(error.code, error.read().decode(errors="replace")) from error
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def generate(self, input_ids: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
        """Greedy, exactly ``tokens`` tokens, with log-probabilities."""
        top = {name: sampling.pop(name) for name in ("rid", "stream") if name in sampling}
        params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
        body = {"input_ids": list(input_ids), "sampling_params": params, "return_logprob": True}
        answer: dict[str, Any] = self.post("/generate", {**body, **top})
        return answer

    def generate_all(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All at once, each from its own connection; answers in the calls' order."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: self.generate(**call), calls))

    def events(self, rid: str) -> list[dict[str, Any]]:
        return [event for event in read_trace(self.trace_path) if event["rid"] == rid]

    def wait_idle(self) -> None:
        """Until nothing runs, so that SGLang's idle checks have run."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            load = self.get("/v1/loads?include=core")["loads"][0]
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                return
            time.sleep(0.1)
        raise TimeoutError("server did not become idle")

    def assert_clean(self) -> None:
        """No complaint of SGLang's checks, pool free after a flush, still serving."""
        self.wait_idle()
        lines = [line for line in self.log.splitlines() if any(w in line for w in BAD_LOG_WORDS)]
        assert not lines, lines[:5]
        assert self.process.poll() is None


def output_logprobs(answer: Mapping[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
