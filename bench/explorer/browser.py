"""A headless Chromium, where there is one: for the browser's tests and rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
#: names a Chromium that is not on the path
VARIABLE: Final = "CHROMIUM"


def chromium() -> str | None:
    """The path of a Chromium; None: there is none."""
    named = os.environ.get(VARIABLE)
    return named or next(filter(None, map(shutil.which, _NAMES)), None)


def why_not() -> str | None:
    """Why no browser can be started here; None: one can."""
    if find_spec("playwright") is None:
        return "playwright is not installed (make explorer installs it)"
    if chromium() is None:
        return f"no Chromium on the path or in {VARIABLE} (Debian: apt install chromium)"
    return None


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium, driven by playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # A container's root has no sandbox; the pages are our own.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = driver.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield running
        finally:
            running.close()


class Watched:
    """A page of this browser, and what it should not do.

    Attributes:
        faults: errors of its scripts, dialogs that it opened.
        requests: addresses that it asked for beside its own.
    """

    def __init__(self, running: Any, target: Path | str, **options: Any) -> None:
        self.faults: list[str] = []
        self.requests: list[str] = []
        url = target.as_uri() if isinstance(target, Path) else target
        self._context = running.new_context(
            **{"viewport": {"width": 1400, "height": 900}} | options
        )
        self.page = self._context.new_page()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: self._note(message))
        self.page.on("dialog", lambda dialog: self._refuse(dialog))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.requests.remove(self.page.url.partition("#")[0])

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _refuse(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def close(self) -> None:
        self._context.close()
