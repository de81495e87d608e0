"""Commands of minutes whose outcome a test reads: they run beside the tests that come before it.

Most tests keep one core busy. So the commands start with the session, one after the other, and the
tests that read their outcome come after those that do not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = (str(ROOT / "tests" / "fuzz.py"), "--report", "rows.json")
# name -> the test file that reads the outcome, and what this Python is given; in the order of runs
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lives": ("state_machine", (*FUZZ, "--examples", "1000", "--seeds", "1")),
    "planted": ("state_machine", (*FUZZ, "--planted", "--seeds", "2")),
    "demo": ("demo", ("-P", str(ROOT / "examples" / "demo.py"), "--problems", "4")),
}


@dataclass(frozen=True)
class Outcome:
    """What a command said, and left.

    Attributes:
        status: of its exit.
        said: on its standard output.
        errors: on its standard error.
        folder: where it ran; it was empty.
        mark: in the environment of everything that it started.
    """

    status: int
    said: str
    errors: str
    folder: Path
    mark: str


class Background:
    """The commands of the test files that run.

    Args:
        files: stems of the test files, without their ``test_``.
        folder: commands get folders of their own in it.
    """

    def __init__(self, files: Set[str], folder: Path) -> None:
        self._folder = folder
        self._running: subprocess.Popen[str] | None = None
        self._one_by_one = ThreadPoolExecutor(1)
        self._outcomes: dict[str, Future[Outcome]] = {
            name: self._one_by_one.submit(self._run, name, arguments)
            for name, (file, arguments) in COMMANDS.items()
            if file in files
        }

    def outcome(self, name: str) -> Outcome:
        """Of one command; waits for it."""
        return self._outcomes[name].result()

    def stop_all(self) -> None:
        """As Ctrl-C would: a command that serves ends its servers."""
        self._one_by_one.shutdown(wait=False, cancel_futures=True)
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(signal.SIGINT)
        self._one_by_one.shutdown()

    def _run(self, name: str, arguments: tuple[str, ...]) -> Outcome:
        folder = self._folder / name
        folder.mkdir()
        mark = f"{name}-{uuid.uuid4()}"
        self._running = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "SKIPKV_TEST_MARK": mark, "COLUMNS": "110"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said, errors = self._running.communicate()
        return Outcome(self._running.returncode, said, errors, folder, mark)
