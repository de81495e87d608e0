"""Fixtures that several test files share: models, the session's server, and nothing that outlives
it."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports sglang: the platform that runs on any machine, and no operator's settings.
os.environ["SGLANG_PLATFORM"] = "skipkv_cpu"
os.environ.pop("SGL_SKIPKV_CONFIG", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, the tests of one server together, and what waits for a command last."""

    def place(item: pytest.Item) -> tuple[bool, bool, str]:
        waits = "background" in inspect.signature(item.function).parameters
        return waits, item.get_closest_marker("server") is not None, item.path.name

    items.sort(key=place)


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
def background(request, tmp_path_factory) -> Iterator:  # type: ignore[no-untyped-def, type-arg]
    """The commands of minutes that this session's tests read; the first starts with it."""
    from background import Background

    files = {item.path.stem.removeprefix("test_") for item in request.session.items}
    running = Background(files, tmp_path_factory.mktemp("background"))
    try:
        yield running
    finally:
        running.stop_all()


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
