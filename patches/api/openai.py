"""The OpenAI API: our keys at the top level of a request, where ``extra_body`` puts them, or in its
``metadata``, which routers pass on.

SGLang's request classes drop unknown fields silently. ``OurFields`` declares ours untyped, so that
``sgl_skipkv`` writes the error message for a wrong value instead of pydantic. It also passes on
misspelt keys, so that they are refused where the keys of every API are checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai import protocol

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import checked_keys, counting_refusals
from sgl_skipkv.patches.api.metadata import METADATA, MetadataKeys
from sgl_skipkv.patches.readiness import Unavailable
from sgl_skipkv.request.settings import misspelt_keys, take_keys


class OurFields(BaseModel):
    """The keys of the plugin.

    Attributes:
        dropped_objects: fields that SGLang drops. ``extra_body`` is of OpenAI's client, which puts
            what is in it at the top.
    """

    dropped_objects: ClassVar[tuple[str, ...]] = ("extra_body", "sampling_params")
    kv_budget: Any = None
    kv_policy: Any = None
    kv_params: Any = None
    kv_reuse: Any = None
    steering: Any = None
    _misspelt: dict[str, Any] = PrivateAttr(default_factory=dict)
    _in_metadata: MetadataKeys = PrivateAttr(default_factory=MetadataKeys)

    @model_validator(mode="wrap")
    @classmethod
    def _note_misspelt(cls, body: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        request = build(body)
        if isinstance(body, Mapping):
            _refuse_misplaced(body, cls.dropped_objects)
            request._misspelt = {name: body[name] for name in misspelt_keys(body)}
            request._in_metadata = MetadataKeys.of(body.get(METADATA))
        return request

    def our_keys(self) -> dict[str, Any]:
        """The keys that are set, and misspelt ones, as sampling parameters."""
        keys = {**take_keys(vars(self))[1], **self._misspelt}
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

    dropped_objects = (*OurFields.dropped_objects, "custom_params")


def _refuse_misplaced(body: Mapping[str, Any], dropped_objects: Sequence[str]) -> None:
    """A key there would be dropped silently."""
    for place in dropped_objects:
        inner = body.get(place)
        keys = take_keys(inner)[1] if isinstance(inner, Mapping) else {}
        for name, value in keys.items():
            choices = f"{name} at the top of the body"
            raise SettingError(f"{place}.{name}", "nothing", value, choices)


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
