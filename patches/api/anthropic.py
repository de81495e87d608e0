"""The Anthropic API, ``/v1/messages``: our keys at the top level, where ``extra_body`` puts them.

SGLang turns messages into chat completions, so the keys only have to reach the chat completion.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints.anthropic import protocol

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import checked_keys, counting_refusals
from sgl_skipkv.patches.api.openai import OurFields
from sgl_skipkv.patches.readiness import Unavailable


class AnthropicMessagesRequest(OurFields, protocol.AnthropicMessagesRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``AnthropicMessagesRequest``: SGLang's, with our fields."""


async def check_keys(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND ``AnthropicServing.handle_messages``.

    A stream answers 200 before the tokenizer manager sees the request, so keys are checked here,
    where a wrong one can still get 400.
    """
    manager = serving.openai_serving_chat.tokenizer_manager
    try:
        with counting_refusals(manager):
            checked_keys(manager, request.our_keys())
    except (SettingError, Unavailable) as wrong:
        raise HTTPException(400, str(wrong)) from wrong
    return await original(serving, request, raw_request)


def carry_keys(chat_request: Any, serving: Any, request: Any) -> None:
    """AFTER ``AnthropicServing._convert_to_chat_completion_request``."""
    for name in (*OurFields.model_fields, "_wrong", "_in_metadata"):
        setattr(chat_request, name, getattr(request, name))
