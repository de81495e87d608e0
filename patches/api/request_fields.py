"""Our keys at the top level of a request, for APIs that SGLang declares as pydantic classes.

Those classes drop unknown fields silently. ``OurFields`` declares ours untyped, so that
``sgl_skipkv`` writes the error message for a wrong value instead of pydantic. It also passes on
misspelt keys, so that they are refused where the keys of every API are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from sgl_skipkv.request.settings import misspelt_keys, take_keys


class OurFields(BaseModel):
    """The four keys of the plugin."""

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
        """The keys that are set, and misspelt ones, as sampling parameters."""
        return {**take_keys(vars(self))[1], **self._misspelt}

    def copy_keys(self, other: OurFields) -> None:
        """Take over the keys of the request that this one is converted from."""
        for name in OurFields.model_fields:
            setattr(self, name, getattr(other, name))
        self._misspelt = other._misspelt
