"""The OpenAI API: our keys at the top level of a request, where ``extra_body`` puts them, or in its
``metadata``, which routers pass on.

SGLang's request classes drop unknown fields silently. ``OurFields`` declares ours untyped, so that
``sgl_skipkv`` writes the error message for a wrong value instead of pydantic, whose message has the
whole conversation. It also passes on misspelt and misplaced keys, so that they are refused where
the keys of every API are checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai import protocol

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import checked_keys, counting_refusals
from sgl_skipkv.patches.api.metadata import METADATA, MetadataKeys
from sgl_skipkv.patches.api.misplaced import misplaced_keys
from sgl_skipkv.patches.readiness import Unavailable
from sgl_skipkv.request.settings import misspelt_keys, take_keys


class OurFields(BaseModel):
    """The keys of the plugin."""

    kv_budget: Any = None
    kv_policy: Any = None
    kv_params: Any = None
    kv_reuse: Any = None
    steering: Any = None
    _wrong: dict[str, Any] = PrivateAttr(default_factory=dict)
    _in_metadata: MetadataKeys = PrivateAttr(default_factory=MetadataKeys)

    @model_validator(mode="wrap")
    @classmethod
    def _note_others(cls, body: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        request = build(body)
        if isinstance(body, Mapping):
            misspelt = {name: body[name] for name in misspelt_keys(body)}
            request._wrong = misspelt or misplaced_keys(body, {*cls.model_fields, METADATA})
            request._in_metadata = MetadataKeys.of(body.get(METADATA))
        return request

    def our_keys(self) -> dict[str, Any]:
        """The keys that are set, and wrong ones, as sampling parameters."""
        keys = {**take_keys(vars(self))[1], **self._wrong}
        return {**keys, METADATA: self._in_metadata} if self._in_metadata else keys

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Of chat completions and responses: SGLang's, with our keys."""
        stock = super().to_sampling_params  # type: ignore[misc]
        return {**stock(*args, **kwargs), **self.our_keys()}


class ChatCompletionRequest(OurFields, protocol.ChatCompletionRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``ChatCompletionRequest``: SGLang's, with our fields."""


class CompletionRequest(OurFields, protocol.CompletionRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``CompletionRequest``: SGLang's, with our fields."""


class ResponsesRequest(OurFields, protocol.ResponsesRequest):  # type: ignore[misc]  # untyped base
    """REPLACE ``ResponsesRequest``: SGLang's, with our fields."""


async def check_response_keys(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """AROUND ``OpenAIServingResponses.create_responses``.

    A stream answers 200 before the tokenizer manager sees the request, so keys are checked here.
    """
    try:
        with counting_refusals(serving.tokenizer_manager):
            checked_keys(serving.tokenizer_manager, request.our_keys())
    except (SettingError, Unavailable) as wrong:
        return serving.create_error_response(str(wrong))
    return await original(serving, request, raw_request)


def add_completion_keys(
    sampling_params: dict[str, Any], serving: Any, request: Any
) -> dict[str, Any] | None:
    """AFTER ``OpenAIServingCompletion._build_sampling_params``."""
    return {**sampling_params, **request.our_keys()}
