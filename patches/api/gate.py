"""Reads and validates a request's keys, and validates its token ids, for every API.

The keys may be in ``sampling_params``, in its ``custom_params``, or in the ``metadata`` of the
OpenAI API. They are passed on as ``custom_params``, the only field that SGLang's own types let
through.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

import numpy as np

from sgl_skipkv.config import ServerConfig, SettingError, brief
from sgl_skipkv.metrics import Refusals
from sgl_skipkv.patches.api.metadata import METADATA, Keys, MetadataKeys
from sgl_skipkv.patches.api.misplaced import Misplaced
from sgl_skipkv.patches.limits import NO_LIMITS, ServerLimits
from sgl_skipkv.patches.readiness import Readiness, Unavailable
from sgl_skipkv.patches.request_kind import RequestKind
from sgl_skipkv.request.settings import (
    KEYS,
    RequestSettings,
    refuse_misspelt,
    resolve_request,
    take_keys,
)

_UNCOUNTED: Final = Refusals()


@dataclass(frozen=True)
class Gate:
    """Where requests arrive: the operator's settings and the state that the schedulers reported.

    Attributes:
        refusals: counts what is refused here.
    """

    config: ServerConfig
    readiness: Readiness
    limits: ServerLimits = NO_LIMITS
    refusals: Refusals = _UNCOUNTED

    def check(
        self, keys: Keys, prompt_tokens: int = 0, kind: RequestKind | None = None
    ) -> RequestSettings | None:
        """Validate one request's keys, with its prompt as far as its length is known.

        Args:
            kind: of a request that cannot have all of them.

        Raises:
            SettingError, Unavailable: both are ``ValueError``; SGLang answers 400.
        """
        if keys and self.readiness.state != "ready":
            field, got = next(iter(keys.items()))
            raise Unavailable(keys.written(field), got, self.readiness)
        try:
            settings = resolve_request(keys, self.config, self.limits.model_window_tokens)
            if settings is not None:
                self.limits.check(settings)
                settings.check_prompt(prompt_tokens)
            if kind is not None:
                kind.refuse_beside(settings)
        except SettingError as error:
            field = keys.written(error.field)
            raise SettingError(field, error.expected, error.got, error.choices) from None
        return settings


def gate_of(manager: Any) -> Gate:
    """The gate of a tokenizer manager; before the schedulers' report it refuses every key."""
    # A version of SGLang that lacks a hook never reports.
    reason = "the schedulers have not reported their state; skipkv doctor says what is supported"
    unknown = Readiness((reason,), enabled=False)
    gate: Gate = getattr(manager, "skipkv", None) or Gate(ServerConfig(), unknown)
    return gate


@contextmanager
def counting_refusals(manager: Any) -> Iterator[None]:
    """Count a refusal that is raised inside: where it is raised once for a request."""
    try:
        yield
    except (SettingError, Unavailable) as refusal:
        gate_of(manager).refusals.refused_for(refusal)
        raise


def collect_keys(sampling_params: Mapping[str, Any]) -> tuple[dict[str, Any], Keys]:
    """A request's sampling parameters without our keys, and the keys.

    Raises:
        SettingError: two places have different values for a key, ``custom_params`` is no object, or
            a key is misspelt or misplaced.
    """
    for path, key in sampling_params.items():
        if isinstance(key, Misplaced):
            choices = f"{', '.join(KEYS)} at the top of the body"
            raise SettingError(path, "nothing", key.value, choices)
    rest, keys = take_keys(sampling_params)
    metadata = MetadataKeys()
    if isinstance(rest.get(METADATA), MetadataKeys):  # any other is unknown: SGLang refuses it
        metadata = rest.pop(METADATA)
    refuse_misspelt(rest)
    custom = rest.get("custom_params")
    if isinstance(custom, Mapping):
        rest["custom_params"], nested = take_keys(custom)
        refuse_misspelt(rest["custom_params"])
        keys = _merged(keys, nested, "custom_params")
    elif (keys or metadata) and custom is not None:
        raise SettingError("custom_params", "an object", custom, "leave it out, or an object")
    of_metadata = metadata.values_by_name()
    return rest, Keys(_merged(keys, of_metadata, METADATA), of_metadata.keys() - keys.keys())


def _merged(keys: dict[str, Any], others: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The keys of two places; ``place`` is that of the others."""
    for name, value in others.items():
        if name in keys and _differ(keys[name], value):
            expected = f"one value, but {place}.{name} is {brief(value)}"
            raise SettingError(name, expected, keys[name], "either")
    return {**others, **keys}


def _differ(value: object, other: object) -> bool:
    try:
        return bool(value != other)
    except RecursionError:  # nested too deep to compare, so not a valid value of any key
        return True


def checked_keys(manager: Any, sampling_params: Mapping[str, Any]) -> Keys:
    """Our keys of one request, validated for an API that answers before the tokenizer manager.

    Raises:
        SettingError, Unavailable: a key is wrong, independently of the prompt.
    """
    _, keys = collect_keys(sampling_params)
    if keys:
        gate_of(manager).check(keys)
    return keys


def check_ids(
    manager: Any,
    keys: Mapping[str, Any],
    params: Mapping[str, Any],
    input_ids: Sequence[Any] | None,
) -> None:
    """Refuse token ids outside the vocabulary, with which SGLang's scheduler ends, for all clients.

    Checked is every request where eviction was enabled at start, and elsewhere what brings one of
    our keys: on other requests of such a server the plugin changes nothing.

    Args:
        keys: ours.
        params: the sampling parameters without them.

    Raises:
        SettingError: an id is no integer or outside the vocabulary.
    """
    if not (keys or gate_of(manager).config.enabled):
        return
    params = {**(manager.preferred_sampling_params or {}), **params}
    # Only with min_new_tokens does SGLang index a tensor by them.
    stop_ids = params.get("stop_token_ids") if params.get("min_new_tokens") else None
    vocab_size = manager.model_config.vocab_size
    for field, ids in (("input_ids", input_ids), ("stop_token_ids", stop_ids)):
        if ids is None or _all_below(vocab_size, ids):
            continue
        for one in ids:
            if not (isinstance(one, Integral) and 0 <= int(one) < vocab_size):
                expected = f"token ids in [0, {vocab_size})"
                raise SettingError(field, expected, one, "integers of the model's vocabulary")


def _all_below(vocab_size: int, ids: Sequence[Any]) -> bool:
    """Whether all are token ids. A prompt of 100,000 would hold up all clients for 14 ms if its ids
    were looked at one by one."""
    try:
        numbers = np.frombuffer(array("q", [*ids]), dtype=np.int64)
    except (TypeError, OverflowError):
        return False
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < vocab_size)
