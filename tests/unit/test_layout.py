"""The promises of the layout: symlinked namespaces, imports that point down, what is never used.

Everything here reads source text or starts a fresh interpreter, so nothing that another test has
imported can hide a mistake.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.report.packages import (
    FIGURE,
    LINKED,
    PACKAGES,
    ROOT,
    SOURCE,
    imports_between_packages,
    own_files,
    package_of,
    parts_of,
    told,
)

# Who may import SGLang, and what below its root (``import sglang`` itself is free to them).
SGLANG = {
    "patches": ("sglang.",),
    "cpu": (
        *("sglang.srt.platforms.", "sglang.srt.layers.attention."),
        "sglang.srt.models.deepseek_common.attention_backend_handler.",
        # DP attention without a GPU: what SGLang asks its own CPU engine for
        "sglang.srt.distributed.parallel_state",
        "sglang.srt.layers.dp_attention",
        "sglang.srt.model_executor.forward_batch_info",
        # HiCache without a GPU
        "sglang.srt.mem_cache.pool_host.",
        # PD disaggregation without a GPU
        "sglang.srt.disaggregation.mooncake.conn.",
        # adapters without a GPU
        "sglang.srt.lora.lora_manager.",
        # speculative decoding without a GPU
        *("sglang.kernels.ops.speculative.", "sglang.srt.speculative."),
        *("sglang.srt.arg_groups.speculative_hook", "sglang.srt.managers.overlap_utils"),
        *("sglang.srt.mem_cache.allocation", "sglang.srt.mem_cache.memory_pool."),
        "sglang.srt.runtime_context.get_spec",
    ),
    "frontend": ("sglang.lang.",),
    "plugin": ("sglang.",),
}


class Import(NamedTuple):
    """One import statement: ``top`` is False inside a function."""

    name: str
    top: bool


def imports_of(path: Path) -> Iterator[Import]:
    """Every absolute name that a file imports, ``from a import b`` as ``a.b``."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            yield from (Import(f"{node.module}.{alias.name}", top) for alias in node.names)


def run_fresh(code: str, cwd: Path = ROOT) -> str:
    """The output of a fresh interpreter; its failure fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("path", own_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    package, order = package_of(parts_of(path)), [*PACKAGES]
    for found in imports_of(path):
        root, *rest = found.name.split(".")
        if root != "sgl_skipkv":
            continue
        target = package_of(tuple(rest))
        if target == "patches" or (target.startswith("patches/") and target not in PACKAGES):
            continue  # ``from sgl_skipkv.patches import registry``: its second name is looked at
        allowed = target == package or order.index(target) < order.index(package)
        allowed = allowed or (package == "" and not found.top)  # install() reaches up, when called
        assert allowed, f"{path.name} ({package}) imports {found.name} ({target})"


def test_the_picture_shows_the_imports() -> None:
    assert told(imports_between_packages()) in FIGURE.read_text(), "python -m bench.report.packages"


def test_no_import_runs_in_a_circle() -> None:
    """Modules, not only packages; imports inside functions count as well."""
    modules = {".".join(("sgl_skipkv", *parts_of(path))): path for path in own_files()}
    names = {
        name: sorted(
            {
                n
                for found in imports_of(path)
                for n in (found.name, found.name.rpartition(".")[0])
                if n in modules
            }
        )
        for name, path in modules.items()
        if name != "sgl_skipkv"  # install() reaches up, when called
    }
    TopologicalSorter(
        {name: [n for n in found if n != name] for name, found in names.items()}
    ).prepare()
    assert len(names) > 60


@pytest.mark.parametrize("path", own_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_hooks_touch_sglang(path: Path) -> None:
    package = package_of(parts_of(path)).partition("/")[0]
    for found in imports_of(path):
        if found.name.split(".")[0] != "sglang":
            continue
        assert package in SGLANG, f"{path.name} imports {found.name}"
        assert found.name == "sglang" or found.name.startswith(SGLANG[package]), found.name
        assert package != "plugin" or not found.top, (
            "plugin.py imports SGLang inside register() only"
        )


def test_kernels_need_torch_and_triton_alone() -> None:
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        names = [found.name for found in imports_of(path)]
        roots = {n.split(".")[0] for n in names if not n.startswith("sgl_skipkv.kernels")}
        foreign = roots - {"torch", "triton", "__future__"} - set(sys.stdlib_module_names)
        assert not foreign, f"{path.name} imports {foreign}"


@pytest.mark.parametrize("folder", LINKED)
def test_linked_folders_are_namespaces(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), "it would hide the PyPI package"
    link = SOURCE / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("folder", ["tests", "bench", "examples", "docs"])
def test_other_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_checkout_does_not_hide_the_kernels_of_pypi() -> None:
    """SGLang imports ``kernels`` and falls back to other attention kernels when it looks wrong."""
    assert importlib.metadata.version("kernels")
    find = "from importlib.util import find_spec as find; "
    theirs = run_fresh(find + "print(find('kernels').origin)")
    assert theirs.endswith("__init__.py") and Path(theirs).parent != ROOT / "kernels", theirs
    ours = run_fresh(find + "print(find('sgl_skipkv.kernels.reference').origin)")
    assert Path(ours).resolve() == ROOT / "kernels" / "reference.py"


def test_pyproject_names_every_package() -> None:
    """``packages`` is a list by hand: what is missing there is missing from the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for path in own_files():
        parts = path.parent.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "sgl_skipkv" else ("sgl_skipkv", *parts)))
    # Files of others, which setuptools takes for a package.
    assert set(settings["packages"]) == found | {"sgl_skipkv.explorer.vendor"}
    assert {name: settings["package-dir"][f"sgl_skipkv.{name}"] for name in LINKED} == {
        name: name for name in LINKED
    }


@pytest.mark.parametrize("module", ["sgl_skipkv", "sgl_skipkv.plugin"])
def test_importing_the_package_loads_neither_torch_nor_sglang(module: str) -> None:
    """The entry point neither, which imports the settings, and with them pydantic."""
    heavy = {"torch", "sglang", *(["pydantic"] if module == "sgl_skipkv" else [])}
    assert run_fresh(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_reference_kernels_import_without_triton_and_sglang() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['sglang'] = None; "
        "from sgl_skipkv.kernels import reference; "
        "import torch; print(tuple(reference.sentence_redundancy(torch.ones(2, 3)).shape))"
    )
    assert run_fresh(code) == "(2,)"


#: the place that says why it may, and the import of another package's policy
BOUNDARIES = (SOURCE / "error_boundary.py", SOURCE / "policy" / "installed.py")
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml"}


def faults_of(path: Path) -> list[str]:
    """Swallowed exceptions and ways to run foreign data as code."""
    faults = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and path not in BOUNDARIES:
            caught = [] if node.type is None else list(ast.walk(node.type))
            names = {part.id for part in caught if isinstance(part, ast.Name)}
            if node.type is None or names & {"Exception", "BaseException"}:
                faults.append(f"line {node.lineno}: catches everything")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in FORBIDDEN_NAMES:
                faults.append(f"line {node.lineno}: requests {node.func.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) == ("torch", "load"):
                faults.append(f"line {node.lineno}: uses torch.load")
    roots = {found.name.split(".")[0] for found in imports_of(path)}
    return faults + [f"imports {name}" for name in sorted(roots & FORBIDDEN_MODULES)]


@pytest.mark.parametrize("path", own_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_swallowed_and_no_data_is_run(path: Path) -> None:
    assert faults_of(path) == []


@pytest.mark.parametrize(
    "source",
    [
        *(f"try: f()\nexcept{caught}: g()" for caught in ("", " (ValueError, Exception)")),
        "try: f()\nexcept BaseException as e: raise",
        "eval('1')",
        "import torch\ntorch.load('x')",
        "from pickle import loads",
        "import dill",
    ],
)
def test_the_lint_sees_each_fault(source: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    assert len(faults_of(path)) == 1


def idle_tests(path: Path) -> list[str]:
    """Test functions without an assertion, ``pytest.raises`` or a request that asserts by its
    name."""
    idle = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        nodes = list(ast.walk(function))
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
        }
        asserts = any(isinstance(node, ast.Assert) for node in nodes)
        by_name = {"raises", "run_state_machine_as_test", "assert_close"} & called
        if not asserts and not by_name and not any(name.startswith("assert_") for name in called):
            idle.append(function.name)
    return idle


def test_every_test_can_fail() -> None:
    idle = {path.name: idle_tests(path) for path in sorted(ROOT.glob("tests/*/*.py"))}
    assert {name: found for name, found in idle.items() if found} == {}
    assert sum(len(path.read_text()) for path in ROOT.glob("tests/*/test_*.py")) > 0
