"""The site and the notebook, as far as text tells: `make docs` and `make notebook` run them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sgl_skipkv import policy

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
#: pages that .ci/site_pages.py makes of files outside docs/
MADE = {"index.md", "contributing.md", "security.md", "changelog.md"}


def pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        (target,) = entry.values()
        if isinstance(target, str):
            yield target
        else:
            yield from pages_of(target)


def test_every_page_is_in_the_navigation() -> None:
    listed = [*pages_of(SITE["nav"])]
    assert len(listed) == len({*listed})
    assert {*listed} - MADE == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    made = (ROOT / ".ci" / "site_pages.py").read_text()
    assert {*listed} >= MADE and all(f'"{page}"' in made for page in MADE)


def test_every_policy_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "policies.md").read_text()
    modules = re.findall(r"^::: (sgl_skipkv\.policy\.\w+)$", text, re.MULTILINE)
    assert modules == [policy.policy_class(name).__module__ for name in policy.names()]


def test_the_site_asks_no_other_host() -> None:
    assert SITE["theme"]["font"] is False and SITE["strict"] is True
    assert not {"extra_javascript", "extra_css", "repo_url"} & SITE.keys()


def test_the_notebook_has_no_output() -> None:
    """A number in this repository is a row of bench/rows; an output would be one without a row."""
    book = json.loads((ROOT / "examples" / "budget_figure.ipynb").read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
