"""Starts a real SGLang server in a process, for demos, benchmarks and tests, or asks a running one.

The process has its own session, so ending its process group ends exactly the processes that it
spawned. The server listens on loopback only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import requests

from sgl_skipkv.config import CPU_PLATFORM

READY_LINE = "The server is fired up"
# A server binds its port only when its model is loaded. Until then Linux may assign a port from
# 32,768 on to another program's outgoing connection, but never one of these.
PORTS = range(20_000, 32_768)
# KV pool on a CPU, where SGLang would otherwise use most of the memory.
_CPU_POOL_TOKENS = 65536


class HTTPFailure(Exception):
    """A response whose status is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


def claimed_port(ports: Sequence[int] = PORTS) -> socket.socket:
    """A socket that reserves a free loopback port, at random, for a server that is about to start.

    The server can bind the same port, because this socket does not listen and both allow reuse.
    This function binds before it allows reuse, so no two calls get the same port, in any process.

    Raises:
        RuntimeError: none of them is free.
    """
    for port in random.SystemRandom().sample(ports, len(ports)):
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise RuntimeError(f"port: expected a free one in {min(ports)} to {max(ports)}, got none")


class Endpoint:
    """A server by its address, whoever started it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600) -> Any:
        """POST JSON; returns the decoded JSON response, or else its text.

        Raises:
            HTTPFailure: any status but 200.
        """
        data = b"" if body is None else json.dumps(body)  # requests' own would refuse NaN
        headers = {"Content-Type": "application/json", **self._headers}
        return _read(requests.post(self.url + path, data, headers=headers, timeout=timeout))

    def get(self, path: str) -> Any:
        """GET; returns the decoded JSON response, or else its text."""
        return _read(requests.get(self.url + path, headers=self._headers, timeout=60))


class ServerProcess(Endpoint, AbstractContextManager["ServerProcess"]):
    """``python -m sglang.launch_server`` as a context manager, on a CUDA GPU where there is one,
    else on the CPU platform. On a GPU it serves budgets only if ``arguments`` enable eviction.

    Args:
        model: folder, as seen from here, or name of a model.
        folder: working directory and place of ``server.log``; no folder in it should have the name
            of a module.
        arguments: more command-line flags.
        environment: added to the caller's.
        captures: on a GPU, whether SGLang captures CUDA graphs.
        python: of the environment that the server runs in.
    """

    def __init__(
        self,
        model: Path | str,
        folder: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        captures: bool = False,
        python: str = sys.executable,
    ) -> None:
        import torch

        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        self._port_claim = claimed_port()
        self.port: int = self._port_claim.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{self.port}")
        name = str(Path(model).resolve()) if Path(model).exists() else str(model)
        platform = {}
        if torch.cuda.is_available():
            device = ["--attention-backend", "triton", "--page-size", "1"]
            off = ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")
            device += () if captures else off
        else:
            device = ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle"]
            platform = {"SGLANG_PLATFORM": CPU_PLATFORM}
        self._log = self.log_path.open("w")
        self.process = subprocess.Popen(
            [
                *(python, "-P", "-m", "sglang.launch_server"),
                *("--model-path", name, "--host", "127.0.0.1", "--port", str(self.port)),
                *device,
                *arguments,
            ],
            cwd=folder,
            env={**os.environ, **platform, **(environment or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 300) -> Self:
        """Block until the server is ready.

        Raises:
            RuntimeError: the server has ended; the message has the end of its log.
            TimeoutError: the server is neither ready nor has it ended.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                tail = self.log[-3000:]
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{tail}")
            if READY_LINE in self.log:
                return self
            time.sleep(0.3)
        raise TimeoutError(f"the server is not ready after {timeout_s} s:\n{self.log[-3000:]}")

    def stop(self, grace_s: float = 30) -> None:
        """End the server and all processes it started, and wait for them. May be called again.

        SGLang is killed if it has not shut down after ``grace_s``.
        """
        if self._log.closed:
            return
        if grace_s > 0:
            self.process.terminate()
            self.wait_gone(grace_s)
        if self._signal_group(signal.SIGKILL):
            self.wait_gone(20)
        self.process.wait(timeout=20)
        self._port_claim.close()
        self._log.close()

    def wait_gone(self, timeout_s: float) -> bool:
        """Block until all of the server's processes have ended; False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while running := self._signal_group(0):
            self.process.poll()  # reap the child: a zombie stays in its process group
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return not running

    def _signal_group(self, number: int) -> bool:
        """Send a signal to the server's processes; False if there are none."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def __exit__(self, *error: object) -> None:
        self.stop()


def exit_on_sigterm() -> None:
    """Let this process end by ``SystemExit`` if it is told to, so that its servers end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _read(response: requests.Response) -> Any:
    response.encoding = "utf-8"
    if response.status_code != 200:
        raise HTTPFailure(response.status_code, response.text)
    try:
        return response.json()
    except requests.JSONDecodeError:
        return response.text


def server_flags(given: Iterable[str]) -> list[str]:
    """What ``--server-flags`` were given, NAME or NAME=VALUE, as the server takes them."""
    return [part for flag in given for part in f"--{flag}".split("=", 1)]


def pool_flags(parallel: int, most_tokens: int) -> list[str]:
    """Flags for a pool that holds ``parallel`` requests of this length, within what a CPU has; none
    on a GPU, where SGLang takes what is free.
    """
    import torch

    if torch.cuda.is_available():
        return []
    pool_tokens = max(_CPU_POOL_TOKENS, 2 * most_tokens)
    return ["--max-total-tokens", str(min(pool_tokens, parallel * most_tokens))]
