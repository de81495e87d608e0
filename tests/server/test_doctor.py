"""``skipkv doctor``: versions, platform, every hook's state, every capability, one verdict."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib import metadata

import pytest

from sgl_skipkv.patches.registry import HOOKS
from sgl_skipkv.patches.startup.capabilities import CAPABILITIES


@pytest.fixture(scope="module")
def doctor() -> subprocess.CompletedProcess[str]:
    command = "import sys; from sgl_skipkv.cli.main import main; sys.exit(main(['doctor']))"
    return subprocess.run(
        [sys.executable, "-P", "-c", command],
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_names_everything(doctor: subprocess.CompletedProcess[str]) -> None:
    assert doctor.returncode == 0, doctor.stderr[-2000:]
    for package in ("sglang", "torch", "transformers"):
        assert metadata.version(package) in doctor.stdout
    assert "skipkv_cpu" in doctor.stdout
    lines = doctor.stdout.splitlines()
    for hook in HOOKS:
        line = next(line for line in lines if hook.target in line and hook.why in line)
        assert " ok " in line
    for row in CAPABILITIES:
        line = next(line for line in lines if row.name in line and row.why in line)
        assert f" {row.supported} " in line
    assert "ready" in doctor.stdout


def test_every_seam_names_what_uses_it() -> None:
    """Hooks are resolved when they are installed; those of the kind "use" only here."""
    for hook in HOOKS:
        assert callable(pkgutil.resolve_name(f"sgl_skipkv.patches.{hook.function}")), hook


def test_the_matrix_covers_what_sglang_offers() -> None:
    names = " ".join(row.name.lower() for row in CAPABILITIES)
    for feature in (
        *("backend", "page size", "mla", "sliding window", "hybrid / mamba", "speculative"),
        *("mixed chunk", "disaggregation", "pd multiplexing"),
        *("tensor parallel", "data parallel", "pipeline", "dp attention", "expert parallel"),
        *("hicache", "lmcache"),
        *("hisparse", "session", "beam", "canary", "quantised kv"),
    ):
        assert feature in names, feature
    assert all(row.why for row in CAPABILITIES)
    assert {row.supported for row in CAPABILITIES} == {"yes", "no", "per request"}
