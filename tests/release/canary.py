"""Does this package work with that SGLang? ``make canary SGLANG=x.y.z``

Makes a fresh environment in ``.canary/x.y.z``, installs that SGLang and this checkout, says which
hooks hold and which of their functions have another source, and runs the smoke suite there. The
exit status is 0 only if every hook holds and the suite passes.

A version of ``TESTED_SGLANG`` is installed as ``.ci/sglang-x.y.z.txt`` or ``.ci/constraints.txt``
say; any other one as pip would resolve it today, and its servers run under
``SGL_SKIPKV_UNTESTED_SGLANG``, which opens the version gate for it alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from environments import ROOT, Environment, run, step

TESTED = (ROOT / "patches" / "registry.py").read_text().partition("TESTED_SGLANG = ")[2]


def install(environment: Environment, version: str) -> None:
    """That SGLang, this checkout, and what the smoke suite needs."""
    listed = ROOT / ".ci" / f"sglang-{version}.txt"
    constraints = ROOT / ".ci" / "constraints.txt"
    if listed.is_file():
        environment.install("--no-deps", "--requirements", listed)
        environment.install("--no-deps", "--editable", ".")
        return
    pinned = f"sglang=={version}" in constraints.read_text().splitlines()
    known = ["--constraint", constraints] if pinned else []
    environment.install(*known, f"sglang=={version}", "--editable", ".[smoke]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="of SGLang, as 0.5.23")
    parser.add_argument("--uv", default="uv", help="the uv that makes the environment")
    parser.add_argument("--workers", default="2", help="of the smoke suite")
    arguments = parser.parse_args()
    version = arguments.version
    tested = f'"{version}"' in TESTED.partition("\n")[0]

    step(f"1 of 3: a fresh environment with SGLang {version} and this checkout")
    environment = Environment(ROOT / ".canary" / version, arguments.uv)
    install(environment, version)

    gate = {} if tested else {"SGL_SKIPKV_UNTESTED_SGLANG": version}
    step("2 of 3: which hooks hold, and which of their functions changed")
    hooks = [environment.python, "-P", Path("tests", "release", "hooks.py")]
    hold = run(hooks, environment=gate, check=False) == 0

    step("3 of 3: the smoke suite")
    # Other files import what only the benchmarks need.
    files = [f for f in sorted(ROOT.glob("tests/*/test_*.py")) if "mark.smoke" in f.read_text()]
    files = [file.relative_to(ROOT) for file in files]
    suite = ["-P", "-m", "pytest", "-m", "smoke", "--numprocesses", arguments.workers, *files]
    passes = run([environment.python, *suite], environment=gate, check=False) == 0

    kind = "a tested version" if tested else "not a tested version"
    print(f"\nSGLang {version} ({kind}): ", end="")
    print("every hook holds" if hold else "HOOKS DO NOT HOLD (see 2 of 3)", end="; ")
    print("the smoke suite passes." if passes else "THE SMOKE SUITE FAILS (see 3 of 3).")
    if not (hold and passes):
        print('Budgets do not work with it. CONTRIBUTING.md, "A new SGLang version", goes on.')
    return 0 if hold and passes else 1


if __name__ == "__main__":
    sys.exit(main())
