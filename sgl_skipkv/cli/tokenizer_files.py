"""A model's tokenizer, from the folder or name that a command was given."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.config import SettingError


def load_tokenizer(field: str, model: str) -> Any:
    """The tokenizer that Transformers makes of a folder or name.

    Args:
        field: the option that named it.

    Raises:
        SettingError: it makes none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        expected = "a folder or name of a model with a tokenizer"
        got = f"{model} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise SettingError(field, expected, got, "the folder that SGLang serves") from error
