"""The real sglang-router in front of servers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests

from sgl_skipkv.cli.server_process import claimed_port

REGISTERED_S = 60
# ``python -m sglang_router.launch_router`` without SGLang, which it imports for its Python balancer
# alone and can do without: that takes most of its start.
LAUNCH = (
    "import sys; sys.modules['sglang'] = None;from sglang_router.launch_router import main; main()"
)


@contextmanager
def router(worker_urls: Sequence[str], folder: Path) -> Iterator[str]:
    """Its URL, once all workers are registered; requests go to them in turns."""
    with (
        claimed_port() as main,
        claimed_port() as metrics,
        (folder / "router.log").open("w") as log,
    ):
        port, metrics_port = (str(one.getsockname()[1]) for one in (main, metrics))
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", LAUNCH),
                *("--host", "127.0.0.1", "--port", port, "--policy", "round_robin"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port),
                *("--worker-urls", *worker_urls),
            ],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield _ready(f"http://127.0.0.1:{port}", len(worker_urls), process)
        finally:
            process.kill()
            process.wait(timeout=20)


def _ready(url: str, workers: int, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + REGISTERED_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the router has ended"
        try:
            registered = requests.get(url + "/workers", timeout=5).json()["workers"]
        except requests.ConnectionError:
            registered = []
        if sum(worker["is_healthy"] for worker in registered) == workers:
            return url
        time.sleep(0.2)
    raise TimeoutError(f"the router has not registered {workers} workers in {REGISTERED_S} s")
