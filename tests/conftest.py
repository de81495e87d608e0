"""Fixtures that several test files share: models, the session's server, and nothing that outlives
it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from isolated import isolate

# The same examples in every run, however long one takes.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
isolate()  # before anything imports sglang
# What tests start imports SGLang again and again; with this a server does so once.
QUICK_STARTS = str(Path(__file__).resolve().parent / "helpers" / "quick_starts")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [QUICK_STARTS, os.environ.get("PYTHONPATH")])
)
# So is a start that imports only the models which tests load, of SGLang's two hundred.
MODELS = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "gemma3_causal", "deepseek_v2"),
    *("qwen2_5_vl", "qwen3_vl", "llama_eagle", "deepseek_nextn", "registry"),
)
_FOUND = find_spec("sglang")
assert _FOUND is not None and _FOUND.submodule_search_locations
_FOLDER = Path(_FOUND.submodule_search_locations[0], "srt", "models")
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
    sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem not in MODELS)
)

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
# files whose tests take a minute and more; of those that share a server, the first
LONGEST_FIRST = (
    *("bad_input", "retraction", "fuzz", "demo", "accuracy", "oracle_thoughts", "extract"),
    *("tensor_parallel", "ranks"),
    *("float8", "out_of_memory", "launches", "runtime_on_triton", "kernel_attention"),
    *("state_machine", "kernel_key_redundancy", "policies"),
)


def pytest_report_header() -> str:
    return "order: what takes minutes comes first, so the first percents are most of the time"


def group_of(file: str) -> str:
    """Of a test file and those that share a server with it."""
    from server_specs import sharing

    return min(sharing(Path(file).stem.removeprefix("test_")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest starts first, and the tests of one server follow each other."""

    def place(item: pytest.Item) -> tuple[int, str, str]:
        group = group_of(item.path.name)
        when = LONGEST_FIRST.index(group) if group in LONGEST_FIRST else len(LONGEST_FIRST)
        return when, group, item.path.name

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A group goes to one of pytest-xdist's workers as a whole, in the order of above."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory):
    """family -> folder of a small random model, made once."""
    from tiny_models import save_model

    return functools.cache(lambda family: save_model(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def oracle(model_folder):
    """family -> masking oracle of that model."""
    from media_oracle import oracle_of

    return functools.cache(lambda family: oracle_of(family, model_folder(family)))


@pytest.fixture(scope="session")
def score_oracle(model_folder):
    """family -> score oracle of that model."""
    from score_oracle import ScoreOracle

    return functools.cache(lambda family: ScoreOracle(model_folder(family)))


@pytest.fixture(scope="session")
def fleet(model_folder, tmp_path_factory) -> Iterator:
    """The servers of this session's tests."""
    from fleet import Fleet

    running = Fleet(model_folder, tmp_path_factory.mktemp)
    try:
        yield running
    finally:
        running.stop_all()


@pytest.fixture(scope="session")
def server(fleet) -> Iterator:
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


@pytest.fixture(scope="module")
def plugin_loaded() -> Iterator[None]:
    """SGLang with our hooks and a published CPU configuration, for what needs no server."""
    from pool_content import plugin_and_topology

    with plugin_and_topology():
        yield
