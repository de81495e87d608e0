"""``POST /generate``: SGLang validates the body against a schema without our keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import collect_keys, gate_of
from sgl_skipkv.request.settings import misspelt_keys, take_keys


def allow_keys(original: Callable[[Any], str | None], body: Any) -> str | None:
    """AROUND ``generate_contract_error``: check the body without our keys, then our keys.

    A stream answers 200 before the tokenizer manager sees the request, so keys are checked here,
    where a wrong one can still get 400. A text prompt is not tokenized yet, so its length is
    unknown.
    """
    if not isinstance(body, Mapping):
        return original(body)
    for name in (*take_keys(body)[1], *misspelt_keys(body)):
        # SGLang ignores unknown names at the top, where the OpenAI API has our keys.
        expected = "in sampling_params, not at the top of the body"
        return str(SettingError(name, expected, body[name], "sampling_params or custom_params"))
    params = body.get("sampling_params")
    entries = params if isinstance(params, list) else [params]
    try:
        split = [collect_keys(one) if isinstance(one, Mapping) else (one, {}) for one in entries]
        rest = [without_keys for without_keys, _ in split]
        stripped = {**body, "sampling_params": rest if isinstance(params, list) else rest[0]}
        error = original(stripped if "sampling_params" in body else body)
        if error is None and body.get("stream"):
            from sglang.srt.entrypoints import http_server

            gate = gate_of(http_server._global_state.tokenizer_manager)
            lengths = _prompt_tokens(body.get("input_ids"))
            for i, (_, keys) in enumerate(split):
                settings = gate.check(keys)
                if settings is not None:
                    prompts = lengths[i : i + 1] if isinstance(params, list) else lengths
                    settings.check_prompt(max(prompts, default=0))
    except ValueError as wrong:
        return str(wrong)
    return error


def _prompt_tokens(input_ids: Any) -> list[int]:
    """Length of each prompt of token ids; empty for any other input, which SGLang validates."""
    if not isinstance(input_ids, list) or not input_ids:
        return []
    prompts = input_ids if isinstance(input_ids[0], list) else [input_ids]
    return [len(prompt) if isinstance(prompt, list) else 0 for prompt in prompts]
