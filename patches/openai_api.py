"""The OpenAI API: our keys at the top level of a request, where ``extra_body`` puts them.

SGLang's request classes drop unknown fields without a word. The subclasses declare ours, untyped,
so that ``sgl_skipkv`` and not pydantic says what is wrong with a value.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai import protocol

from sgl_skipkv.call import take_keys


class ChatCompletionRequest(protocol.ChatCompletionRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``ChatCompletionRequest``: SGLang's, with our four fields."""

    kv_budget: Any = None
    kv_policy: Any = None
    kv_params: Any = None
    steering: Any = None

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().to_sampling_params(*args, **kwargs), **_keys(self)}


class CompletionRequest(protocol.CompletionRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``CompletionRequest``: SGLang's, with our four fields."""

    kv_budget: Any = None
    kv_policy: Any = None
    kv_params: Any = None
    steering: Any = None


def add_completion_keys(
    sampling_params: dict[str, Any], serving: Any, request: Any
) -> dict[str, Any] | None:
    """AFTER ``OpenAIServingCompletion._build_sampling_params``."""
    return {**sampling_params, **_keys(request)}


def _keys(request: Any) -> dict[str, Any]:
    return take_keys(vars(request))[1]
