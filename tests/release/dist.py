"""Is what we release whole? ``make dist``

Builds the sdist, and from it the wheel. Installs a plain SGLang into a fresh environment as a user
has it, then the wheel beside it, and checks that this changed no package that was there. Runs
``skipkv doctor`` there, and the demo of the unpacked sdist: nothing of the checkout is used.
Everything is written below ``.dist/``; what to upload lies in ``.dist/packages``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from environments import ROOT, Environment, output, run, step

DIST = ROOT / ".dist"
PACKAGES = DIST / "packages"


def build(uv: str) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([uv, "build", "--quiet", "--out-dir", PACKAGES, "."])  # the wheel is built from the sdist
    (sdist,), (wheel,) = PACKAGES.glob("*.tar.gz"), PACKAGES.glob("*.whl")
    return sdist, wheel


def missing_files(wheel: Path) -> list[str]:
    """Files of git below the installed folders that the wheel lacks, by their installed names."""
    folders = ("sgl_skipkv", "kernels", "patches")
    tracked = output(["git", "ls-files", "--", *folders]).split()
    names = {
        name if name.startswith("sgl_skipkv/") else f"sgl_skipkv/{name}"
        for name in tracked
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink()
    }
    return sorted(names - set(zipfile.ZipFile(wheel).namelist()))


def changed_packages(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What installing this package did to packages that were there."""
    gone = {name: (version, after.get(name)) for name, version in before.items()}
    return [f"{name} {was} -> {now}" for name, (was, now) in gone.items() if was != now]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--uv", default="uv", help="the uv that builds and installs")
    parser.add_argument("--sglang", default="0.5.23", help="version of the plain SGLang")
    arguments = parser.parse_args()

    step("1 of 4: the sdist, and the wheel that is built from it")
    sdist, wheel = build(arguments.uv)
    print(f"  {sdist.name}, {wheel.name}")
    if missing := missing_files(wheel):
        print("NOT IN THE WHEEL:", *missing)
        return 1

    alone = Environment(DIST / "alone", arguments.uv)
    alone.install(wheel)
    if run([alone.python.parent / "skipkv", "--version"], cwd=DIST, check=False):
        print("THE COMMAND DOES NOT WORK WITHOUT SGLANG.")
        return 1

    step(f"2 of 4: a fresh environment with a plain SGLang {arguments.sglang}, as a user has it")
    environment = Environment(DIST / "environment", arguments.uv)
    constraints = ROOT / ".ci" / "constraints.txt"
    environment.install("--constraint", constraints, f"sglang=={arguments.sglang}")
    before = environment.packages()

    step("3 of 4: the wheel beside it")
    environment.install(wheel)
    after = environment.packages()
    if changed := changed_packages(before, after):
        print("CHANGED BY INSTALLING US:", *changed)
        return 1
    new = sorted(after.keys() - before.keys())
    print(f"  {len(before)} packages were there, none changed; new: {', '.join(new)}")

    step("4 of 4: doctor and the demo from outside the checkout")
    outside = DIST / "outside"
    outside.mkdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(outside, filter="data")
    (unpacked,) = outside.iterdir()
    # SGLang warns of much on a machine without a GPU.
    platform = {"SGLANG_PLATFORM": "skipkv_cpu", "PYTHONWARNINGS": "ignore"}
    binaries = environment.python.parent
    doctor = run([binaries / "skipkv", "doctor"], cwd=outside, environment=platform, check=False)
    demo = [environment.python, "-P", unpacked / "examples" / "demo.py"]
    shown = run(demo, cwd=outside, environment=platform, check=False)
    whole = doctor == shown == 0
    print(f"\n{wheel.name}: " + ("it can be released." if whole else "IT DOES NOT WORK (4 of 4)."))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
