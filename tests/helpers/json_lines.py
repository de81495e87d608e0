"""Files of JSON lines, as commands take them."""

from __future__ import annotations

import json
from pathlib import Path


def written(path: Path, *lines: object) -> Path:
    """The file, with a line for each value."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
