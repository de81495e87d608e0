"""Puts the page together: one file with its styles, scripts and data, that loads nothing.

``page.html`` names its parts as any page does, so it also opens from the folder. Here they are put
in its place. The policy of its ``meta`` element allows the scripts and styles by their digests and
forbids the rest, so text of a trace could run nothing even if it were taken for HTML.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

_PARTS: Final = re.compile(
    r'<link rel="stylesheet" href="(?P<style>[\w./]+)">|<script src="(?P<script>[\w./]+)"></script>'
)
_DATA: Final = '<script id="data" type="application/json">{"requests": []}</script>'
_POLICY: Final = '<meta http-equiv="Content-Security-Policy" content="">'
# In a script element of HTML these could end it or begin a comment; JSON has them in strings only.
_ESCAPES: Final = {character: f"\\u{ord(character):04x}" for character in "<>&"}


def page_of(data: Mapping[str, Any], *, live: bool = False) -> str:
    """The page with its data, which is in ASCII.

    Args:
        data: ``requests``, the numbers of those that it begins with (``side_by_side``), and of a
            live page the ``cursor`` and how many requests it lists (``most``).
        live: whether it asks its server for what is new.
    """
    html, digests = _assembled()
    # Without ``allow_nan`` a number could become a word that no JSON parser reads. A lone surrogate
    # has no UTF-8, so everything beyond ASCII is escaped.
    text = json.dumps({**data, "live": live}, separators=(",", ":"), allow_nan=False)
    for character, escaped in _ESCAPES.items():
        text = text.replace(character, escaped)
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(digests['script'])}",
            # uPlot sets sizes and places of its parts as properties, which needs no permission.
            f"style-src {' '.join(digests['style'])}",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    html = html.replace(_POLICY, _POLICY.replace('""', f'"{policy}"'), 1)
    return html.replace(_DATA, f'<script id="data" type="application/json">{text}</script>', 1)


def _assembled() -> tuple[str, dict[str, list[str]]]:
    """The page with its parts in place, and the digests of its styles and scripts."""
    digests: dict[str, list[str]] = {"style": [], "script": []}

    def in_place(match: re.Match[str]) -> str:
        kind = "style" if match["style"] else "script"
        text = _source(match["style"] or match["script"])
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    return _PARTS.sub(in_place, _source("page.html")), digests


def _source(name: str) -> str:
    return resources.files("sgl_skipkv.explorer").joinpath(name).read_text(encoding="utf-8")
