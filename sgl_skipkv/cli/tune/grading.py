"""Whether an answer is right."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"Answer: (-?\d+)")


def is_right(text: str, answer: str | int) -> bool:
    """Whether the final part of a finished output states the answer.

    A bundled problem's answer stands behind ``Answer:``; any other is compared as mathematics, so
    that ``\\frac12`` equals ``0.5``. What a model wrote while thinking does not count. For the main
    thread only: the library's time limit is a signal.
    """
    import math_verify  # of the extra [bench]

    final = text.rpartition("</think>")[2]
    if isinstance(answer, int) and (number := _NUMBER.search(final)):
        return int(number[1]) == answer
    gold = math_verify.parse(f"${answer}$")
    return bool(gold) and bool(math_verify.verify(gold, math_verify.parse(final)))
