"""The main process: every call's keys are read and refused here, before admission.

``kv_budget`` and its companions may stand in ``sampling_params`` or in its ``custom_params``;
either way they leave as ``custom_params``, the only carrier that SGLang's own types let through.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_skipkv.call import CallSettings, refuse_mistaken, resolve_call, take_keys
from sgl_skipkv.config import ServerConfig, SettingError, brief
from sgl_skipkv.patches import seams
from sgl_skipkv.patches.readiness import Readiness, Unavailable
from sgl_skipkv.patches.server_args import config_of

# Tokenizer managers of refused starts. One that the garbage collector finds before the process has
# ended takes its ZeroMQ context along, which then waits for ever for sockets that went with it.
_kept: list[Any] = []


@dataclass(frozen=True)
class Gate:
    """What the main process knows: the operator's settings and the schedulers' answer."""

    config: ServerConfig
    readiness: Readiness

    def check(self, keys: Mapping[str, Any]) -> CallSettings | None:
        """Validate one call's keys.

        Raises:
            SettingError, Unavailable: both are ``ValueError``; SGLang answers 400.
        """
        if keys and self.readiness.state != "ready":
            field, got = next(iter(keys.items()))
            raise Unavailable(field, got, self.readiness)
        return resolve_call(keys, self.config)


def open_gate(result: None, manager: Any, init_result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Engine._set_startup_time``: the schedulers reported; refuse to start if need be."""
    config = config_of(manager.server_args)
    reasons = list(seams.problems())
    for info in init_result.scheduler_infos:
        answer = info.get("skipkv")
        missing = ["the scheduler did not report its state (data-parallel or another SGLang)"]
        reasons += missing if answer is None else answer["reasons"]
    readiness = Readiness(tuple(dict.fromkeys(reasons)), config.asked)
    wrong = readiness.message() if readiness.state == "refused" else _wrong_preferred(manager)
    if wrong is not None:
        _kept.append(manager)
        raise SystemExit(wrong)
    manager.skipkv = Gate(config, readiness)
    if (server := sys.modules.get("sglang.srt.entrypoints.http_server")) is not None:
        from sgl_skipkv.patches.routes import bind_routes

        bind_routes(server.app)


def _wrong_preferred(manager: Any) -> str | None:
    """Keys in ``--preferred-sampling-params``: SGLang merges those in behind our back."""
    try:
        _, keys = collect_keys(_preferred(manager))
        for name in keys:
            expected = f"no {name}, which is a default of the server by settings of its own"
            choices = "--kv-budget, --kv-policy, --steering or --skipkv-config"
            raise SettingError("preferred_sampling_params", expected, name, choices)
    except SettingError as error:
        return f"sgl_skipkv: {error}"
    return None


def _preferred(manager: Any) -> Mapping[str, Any]:
    return manager.preferred_sampling_params or {}


def gate_of(manager: Any) -> Gate:
    """The gate of a tokenizer manager; one that never saw its schedulers refuses every key."""
    unknown = Readiness(("this process has not heard from the scheduler",), asked=False)
    gate: Gate = getattr(manager, "skipkv", None) or Gate(ServerConfig(), unknown)
    return gate


def collect_keys(sampling_params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our keys of one call, from both places, and its sampling parameters without them.

    Raises:
        SettingError: the two places disagree, there is no second place to carry the keys in, or a
            name in them is meant for us and not ours.
    """
    rest, keys = take_keys(sampling_params)
    refuse_mistaken(rest)
    custom = rest.get("custom_params")
    if isinstance(custom, Mapping):
        rest["custom_params"], nested = take_keys(custom)
        refuse_mistaken(rest["custom_params"])
        for name, value in nested.items():
            if name in keys and _differ(keys[name], value):
                expected = f"one value, but custom_params has {brief(value)}"
                raise SettingError(name, expected, keys[name], "either")
        keys = {**nested, **keys}
    elif keys and custom is not None:
        raise SettingError("custom_params", "an object", custom, "leave it out, or an object")
    return rest, keys


def _differ(one: object, other: object) -> bool:
    """Whether two values of a key are not the same."""
    try:
        return bool(one != other)
    except RecursionError:  # nested too deep to compare, and no value of any key
        return True


def checked_keys(manager: Any, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of one call, for a way in that answers before the tokenizer sees the call.

    Raises:
        SettingError, Unavailable: a key is wrong, whatever the prompt.
    """
    _, keys = collect_keys(sampling_params)
    if keys:
        gate_of(manager).check(keys)
    return keys


def move_keys(
    manager: Any, obj: Any, input_text: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``TokenizerManager._create_tokenized_object``: validate the keys, carry them on."""
    sampling_params = getattr(obj, "sampling_params", None)
    if not isinstance(sampling_params, Mapping):
        return
    rest, keys = collect_keys(sampling_params)
    gate = gate_of(manager)
    if rest.keys() != sampling_params.keys():  # a key of None is not set, but SGLang rejects it
        obj.sampling_params = rest
    if not keys and not gate.config.defaults_apply:
        return
    settings = gate.check(keys)
    if settings is not None:
        settings.check_prompt(len(input_ids or ()))
    if keys:
        # As SGLang merges them: what the call says about custom_params, else what is preferred.
        others = rest.get("custom_params", _preferred(manager).get("custom_params"))
        custom_params = {**(others or {}), **keys}
        obj.sampling_params = {**rest, "custom_params": custom_params}
