"""The tokenizer manager validates each request's keys and passes them on as ``custom_params``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_skipkv.patches.api.gate import collect_keys, gate_of


def move_keys(
    manager: Any, obj: Any, input_text: Any, input_ids: Any, *args: Any, **kwargs: Any
) -> None:
    """BEFORE ``TokenizerManager._create_tokenized_object``: validate the keys, pass them on."""
    sampling_params = getattr(obj, "sampling_params", None)
    if not isinstance(sampling_params, Mapping):
        return
    rest, keys = collect_keys(sampling_params)
    gate = gate_of(manager)
    if rest.keys() != sampling_params.keys():  # also drops keys that are None: SGLang rejects them
        obj.sampling_params = rest
    if not keys and not gate.config.defaults_apply:
        return
    settings = gate.check(keys)
    if settings is not None:
        settings.check_prompt(len(input_ids or ()))
    if keys:
        # As SGLang merges them: the request's custom_params replace the preferred ones.
        preferred = manager.preferred_sampling_params or {}
        others = rest.get("custom_params", preferred.get("custom_params"))
        custom_params = {**(others or {}), **keys}
        obj.sampling_params = {**rest, "custom_params": custom_params}
