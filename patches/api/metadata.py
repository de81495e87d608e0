"""``metadata`` of the OpenAI API: the one field of a chat completion or a response that a router
passes on unread, so our keys may be in it.

Its values are text there: a number or an object is written as JSON, a policy by its bare name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from sgl_skipkv.config import SettingError
from sgl_skipkv.request.settings import misspelt_keys, refuse_misspelt, take_keys

METADATA: Final = "metadata"


class MetadataKeys(dict[str, Any]):
    """Our keys as ``metadata`` has them, misspelt ones included.

    They travel among the sampling parameters under ``METADATA``. The class tells them from a
    parameter of that name in a body, which SGLang refuses.
    """

    @classmethod
    def of(cls, metadata: object) -> Self:
        if not isinstance(metadata, Mapping):
            return cls()
        misspelt = misspelt_keys(metadata)
        return cls({**take_keys(metadata)[1], **{name: metadata[name] for name in misspelt}})

    def values_by_name(self) -> dict[str, Any]:
        """The keys that are set, their text decoded.

        Raises:
            SettingError: a key is misspelt.
        """
        try:
            refuse_misspelt(self)
        except SettingError as error:
            field = f"{METADATA}.{error.field}"
            raise SettingError(field, error.expected, error.got, error.choices) from None
        return take_keys({name: _decoded(value) for name, value in self.items()})[1]


def _decoded(value: object) -> object:
    """JSON text's value; any other text is itself, and right or wrong as a key's value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # no JSON, too many digits, or nested too deep
        return value


class Keys(dict[str, Any]):
    """The keys of one request by name, and which of them only ``metadata`` has."""

    def __init__(self, keys: Mapping[str, Any], in_metadata: Iterable[str] = ()) -> None:
        super().__init__(keys)
        self._in_metadata = frozenset(in_metadata)

    def written(self, field: str) -> str:
        """The field as the client wrote it: ``metadata.kv_params.tau``."""
        return f"{METADATA}.{field}" if field.partition(".")[0] in self._in_metadata else field
