"""The OpenAI API: our keys at the top level of a request, where ``extra_body`` puts them.

SGLang's request classes drop unknown fields without a word. The subclasses declare ours, untyped,
so that ``sgl_skipkv`` and not pydantic says what is wrong with a value, and hand on what is meant
for us and not ours, so that it is refused where every way in is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai import protocol

from sgl_skipkv.call import mistaken_keys, take_keys


class OurFields(BaseModel):
    """The four fields."""

    kv_budget: Any = None
    kv_policy: Any = None
    kv_params: Any = None
    steering: Any = None
    _mistaken: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _note_mistaken(cls, body: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        request = build(body)
        if isinstance(body, Mapping):
            request._mistaken = {name: body[name] for name in mistaken_keys(body)}
        return request

    def our_keys(self) -> dict[str, Any]:
        """As SGLang's sampling parameters."""
        return {**take_keys(vars(self))[1], **self._mistaken}


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


_OURS = {
    ours.__mro__[2]: ours for ours in (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
}


def bind_routes(app: Any) -> None:
    """Routes that were made before plugins were loaded (``sgl.Runtime``) take our classes too.

    FastAPI reads a body's class from the endpoint when a route is made, so they are made again.
    """
    for route in list(app.router.routes):
        endpoint = getattr(route, "endpoint", None)
        annotations = getattr(endpoint, "__annotations__", {})
        bodies = {name: of for name, of in annotations.items() if isinstance(of, type)}
        ours = {name: _OURS[of] for name, of in bodies.items() if of in _OURS}
        if ours:
            annotations.update(ours)
            app.router.routes.remove(route)
            app.add_api_route(
                route.path,
                endpoint,
                methods=[*route.methods],
                name=route.name,
                dependencies=route.dependencies,
            )


def add_completion_keys(
    sampling_params: dict[str, Any], serving: Any, request: Any
) -> dict[str, Any] | None:
    """AFTER ``OpenAIServingCompletion._build_sampling_params``."""
    return {**sampling_params, **request.our_keys()}
