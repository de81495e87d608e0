"""A picture of the explorer's page: docs/figures/explorer.png.

make demo; python -m bench.explorer.figure skipkv-demo.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.explorer.browser import Watched, browser, why_not

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "explorer.png"
SIZE = {"width": 1280, "height": 800}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("page", type=Path, help="written by skipkv view")
    parser.add_argument("--rid", default="skipkv", help="of the request to show")
    parser.add_argument("--step", type=int, default=18, help="of the slider")
    parser.add_argument("--sentence", type=int, default=3, help="to point at")
    parser.add_argument("--out", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    if (why := why_not()) is not None:
        parser.error(why)
    with browser() as running:
        watched = Watched(running, arguments.page.resolve(), viewport=SIZE, color_scheme="light")
        page = watched.page
        page.locator(".rid", has_text=arguments.rid).click()
        page.locator("#slider").fill(str(arguments.step))
        page.locator(".sentence").nth(arguments.sentence).hover()
        page.wait_for_timeout(300)  # until the marks have moved
        page.screenshot(path=arguments.out)
        watched.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
