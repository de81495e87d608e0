"""The tokenizer manager validates each request's keys and token ids, whichever API it came by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_skipkv.patches.api.gate import check_ids, collect_keys, counting_refusals, gate_of
from sgl_skipkv.patches.request_kind import request_kind


def move_keys(
    manager: Any,
    obj: Any,
    input_text: Any,
    input_ids: Any,
    input_embeds: Any = None,
    mm_inputs: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """BEFORE ``TokenizerManager._create_tokenized_object``: validate the keys and pass them on as
    ``custom_params``; validate the ids."""
    sampling_params = getattr(obj, "sampling_params", None)
    if not isinstance(sampling_params, Mapping):
        return
    with counting_refusals(manager):
        _move_keys(manager, obj, sampling_params, input_ids, mm_inputs)


def _move_keys(
    manager: Any, obj: Any, sampling_params: Mapping[str, Any], input_ids: Any, mm_inputs: Any
) -> None:
    rest, keys = collect_keys(sampling_params)
    gate = gate_of(manager)
    if mm_inputs is None:  # the place of an image among the ids may be marked with any number
        check_ids(manager, keys, rest, input_ids)
    if rest.keys() != sampling_params.keys():  # also drops keys that are None: SGLang rejects them
        obj.sampling_params = rest
    if not keys and not gate.config.defaults_apply:
        return
    session_params = getattr(obj, "session_params", None)
    kind = request_kind(session_params, rest.get("beam_width"))
    if not keys and kind is not None:
        return  # it runs in full
    gate.check(keys, len(input_ids or ()), kind)  # the scheduler would first change its session
    if keys:
        # As SGLang merges them: the request's custom_params replace the preferred ones.
        preferred = manager.preferred_sampling_params or {}
        others = rest.get("custom_params", preferred.get("custom_params"))
        custom_params = {**(others or {}), **keys}
        obj.sampling_params = {**rest, "custom_params": custom_params}
