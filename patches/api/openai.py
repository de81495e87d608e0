"""The OpenAI API: our keys at the top level of a request, where ``extra_body`` puts them."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai import protocol

from sgl_skipkv.patches.api.request_fields import OurFields


class ChatCompletionRequest(OurFields, protocol.ChatCompletionRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``ChatCompletionRequest``: SGLang's, with our four fields."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().to_sampling_params(*args, **kwargs), **self.our_keys()}


class CompletionRequest(OurFields, protocol.CompletionRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``CompletionRequest``: SGLang's, with our four fields."""


class ResponsesRequest(OurFields, protocol.ResponsesRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``ResponsesRequest``: SGLang's, with our four fields."""

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().to_sampling_params(*args, **kwargs), **self.our_keys()}


def add_completion_keys(
    sampling_params: dict[str, Any], serving: Any, request: Any
) -> dict[str, Any] | None:
    """AFTER ``OpenAIServingCompletion._build_sampling_params``."""
    return {**sampling_params, **request.our_keys()}
