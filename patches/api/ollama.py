"""The Ollama API, ``/api/chat`` and ``/api/generate``: our keys among the ``options``.

When the tokenizer manager refuses a request there, SGLang answers 500 without a reason, or, when
streaming, 200 and a stream that breaks off. So wrong keys are refused before that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import (
    checked_keys,
    collect_keys,
    counting_refusals,
    gate_of,
)
from sgl_skipkv.patches.api.misplaced import misplaced_keys
from sgl_skipkv.patches.readiness import Unavailable
from sgl_skipkv.request.settings import misspelt_keys, take_keys


async def check_keys(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND ``OllamaServing.handle_chat`` and ``handle_generate``."""
    body = await raw_request.json()  # SGLang has read it; ``request`` lacks unknown names
    try:
        with counting_refusals(serving.tokenizer_manager):
            outside = {name: body[name] for name in (*take_keys(body)[1], *misspelt_keys(body))}
            misplaced = misplaced_keys(body, type(request).model_fields)
            outside |= {path: key.value for path, key in misplaced.items()}
            if outside:
                path, value = next(iter(outside.items()))
                raise SettingError(path, "nothing outside of options", value, "options")
            keys = checked_keys(serving.tokenizer_manager, request.options or {})
        answer = await original(serving, request, raw_request)
        budgeted = keys or gate_of(serving.tokenizer_manager).config.defaults_apply
        if budgeted and isinstance(answer, StreamingResponse):
            # With the first part it is known whether the budget fits the prompt.
            parts = aiter(answer.body_iterator)
            answer.body_iterator = _chained(await anext(parts), parts)
        return answer
    except (SettingError, Unavailable) as wrong:
        raise HTTPException(400, str(wrong)) from wrong


async def _chained(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for part in rest:
        yield part


def add_option_keys(
    sampling_params: dict[str, Any], serving: Any, options: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """AFTER ``OllamaServing._convert_options_to_sampling_params``."""
    return {**sampling_params, **collect_keys(options or {})[1]}
