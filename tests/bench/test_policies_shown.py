"""A policy that is registered is compared, drawn and described, and nobody else has to know it."""

from __future__ import annotations

import pytest
from pydantic import Field

from bench.lib.policies import compared, styles
from bench.report import __main__ as report
from sgl_skipkv import policy
from sgl_skipkv.policy.base import PolicyParams
from sgl_skipkv.policy.streaming import Streaming


class NewestParams(PolicyParams):
    age: int = Field(3, description="how new")


class Newest(Streaming):
    name = "newest"
    keeps = "what is new"
    source = "nobody, 2026"
    Params = NewestParams


def test_a_registered_policy_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = {**policy._POLICIES, "newest": f"{__name__}:Newest"}
    monkeypatch.setattr(policy, "_POLICIES", registry)
    assert compared()[-1] == "newest" and list(styles())[-1] == "newest"
    assert "| `newest` | what is new | nobody, 2026 |" in report.TABLES["policies"]()
    assert "| `age` | 3 | `newest` | how new |" in report.TABLES["parameters"]()


def test_every_policy_has_a_colour_and_a_marker_of_its_own() -> None:
    colours, markers = zip(*styles().values(), strict=True)
    assert len({*colours}) == len({*markers}) == len(compared())


def test_documents_have_the_tables() -> None:
    marked = "".join(document.read_text() for document in report.DOCUMENTS)
    assert {"policies", "parameters"} <= {name for _, name, _ in report.SECTION.findall(marked)}
