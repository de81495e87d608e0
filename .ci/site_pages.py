"""What the site has beside docs/: README and others as pages, without a second copy in git.

MkDocs calls these functions (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: file at the top -> its page
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]+)?\)")
#: what makes a browser ask another host
FOREIGN = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=.?(?:https?:)?//"
    r"|<link(?=[^>]+rel=.?(?:stylesheet|pre|dns|icon|modulepreload))[^>]+href=.?(?:https?:)?//"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of files outside docs/."""
    texts = {page: (ROOT / name).read_text() for name, page in PAGES.items()}
    for page, text in texts.items():
        files.append(File.generated(config, page, content=LINK.sub(_link, text)))
    return files


def _link(match: re.Match[str]) -> str:
    """A link of a file at the top, as one of a page."""
    target, anchor = match[1], match[2] or ""
    return f"]({PAGES.get(target, target.removeprefix('docs/'))}{anchor})"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that asks another host for anything."""
    if (found := FOREIGN.search(output)) is not None:
        raise PluginError(f"{page.file.src_path}: loads from another host: {found[0]}")
    return output
