"""What every entry point asks before a request is admitted: its keys, read and refused in one
place.

``kv_budget`` and its companions may stand in ``sampling_params`` or in its ``custom_params``;
either way they leave as ``custom_params``, the only carrier that SGLang's own types let through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_skipkv.config import ServerConfig, SettingError, brief
from sgl_skipkv.patches.readiness import Readiness, Unavailable
from sgl_skipkv.request.settings import RequestSettings, refuse_misspelt, resolve_request, take_keys


@dataclass(frozen=True)
class Gate:
    """What the main process knows: the operator's settings and the schedulers' answer."""

    config: ServerConfig
    readiness: Readiness

    def check(self, keys: Mapping[str, Any]) -> RequestSettings | None:
        """Validate one request's keys.

        Raises:
            SettingError, Unavailable: both are ``ValueError``; SGLang answers 400.
        """
        if keys and self.readiness.state != "ready":
            field, got = next(iter(keys.items()))
            raise Unavailable(field, got, self.readiness)
        return resolve_request(keys, self.config)


def gate_of(manager: Any) -> Gate:
    """The gate of a tokenizer manager; one that never saw its schedulers refuses every key."""
    unknown = Readiness(("this process has not heard from the scheduler",), enabled=False)
    gate: Gate = getattr(manager, "skipkv", None) or Gate(ServerConfig(), unknown)
    return gate


def collect_keys(sampling_params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our keys of one request, from both places, and its sampling parameters without them.

    Raises:
        SettingError: the two places disagree, there is no second place to carry the keys in, or a
            name in them is meant for us and not ours.
    """
    rest, keys = take_keys(sampling_params)
    refuse_misspelt(rest)
    custom = rest.get("custom_params")
    if isinstance(custom, Mapping):
        rest["custom_params"], nested = take_keys(custom)
        refuse_misspelt(rest["custom_params"])
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
    """Our keys of one request, for a way in that answers before the tokenizer sees the request.

    Raises:
        SettingError, Unavailable: a key is wrong, whatever the prompt.
    """
    _, keys = collect_keys(sampling_params)
    if keys:
        gate_of(manager).check(keys)
    return keys


def preferred_parameters(manager: Any) -> Mapping[str, Any]:
    return manager.preferred_sampling_params or {}
