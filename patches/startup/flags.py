"""Command-line flags, and how the settings reach the processes of a server.

SGLang pickles ``ServerArgs`` to every process it spawns, private attributes included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from sgl_skipkv.config import ServerConfig, SettingError, load_server_config
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.startup.replicas import trace_paths
from sgl_skipkv.request.settings import check_server_defaults
from sgl_skipkv.request.trace import check_trace
from sgl_skipkv.steering.vector import SteeringVector


def _text_or_false(text: str) -> str | bool:
    return False if text.lower() == "false" else text


# Flag -> (name in ServerConfig, type).
FLAGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--kv-budget": ("kv_budget", int),
    "--kv-policy": ("kv_policy", str),
    "--kv-interval": ("kv_interval", int),
    "--kv-reuse": ("kv_reuse", _text_or_false),
    "--kv-budget-max": ("kv_budget_max", int),
    "--kv-interval-min": ("kv_interval_min", int),
    "--query-text": ("query_text", str),
    "--steering-vector": ("steering_vector", str),
    "--steering": ("steering", float),
    "--steering-gamma": ("steering_gamma", float),
    "--skipkv-trace": ("trace", str),
    "--skipkv-explorer": ("explorer", bool),
}
CONFIG_FLAG = "--skipkv-config"


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``. A flag that another SGLang has itself remains SGLang's:
    requests with a budget are refused then, and the server starts."""
    group = parser.add_argument_group("sgl_skipkv", "A KV budget for every request.")

    def add(flag: str, help_text: str | None, **how: Any) -> None:
        try:
            group.add_argument(flag, dest=_dest(flag), default=None, help=help_text, **how)
        except argparse.ArgumentError:
            registry.note(f"{flag} is a flag of this SGLang's own")

    for flag, (name, kind) in FLAGS.items():
        typed = {"type": kind, "metavar": name.upper()}
        how = {"action": "store_true"} if kind is bool else typed
        add(flag, ServerConfig.model_fields[name].description, **how)
    add(CONFIG_FLAG, "A JSON file with sgl_skipkv's settings.", metavar="FILE")


def _dest(flag: str) -> str:
    """Where the value is: no name that SGLang may have for a flag of its own. For a flag without a
    value SGLang 0.5.22 expects the usual name, if it is in a ``--config`` file."""
    name = flag.removeprefix("--").replace("-", "_")
    return name if name.startswith("skipkv_") else f"sgl_skipkv_{name}"


def read_flags(server_args: Any, cls: type, args: argparse.Namespace) -> None:
    """AFTER ``ServerArgs.from_cli_args``: validate the settings.

    A wrong value, a malformed steering file or a trace that cannot be written ends the process
    before the model is loaded. Whether vector and defaults fit the model is checked after that.
    """

    def value_of(flag: str) -> Any:
        return getattr(args, _dest(flag), None)

    values = {name: value_of(flag) for flag, (name, _) in FLAGS.items()}
    given = {name: value for name, value in values.items() if value is not None}
    config = settings_or_exit(given, value_of(CONFIG_FLAG))
    _check_without_model(config, server_args)
    # Here, because a version of SGLang may lack the scheduler's hook that refuses.
    if config.enabled and (wrong := registry.problems()):
        raise SystemExit("sgl_skipkv: refused: " + "; ".join(wrong))
    if config.enabled and getattr(server_args, "encoder_only", False):  # it has no scheduler
        raise SystemExit("sgl_skipkv: refused: --encoder-only, which generates nothing")
    server_args._skipkv = config.given()


def _check_without_model(config: ServerConfig, server_args: Any) -> None:
    """What else can be known now that all settings are. Of several nodes only one may have the
    trace's folder."""
    try:
        if config.enabled:
            check_server_defaults(config, model_window_tokens=0)
        if config.trace is not None and getattr(server_args, "nnodes", 1) == 1:
            for path in trace_paths(config.trace, server_args).values():
                check_trace(path)
    except SettingError as error:
        raise SystemExit(f"sgl_skipkv: {error}") from error


def settings_or_exit(
    given: Mapping[str, Any] | None = None, config_file: str | None = None
) -> ServerConfig:
    """The operator's settings; their steering file is read and checked.

    Raises:
        SystemExit: a wrong value or a malformed file, in one line. SGLang swallows every other
            exception of a plugin.
    """
    try:
        config = load_server_config(given, config_file=config_file)
        if config.steering_vector is not None:
            SteeringVector.load(config.steering_vector)
    except SettingError as error:
        raise SystemExit(f"sgl_skipkv: {error}") from error
    return config


def config_of(server_args: Any) -> ServerConfig:
    """The settings pickled with these server args; ``sgl.Engine`` has the environment only.

    That is of all engines of a process: one with ``is_embedding=True`` does not have them.

    Raises:
        SettingError: a wrong value in the environment.
    """
    given = getattr(server_args, "_skipkv", None)
    if given is None and server_args.is_embedding:
        return ServerConfig()
    return load_server_config(given, environ={} if given is not None else None)
