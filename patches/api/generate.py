"""``POST /generate``: SGLang checks the body against a schema that does not know our keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import collect_keys, gate_of
from sgl_skipkv.request.settings import misspelt_keys, take_keys


def allow_keys(original: Callable[[Any], str | None], body: Any) -> str | None:
    """AROUND ``generate_contract_error``: check the body without our keys, then our keys.

    A streamed answer is 200 before the tokenizer sees the request, so wrong keys are refused here,
    where a refusal still is a 400. A prompt of text has no length yet.
    """
    if not isinstance(body, Mapping):
        return original(body)
    for name in (*take_keys(body)[1], *misspelt_keys(body)):
        # SGLang lets unknown names at the top pass, and OpenAI's bodies have ours there.
        expected = "in sampling_params, not at the top of the body"
        return str(SettingError(name, expected, body[name], "sampling_params or custom_params"))
    params = body.get("sampling_params")
    calls = params if isinstance(params, list) else [params]
    try:
        taken = [collect_keys(call) if isinstance(call, Mapping) else (call, {}) for call in calls]
        rest = [call for call, _ in taken]
        stripped = {**body, "sampling_params": rest if isinstance(params, list) else rest[0]}
        error = original(stripped if "sampling_params" in body else body)
        if error is None and body.get("stream"):
            from sglang.srt.entrypoints import http_server

            gate = gate_of(http_server._global_state.tokenizer_manager)
            lengths = _prompt_tokens(body.get("input_ids"))
            for i, (_, keys) in enumerate(taken):
                settings = gate.check(keys)
                if settings is not None:
                    own = lengths[i : i + 1] if isinstance(params, list) else lengths
                    settings.check_prompt(max(own, default=0))
    except ValueError as wrong:
        return str(wrong)
    return error


def _prompt_tokens(input_ids: Any) -> list[int]:
    """Of each prompt of a body with token ids; nothing of anything else, which SGLang judges."""
    if not isinstance(input_ids, list) or not input_ids:
        return []
    prompts = input_ids if isinstance(input_ids[0], list) else [input_ids]
    return [len(prompt) if isinstance(prompt, list) else 0 for prompt in prompts]
