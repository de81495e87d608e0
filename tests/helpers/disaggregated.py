"""A decode server with a prefill server before it (PD disaggregation), over the real Mooncake.

``make test-disaggregation`` fetches Mooncake for machines without CUDA and says where it is.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from servers import HTTPFailure, Server

from sgl_skipkv.cli.server_process import claimed_port

_MOONCAKE = Path(os.environ.get("MOONCAKE", "none"))


def _with_mooncake(also: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Environment of a process that imports it."""
    libraries = [str(path.parent) for path in (_MOONCAKE / "libraries").rglob("lib*.so.*")]
    before = {name: os.environ.get(name, "") for name in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    package = [also.get("PYTHONPATH"), before["PYTHONPATH"], str(_MOONCAKE / "package")]
    return {
        **also,
        "PYTHONPATH": os.pathsep.join(filter(None, package)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*dict.fromkeys(libraries)])),
        "SGLANG_HOST_IP": "127.0.0.1",
    }


@cache
def has_mooncake() -> bool:
    """Whether its engine can be imported."""
    code, environment = "import mooncake.engine", {**os.environ, **_with_mooncake()}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True)
    return done.returncode == 0


class Disaggregated(Server):
    """The decode server. ``generate`` asks both, as a router does.

    Args:
        prefill: arguments of the prefill server; it is told of no budget.
        shared: arguments of both. shared_env: environment of both.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        *,
        prefill: Sequence[str] = (),
        shared: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        shared_env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        mooncake = ("--disaggregation-transfer-backend", "mooncake_tcp")
        self._bootstrap_claim = claimed_port()
        self.bootstrap_port: int = self._bootstrap_claim.getsockname()[1]
        self.prefill = Server(
            model,
            folder / "prefill",
            [
                *("--disaggregation-mode", "prefill", *mooncake),
                *("--disaggregation-bootstrap-port", str(self.bootstrap_port)),
                *(*shared, *prefill),
            ],
            trace=False,
            env=_with_mooncake(shared_env),
        )
        decode = ("--disaggregation-mode", "decode", *mooncake, *shared, *arguments)
        super().__init__(model, folder, decode, env={**_with_mooncake(shared_env), **(env or {})})

    def wait_ready(self, timeout_s: float = 300) -> Self:
        self.prefill.wait_ready(timeout_s)
        return super().wait_ready(timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600) -> Any:
        """To both servers if it is a request, each told where the other one is."""
        if body is None or path not in ("/generate", "/v1/completions", "/v1/chat/completions"):
            return super().post(path, body, timeout)
        here = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}
        both = {**body, **here, "bootstrap_room": random.randrange(2**62)}
        with ThreadPoolExecutor(1) as pool:
            computed = pool.submit(self.prefill.post, path, both, timeout)
            answer = super().post(path, both, timeout)
            with suppress(HTTPFailure):  # the decode server's answer is the one that counts
                computed.result()
        return answer

    def stop(self, grace_s: float = 0) -> None:
        self.prefill.stop(grace_s)
        super().stop(grace_s)
        self._bootstrap_claim.close()

    def assert_clean(self) -> None:
        self.prefill.assert_clean()
        super().assert_clean()
