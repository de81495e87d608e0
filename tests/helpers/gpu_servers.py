"""Servers of the attention backends that run on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from server_parts import STANDALONE
from servers import Server

#: backend -> the module that it needs
BACKENDS = {"fa3": "sgl_kernel.flash_ops", "flashinfer": "flashinfer", "triton": "triton"}


def started(backend: str, model: Path, draft: Path | None, folder: Path) -> Server:
    arguments = ("--attention-backend", backend, "--sampling-backend", "pytorch")
    arguments += ("--dtype", "float16", "--max-total-tokens", "32768")
    arguments += ("--mem-fraction-static", "0.3", "--watchdog-timeout", "1200")
    arguments += ("--max-running-requests", "64", "--kv-interval", "128")
    if draft is not None:
        arguments += ("--speculative-draft-model-path", str(draft), *STANDALONE)
    # Not our CPU platform, which other tests choose for all that they start.
    return Server(model, folder, arguments, env={"SGLANG_PLATFORM": ""}, captures=True)


def side_by_side(model: Path, draft: Path | None, folder: Any) -> Iterator[dict[str, Server]]:
    """backend -> server, all on one GPU."""
    found = [name for name, module in BACKENDS.items() if find_spec(module) is not None]
    servers = {name: started(name, model, draft, folder(name)) for name in found}
    for server in servers.values():
        server.wait_ready(900)
    yield servers
    for server in servers.values():
        server.assert_clean()
        server.stop()
