"""Startup of the main process: refuse to start, or accept requests with our keys.

With ``--tokenizer-worker-num`` the main process has a router only, and its workers accept requests.
All that they get from it are SGLang's own start times, so the state travels with these.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import asdict
from typing import Any, NoReturn

import sglang
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.metrics import Refusals
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.api.explorer import add_explorer
from sgl_skipkv.patches.api.gate import Gate, collect_keys
from sgl_skipkv.patches.api.routes import bind_routes
from sgl_skipkv.patches.limits import NO_LIMITS, ServerLimits
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.patches.startup.flags import config_of
from sgl_skipkv.patches.startup.replicas import trace_paths

logger = logging.getLogger(__name__)

_NO_REPORT = (
    "the scheduler did not report its state (--use-ray is not supported, and --dp-size needs "
    "SGLang 0.5.23)"
)
_STATE = "skipkv"  # among the start times of a router
# Tokenizer managers of refused starts. If one were garbage-collected before the process ends, its
# ZeroMQ context would wait for ever for sockets that were collected with it.
_kept_alive: list[Any] = []


def open_gate(result: None, manager: Any, init_result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Engine._set_startup_time``: the schedulers have reported; open the gate or exit."""
    if (untested := registry.opened_for(sglang.__version__)) is not None:
        logger.warning(untested)
    config = config_of(manager.server_args)
    reasons, limits = list(registry.problems()), NO_LIMITS
    # With a problem nothing they report would help, and another SGLang may not say it.
    for info in () if reasons else init_result.scheduler_infos:
        report = info.get("skipkv")
        reasons += [_NO_REPORT] if report is None else report["reasons"]
        limits = NO_LIMITS if report is None else ServerLimits(**report["limits"])
    readiness = Readiness(tuple(dict.fromkeys(reasons)), config.enabled)
    wrong = readiness.message() if readiness.state == "refused" else None
    is_router = isinstance(manager, MultiTokenizerRouter)
    if wrong is None:
        wrong = _wrong_of_router(config) if is_router else _wrong_preferred(manager)
    if wrong is not None:
        _kept_alive.append(manager)
        _end_start(wrong, init_result)
    if is_router:
        manager.startup_time[_STATE] = {"reasons": readiness.reasons, "limits": asdict(limits)}
    else:
        _accept_requests(manager, readiness, limits)


def _end_start(wrong: str, init_result: Any) -> NoReturn:
    """End the processes that have started, too: a notebook or a trainer outlives an ``Engine`` that
    was refused, and has no handle to them."""
    from sglang.srt.utils import kill_process_tree

    for pid in init_result.all_child_pids:
        kill_process_tree(pid, wait_timeout=None)  # a device may take long to let go
    if threading.current_thread() is not threading.main_thread():
        logger.error(wrong)  # Python prints no SystemExit of another thread
    raise SystemExit(wrong)


def open_worker(result: None, manager: Any, startup_time: dict[str, Any]) -> None:
    """AFTER ``TokenizerManager.set_startup_time``: a worker learns what its router was told."""
    state = startup_time.pop(_STATE, None)
    if state is not None:
        enabled = config_of(manager.server_args).enabled
        limits = ServerLimits(**state["limits"])
        _accept_requests(manager, Readiness(state["reasons"], enabled), limits)


def _accept_requests(manager: Any, readiness: Readiness, limits: ServerLimits) -> None:
    config = config_of(manager.server_args)
    manager.skipkv = Gate(config, readiness, limits, Refusals(_labels(manager)))
    if (server := sys.modules.get("sglang.srt.entrypoints.http_server")) is not None:
        bind_routes(server.app)
        if config.explorer and config.trace is not None:
            arguments = manager.server_args
            paths = trace_paths(config.trace, arguments)
            has_key = bool(arguments.api_key or arguments.admin_api_key)
            add_explorer(server.app, paths, manager.tokenizer, has_key=has_key)


def _labels(manager: Any) -> Any:
    """SGLang's for metrics; None: it exports none."""

    def read() -> Any:
        return manager.metrics_collector.labels if manager.enable_metrics else None

    if not registry.problems():
        return read()
    found, _ = attempt("sgl_skipkv: metrics of this SGLang", read)  # another one may lack them
    return found


def _wrong_of_router(config: ServerConfig) -> str | None:
    """What its workers would get wrong. They know no keys, not even an administrator's."""
    from sglang.srt.runtime_context import get_serving

    if config.explorer and get_serving().admin_api_key:
        expected = "no --admin-api-key, which SGLang's tokenizer workers do not ask for"
        return f"sgl_skipkv: {SettingError('explorer', expected, True, 'one of the two')}"
    return _wrong_preferred(get_serving())


def _wrong_preferred(holder: Any) -> str | None:
    """Refuse keys in ``--preferred-sampling-params``: SGLang merges those after our checks."""
    try:
        _, keys = collect_keys(holder.preferred_sampling_params or {})
        for name in keys:
            expected = f"no {name}, whose server default is a setting of sgl_skipkv"
            choices = "--kv-budget, --kv-policy, --steering or --skipkv-config"
            raise SettingError("preferred_sampling_params", expected, name, choices)
    except SettingError as error:
        return f"sgl_skipkv: {error}"
    return None
