"""Our keys at the top level of a request, for APIs that SGLang declares as pydantic classes.

Those drop unknown fields without a word. ``OurFields`` declares ours, untyped, so that
``sgl_skipkv`` and not pydantic says what is wrong with a value, and hands on what is meant for us
and not ours, so that it is refused where every way in is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from sgl_skipkv.request.settings import misspelt_keys, take_keys


class OurFields(BaseModel):
    """The four fields."""

    kv_budget: Any = None
    kv_policy: Any = None
    kv_params: Any = None
    steering: Any = None
    _misspelt: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _note_misspelt(cls, body: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        request = build(body)
        if isinstance(body, Mapping):
            request._misspelt = {name: body[name] for name in misspelt_keys(body)}
        return request

    def our_keys(self) -> dict[str, Any]:
        """As SGLang's sampling parameters."""
        return {**take_keys(vars(self))[1], **self._misspelt}

    def take_from(self, other: OurFields) -> None:
        """The keys of the request that this one is made from."""
        for name in OurFields.model_fields:
            setattr(self, name, getattr(other, name))
        self._misspelt = other._misspelt
