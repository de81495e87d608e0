"""Our keys in objects of a body that no API reads, such as ``extra_body`` as a JavaScript client
sends it. The request would silently run without its budget.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from sgl_skipkv.config import brief
from sgl_skipkv.request.settings import misspelt_keys, take_keys

_MOST_NAMES: Final = 256
# Of our own documentation, so they may be in the object that should not be there.
_NESTED: Final = ("metadata", "custom_params")


@dataclass(frozen=True)
class Misplaced:
    """The value of such a key.

    It travels among the sampling parameters under its path, so that it is refused where the keys of
    every API are checked.
    """

    value: object


def misplaced_keys(body: Mapping[str, Any], read: Container[str]) -> dict[str, Misplaced]:
    """Our keys by their paths, misspelt ones included, in objects that are not among the fields
    which the API reads. Of more names than any client sends the first are looked at."""
    objects = ((name, value) for name, value in body.items() if isinstance(value, Mapping))
    names = (
        (f"{path}.{brief(name)[1:-1]}", name, holder[name])
        for place, outer in objects
        if place not in read
        for path, holder in _with_nested(brief(place)[1:-1], outer)
        for name in holder
    )
    return {
        path: Misplaced(value)
        for path, name, value in islice(names, _MOST_NAMES)
        if take_keys({name: value})[1] or misspelt_keys([name])
    }


def _with_nested(path: str, outer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, outer
    for name in _NESTED:
        if isinstance(inner := outer.get(name), Mapping):
            yield f"{path}.{name}", inner
