"""Fixtures that several test files share: models, the session's server, and nothing that outlives
it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# Before anything imports sglang: the platform that runs on any machine, and no operator's settings.
os.environ["SGLANG_PLATFORM"] = "skipkv_cpu"
os.environ.pop("SGL_SKIPKV_CONFIG", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, and the tests of one server together."""
    items.sort(key=lambda item: (item.get_closest_marker("server") is not None, item.path.name))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """family -> folder of a small random model, made once."""
    from tiny_models import save_model

    return functools.cache(lambda family: save_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def oracle(model_folder):  # type: ignore[no-untyped-def]
    """family -> masking oracle of that model."""
    from oracle import MaskingOracle

    return functools.cache(lambda family: MaskingOracle(model_folder(family)))


@pytest.fixture(scope="session")
def score_oracle(model_folder):  # type: ignore[no-untyped-def]
    """family -> score oracle of that model."""
    from score_oracle import ScoreOracle

    return functools.cache(lambda family: ScoreOracle(model_folder(family)))


@pytest.fixture(scope="session", autouse=True)
def fleet(request, model_folder, tmp_path_factory) -> Iterator:  # type: ignore[no-untyped-def, type-arg]
    """The servers of this session's tests; the first of them starts with the first test."""
    from fleet import Fleet

    files = {
        item.path.stem.removeprefix("test_")
        for item in request.session.items
        if item.get_closest_marker("server")
    }
    running = Fleet(files, model_folder, tmp_path_factory.mktemp)
    try:
        yield running
    finally:
        running.stop_all()


@pytest.fixture(scope="session", autouse=True)
def fuzzing(request, tmp_path_factory) -> Iterator:  # type: ignore[no-untyped-def, type-arg]
    """2,000 lives of the state machine, then its planted bugs: functions that wait for the rows.

    In a process at a time from the session's start: most tests keep one core busy.
    """
    if not any(item.path.stem == "test_state_machine" for item in request.session.items):
        yield None
        return
    folder, running = tmp_path_factory.mktemp("fuzzing"), []

    def rows_of(name: str, *arguments: str) -> list[dict[str, Any]]:
        report = folder / f"{name}.json"
        command = [sys.executable, "tests/fuzz.py", *arguments, "--report", str(report)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append(process)
        said, _ = process.communicate()
        assert report.exists(), said[-2000:]
        found: list[dict[str, Any]] = json.loads(report.read_text())
        return found

    with ThreadPoolExecutor(1) as one_by_one:
        lives = one_by_one.submit(rows_of, "lives", "--examples", "2000", "--seeds", "1")
        planted = one_by_one.submit(rows_of, "planted", "--planted", "--seeds", "2")
        try:
            yield lives.result, planted.result
        finally:
            planted.cancel()
            for process in running:
                process.kill()


@pytest.fixture(scope="session")
def server(fleet) -> Iterator:  # type: ignore[no-untyped-def, type-arg]
    """The session's server: plugin loaded, no default budget, overlap on, strict checks on."""
    running = fleet.ready("main")
    yield running
    running.assert_clean()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real prompts and vocabularies beside the checkout; users do not have it."""
    if not (SHARED / "data").is_dir():
        pytest.skip("the folder with real data is not beside this checkout")
    return SHARED / "data"


@pytest.fixture()
def clean_folder(tmp_path: Path) -> Iterator[Path]:
    """A working directory in which no folder shadows a module."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
