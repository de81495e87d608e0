"""A real SGLang server in a process of its own, for demos, benchmarks and tests.

It runs in its own session, so ending its process group ends what it spawned and nothing else, and
it listens on loopback only.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from sgl_skipkv.config import CPU_PLATFORM

READY_LINE = "The server is fired up"
# A server binds its port when its model is loaded. Until then the system may give a port from
# 32,768 on to any program's outgoing connection; these it never gives.
PORTS = range(20_000, 32_768)


class HTTPFailure(Exception):
    """A response whose status is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status, self.body = status, body


def claimed_port(ports: Sequence[int] = PORTS) -> socket.socket:
    """A socket on a loopback port that nobody else has, held for a server that is started now.

    The system lets the server bind beside this socket, because it does not listen and both allow
    reuse. Nobody gets the port without allowing reuse: not another call of this function, in
    whatever process.

    Args:
        ports: to choose from, at random.

    Raises:
        RuntimeError: somebody has each of them.
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


def device_arguments(*, captures: bool = False) -> list[str]:
    """Flags for this machine: a CUDA GPU where there is one, else the CPU platform.

    Args:
        captures: on a GPU, whether SGLang captures CUDA graphs. Nothing of ours is in them unless a
            flag asks at the start, so a server whose requests alone bring budgets needs them off.
    """
    import torch

    if not torch.cuda.is_available():
        return ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle"]
    off = ["--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    return ["--attention-backend", "triton", "--page-size", "1", *([] if captures else off)]


class ServerProcess:
    """``python -m sglang.launch_server`` as a context manager.

    Args:
        model: folder, as seen from here, or name of a model.
        folder: working directory, which also gets ``server.log``; it should hold no folder that is
            named like a module.
        arguments: further command-line flags.
        environment: over the caller's own.
        captures: as in ``device_arguments``.
    """

    def __init__(
        self,
        model: Path | str,
        folder: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        captures: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        self._port_claim = claimed_port()
        self.port: int = self._port_claim.getsockname()[1]
        name = str(Path(model).resolve()) if Path(model).exists() else str(model)
        device = device_arguments(captures=captures)
        platform = {"SGLANG_PLATFORM": CPU_PLATFORM} if "cpu" in device else {}
        self._log = self.log_path.open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "sglang.launch_server"),
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
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 300) -> Self:
        """Block until the server answers.

        Raises:
            RuntimeError: it ended instead; the message holds the end of its log.
            TimeoutError: it did neither.
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
        """End the server and everything it started, and wait until all of it is gone.

        Doing it again does nothing.

        Args:
            grace_s: how long SGLang may take to shut down by itself before it is killed.
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
        """Block until none of the server's processes is left; whether that is so."""
        deadline = time.monotonic() + timeout_s
        while there := self._signal_group(0):
            self.process.poll()  # a child that nobody waits for stays in its group
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return not there

    def _signal_group(self, number: int) -> bool:
        """Signal the server's processes; whether there were any."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600) -> Any:
        """POST JSON; the answer as JSON where it is JSON, else as text.

        Raises:
            HTTPFailure: any status but 200.
        """
        data = b"" if body is None else json.dumps(body)  # requests' own would refuse NaN
        headers = {"Content-Type": "application/json"}
        return _read(requests.post(self.url + path, data, headers=headers, timeout=timeout))

    def get(self, path: str) -> Any:
        """GET; the answer as JSON where it is JSON, else as text."""
        return _read(requests.get(self.url + path, timeout=60))


def _read(response: requests.Response) -> Any:
    response.encoding = "utf-8"
    if response.status_code != 200:
        raise HTTPFailure(response.status_code, response.text)
    try:
        return response.json()
    except requests.JSONDecodeError:
        return response.text
