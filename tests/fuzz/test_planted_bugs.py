"""Whether every bug can be planted at all; ``make test-slow`` looks whether it is found."""

from __future__ import annotations

import inspect

import pytest
from bug_lives import IN_HOST, IN_PAGES, RARE, SOONEST
from planted_bugs import bugs, plant


def test_every_bug_can_be_planted() -> None:
    for name, function, piece, instead in bugs():
        with pytest.MonkeyPatch.context() as patch:
            sound = inspect.unwrap(function).__code__
            plant(patch, function, piece, instead)
            assert inspect.unwrap(function).__code__ is not sound, name


def test_every_named_bug_exists() -> None:
    names = [name for name, *_ in bugs()]
    assert len(names) == len(set(names)) and {*SOONEST, *RARE, *IN_PAGES, *IN_HOST} <= {*names}
