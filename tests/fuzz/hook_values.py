"""Values that nobody should put into a request, drawn fast: a million of them in minutes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from hostile_bodies import PARAMETERS

from sgl_skipkv import policy
from sgl_skipkv.request.settings import KEYS


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


_DEEP = (nested(30), nested(500), nested(5000), {"a": nested(2000)})
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 12, 13, 64, 2**31 - 1, 2**31, 2**63, 2**64, 10**40, 10**5000),
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 0.5, 64.0, 1e308, 5e-324, 1j),
    *("", "64", "skipkv", "x" * 100_000, "\ud800", "\0\n", b"64", bytearray(b"\xff"), range(9)),
    *((), [], {}, set(), {1, 2}, frozenset(), [[1]], {"n": 1}, {1: 2}, {None: None}, {(): ()}),
    *(object(), Ellipsis, NotImplemented, int, len),
)


class Draw:
    """One seed's draws."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, likely: float) -> bool:
        return self.random.random() < likely

    def one(self, *values: Any) -> Any:
        return self.random.choice(values)

    def count(self, most: int) -> int:
        """Small, or anything up to a bound."""
        return self.random.randrange(self.one(4, 20, most))

    def odd(self) -> Any:
        """Anything but what is asked for."""
        pick = self.random.random()
        if pick < 0.1:
            return self.random.choice(_DEEP)
        if pick < 0.2:
            return [self.odd() for _ in range(self.random.randrange(4))]
        if pick < 0.25:
            return {str(i): self.odd() for i in range(self.random.randrange(4))}
        return self.random.choice(_ODD)

    def keys(self) -> dict[Any, Any]:
        """Our keys and foreign ones, right and wrong."""
        right: dict[str, Callable[[], Any]] = {
            "kv_budget": lambda: self.random.randrange(4, 40),
            "kv_policy": lambda: self.random.choice(policy.names()),
            "kv_params": self._parameters,
            "kv_reuse": lambda: self.one(False, "keep", "budget", "all"),
            "steering": lambda: self.one(False, 0.5, -3, 11),
        }
        wrong = self.one(0.0, 0.0, 0.0, 0.3, 1.0)
        drawn = {
            name: self.odd() if self.chance(wrong) else right[name]()
            for name in KEYS
            if self.chance({"steering": 0.2, "kv_reuse": 0.4, "kv_policy": 0.6}.get(name, 0.9))
        }
        if self.chance(0.1):
            drawn[self.one("kv_bugdet", "skipkv", "", 5, None, "thinking_budget")] = self.odd()
        return drawn

    def custom_params(self) -> Any:
        """What a request may carry: mostly an object, sometimes none at all."""
        return self.keys() if self.chance(0.9) else self.odd()

    def _parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {"interval": 8, "window": 2, "sink": 1}
        for _ in range(self.one(0, 0, 0, 1, 2)):
            plain = self.one(0, 1, 2, 8, 9, 0.5, True, False, "math")
            parameters[self.random.choice(PARAMETERS)] = plain if self.chance(0.7) else self.odd()
        return parameters
