"""A wrong setting is refused in four parts: field, what was expected, what came, the choices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sgl_skipkv.config import SettingError, brief


@contextmanager
def assert_refused(field: str, word: str = "") -> Iterator[None]:
    """What runs inside is refused, in one short line that has this word."""
    with pytest.raises(SettingError) as caught:
        yield
    error, text = caught.value, str(caught.value)
    parts = f"expected {error.expected}, got {brief(error.got)}; choices: {error.choices}"
    assert error.field == field and text == f"{field}: {parts}", text
    assert error.expected.strip() and error.choices.strip()
    assert word in text and "\n" not in text and "x" * 81 not in text and len(text) < 600, text
