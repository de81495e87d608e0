"""Fresh environments beside ours, and the commands that run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Environment:
    """A fresh virtual environment; one that was there before is removed.

    Args:
        folder: of the environment.
        uv: the uv to make it with.
    """

    def __init__(self, folder: Path, uv: str) -> None:
        self.folder, self._uv = folder, uv
        self.python = folder / "bin" / "python"
        shutil.rmtree(folder, ignore_errors=True)
        run([uv, "venv", "--quiet", "--python", sys.executable, folder])

    def install(self, *arguments: str | Path) -> None:
        quiet = [] if sys.stderr.isatty() else ["--quiet"]  # uv shows how far it is on a terminal
        run([self._uv, "pip", "install", *quiet, "--python", self.python, *arguments])

    def packages(self) -> dict[str, str]:
        """Name -> version of everything that is installed."""
        listed = output([self._uv, "pip", "freeze", "--quiet", "--python", self.python])
        lines = [line for line in listed.splitlines() if not line.startswith("-e ")]
        return dict(line.replace(" @ ", "==", 1).split("==", 1) for line in lines)


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> int:
    """Run a command and print it; returns its exit status.

    Raises:
        subprocess.CalledProcessError: another status than 0, with ``check``.
    """
    print("$", *command, flush=True)
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        check=check,
    )
    print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return done.returncode


def output(command: Sequence[str | Path], cwd: Path = ROOT) -> str:
    """What a command prints; its failure is raised."""
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, check=True, text=True, stdout=subprocess.PIPE).stdout
