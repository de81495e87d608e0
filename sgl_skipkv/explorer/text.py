"""The text of each token, where a character may take several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
#: tokens that one character may take; what is longer is no character
_LONGEST: Final = 8


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; their concatenation is the text.

    The bytes of one character may be in several tokens: the last of them gets it, the others an
    empty text. A token is decoded behind the one before it, because tokenizers of words write the
    space between two of them only then.

    Args:
        tokenizer: of Transformers.
        token_ids: ids that the tokenizer lacks get an empty text.
    """
    vocabulary = len(tokenizer)

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    parts: list[str] = []
    start = 0  # of the tokens whose text is complete but for the newest
    done = ""  # the text of the tokens from start on that is in ``parts``
    for i, token_id in enumerate(token_ids):
        if token_id >= vocabulary:
            parts.append("")
            start, done = i + 1, ""
            continue
        text = decoded(token_ids[start : i + 1])
        if text.endswith(_INCOMPLETE) and i + 1 - start < _LONGEST:
            parts.append("")
            continue
        parts.append(text[len(done) :] if text.startswith(done) else text)
        start, done = i, decoded([token_id])
    return parts
