"""Loads a model's tokenizer for a command."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.config import SettingError


def load_tokenizer(field: str, model: str) -> Any:
    """The tokenizer that Transformers loads from a folder or by name.

    Args:
        field: the command-line option, for the message.

    Raises:
        SettingError: Transformers loads none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        expected = "a folder or name of a model with a tokenizer"
        got = f"{model} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        raise SettingError(field, expected, got, "the folder that SGLang serves") from error
