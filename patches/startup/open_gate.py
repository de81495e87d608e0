"""The main process at its start: refuse, or let requests with our keys in."""

from __future__ import annotations

import sys
from typing import Any

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.api.gate import Gate, collect_keys, preferred_parameters
from sgl_skipkv.patches.api.routes import bind_routes
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.patches.startup.flags import config_of

# Tokenizer managers of refused starts. One that the garbage collector finds before the process has
# ended takes its ZeroMQ context along, which then waits for ever for sockets that went with it.
_kept: list[Any] = []


def open_gate(result: None, manager: Any, init_result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Engine._set_startup_time``: the schedulers reported; refuse to start if need be."""
    config = config_of(manager.server_args)
    reasons = list(registry.problems())
    for info in init_result.scheduler_infos:
        answer = info.get("skipkv")
        missing = ["the scheduler did not report its state (data-parallel or another SGLang)"]
        reasons += missing if answer is None else answer["reasons"]
    readiness = Readiness(tuple(dict.fromkeys(reasons)), config.enabled)
    wrong = readiness.message() if readiness.state == "refused" else _wrong_preferred(manager)
    if wrong is not None:
        _kept.append(manager)
        raise SystemExit(wrong)
    manager.skipkv = Gate(config, readiness)
    if (server := sys.modules.get("sglang.srt.entrypoints.http_server")) is not None:
        bind_routes(server.app)


def _wrong_preferred(manager: Any) -> str | None:
    """Keys in ``--preferred-sampling-params``: SGLang merges those in behind our back."""
    try:
        _, keys = collect_keys(preferred_parameters(manager))
        for name in keys:
            expected = f"no {name}, which is a default of the server by settings of its own"
            choices = "--kv-budget, --kv-policy, --steering or --skipkv-config"
            raise SettingError("preferred_sampling_params", expected, name, choices)
    except SettingError as error:
        return f"sgl_skipkv: {error}"
    return None
