"""``POST /generate``: SGLang validates the body against a schema without our keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import check_ids, collect_keys, counting_refusals, gate_of
from sgl_skipkv.patches.api.metadata import Keys
from sgl_skipkv.patches.api.misplaced import misplaced_keys
from sgl_skipkv.patches.request_kind import request_kind
from sgl_skipkv.request.settings import misspelt_keys, take_keys

#: whose places among the ids may be marked with any number
_MEDIA = ("image_data", "video_data", "audio_data")
_PLACES = "sampling_params, or custom_params in it"


def allow_keys(original: Callable[[Any], str | None], body: Any) -> str | None:
    """AROUND ``generate_contract_error``: check the body without our keys, then our keys.

    A stream answers 200 before the tokenizer manager sees the request, so keys and token ids are
    checked here, where a wrong one can still get 400. A text prompt is not tokenized yet, so its
    length is unknown.
    """
    if not isinstance(body, Mapping):
        return original(body)
    try:
        with counting_refusals(_manager()):
            return _checked(original, body)
    except ValueError as wrong:
        return str(wrong)


def _checked(original: Callable[[Any], str | None], body: Mapping[str, Any]) -> str | None:
    expected = "in sampling_params, not at the top of the body"
    for name in (*take_keys(body)[1], *misspelt_keys(body)):
        # SGLang ignores unknown names at the top, where the OpenAI API has our keys.
        raise SettingError(name, expected, body[name], _PLACES)
    for path, key in misplaced_keys(body, GenerateReqInput.__dataclass_fields__).items():
        raise SettingError(path, "nothing", key.value, _PLACES)
    params = body.get("sampling_params")
    entries = params if isinstance(params, list) else [params]
    none = Keys({})
    split = [collect_keys(one) if isinstance(one, Mapping) else (one, none) for one in entries]
    rest = [without_keys for without_keys, _ in split]
    stripped = {**body, "sampling_params": rest if isinstance(params, list) else rest[0]}
    error = original(stripped if "sampling_params" in body else body)
    if error is None and body.get("stream"):
        manager, prompts = _manager(), _prompts(body.get("input_ids"))
        for i, (without_keys, keys) in enumerate(split):
            own = prompts[i : i + 1] if isinstance(params, list) else prompts
            if not any(map(body.get, _MEDIA)):
                check_ids(manager, keys, without_keys or {}, [*itertools.chain(*own)])
            kind = request_kind(body.get("session_params"), (without_keys or {}).get("beam_width"))
            if keys or kind is None:  # one of another kind runs in full without keys
                gate_of(manager).check(keys, max(map(len, own), default=0), kind)
    return error


def _manager() -> Any:
    """The server's tokenizer manager."""
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager


def _prompts(input_ids: Any) -> list[list[int]]:
    """Each prompt of token ids; empty for any other input. SGLang has validated their types."""
    if not input_ids:
        return []
    return input_ids if isinstance(input_ids[0], list) else [input_ids]
