"""Packages of others that register policies, as an installation leaves them in a folder."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

OWN_POLICY = Path(__file__).resolve().parents[2] / "examples" / "own_policy"
_BUILD = "from setuptools.build_meta import build_wheel; build_wheel('.')"


def install_example(folder: Path, scratch: Path) -> None:
    """Build the wheel of ``examples/own_policy`` and unpack it, as pip does."""
    source = scratch / "own_policy"
    shutil.copytree(OWN_POLICY, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    subprocess.run(
        [sys.executable, "-P", "-c", _BUILD], cwd=source, check=True, capture_output=True
    )
    (wheel,) = source.glob("*.whl")
    with ZipFile(wheel) as packed:
        packed.extractall(folder)


def install(folder: Path, package: str, policies: Mapping[str, str], source: str = "") -> None:
    """A package with these entry points, name -> "module:class", and a module of its name."""
    place = folder / f"{package}-1.0.dist-info"
    place.mkdir(parents=True)
    place.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in policies.items()]
    text = "\n".join(["[sgl_skipkv.policies]", *lines, ""])
    place.joinpath("entry_points.txt").write_text(text)
    folder.joinpath(f"{package}.py").write_text(source)
    importlib.invalidate_caches()
