"""Workflows, forms, Docker and pre-commit files: they parse, and what they name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sgl_skipkv.patches import registry

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
#: a path of this repository in a command or a sentence
PATH = re.compile(r"(?<![\w/.$-])(?:docs|tests|bench|examples|patches|kernels|\.ci)/[\w./-]*\w")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def strings(value: Any) -> Iterator[str]:
    """Every text in a parsed file, keys left out."""
    if isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)
    elif isinstance(value, str):
        yield value


def assert_exists(text: str) -> None:
    assert set(MAKE.findall(text)) <= TARGETS, text
    for name in PATH.findall(text):
        assert list(ROOT.glob(name)), name


def test_the_files_are_there() -> None:
    assert {path.name for path in WORKFLOWS} == {"checks.yml", "canary.yml", "release.yml"}
    assert {path.stem for path in FORMS} == {"bug", "policy", "sglang", "config"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["on" if "on" in workflow else True]  # YAML 1.1 reads "on" as true
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] and {job.get("needs", name)} <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))
            # What an event brings reaches a shell through the environment only.
            assert "${{" not in step.get("run", "")
    for text in strings(workflow):
        assert_exists(text)


def test_every_check_of_ci_is_in_a_workflow() -> None:
    commands = MAKE.findall((ROOT / ".ci" / "run").read_text())
    checks = list(strings(load(ROOT / ".github/workflows/checks.yml")))
    assert commands == [
        "lint",
        "test",
        "test-slow",
        "test-disaggregation",
        "docs",
        "notebook",
        "canary",
    ]
    assert all(any(f"make {name}" in text for text in checks) for name in commands)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms(path: Path) -> None:
    form = load(path)
    if path.stem == "config":
        assert form.keys() == {"blank_issues_enabled"}
        return
    assert form.keys() == {"name", "description", "labels", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in ("input", "textarea", "checkboxes")
        assert field["attributes"]["label"]
        assert all(option["label"] for option in field["attributes"].get("options", []))
    for text in strings(form):
        assert_exists(text)


def test_citation_and_pre_commit() -> None:
    assert {"cff-version", "message", "title", "authors"} <= load(ROOT / "CITATION.cff").keys()
    (repo,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repo["hooks"]:
        tool = hook["entry"].split()[0]
        assert (ROOT / tool).is_file() and tool.rpartition("/")[2] in lint
    assert repo["repo"] == "local" and len(repo["hooks"]) == 3


def test_docker() -> None:
    instructions = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())
    lines = [line for line in instructions.splitlines() if line and not line.startswith("#")]
    words = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} == words and lines[0] == "FROM python:3.11-slim"
    for source in re.findall(r"^COPY (\S+) ", instructions, re.MULTILINE):
        assert (ROOT / source).exists()
    assert f"sglang=={registry.TESTED_SGLANG[-1]}" in instructions
    ignored, *kept = (ROOT / ".dockerignore").read_text().split("\n*\n")[1].splitlines()
    for name in (ignored, *kept):
        assert name == "**/__pycache__" or (ROOT / name.removeprefix("!")).exists(), name
    services = load(ROOT / "compose.yaml")["services"]
    for service in (services["cpu"], services["gpu"]):
        assert service["build"] == "." and service["ports"] == ["127.0.0.1:30000:30000"]
        assert {"--model-path", "--enable-metrics"} <= {*service["command"]}
    assert {name: service["profiles"] for name, service in services.items()} == {
        **{"cpu": ["cpu"], "gpu": ["gpu"]},
        **{"prometheus": ["monitoring"], "grafana": ["monitoring"]},
    }
    mounted = [one for name in ("prometheus", "grafana") for one in services[name]["volumes"]]
    assert all((ROOT / one.partition(":")[0]).exists() for one in mounted)


def test_the_table_of_versions() -> None:
    """docs/versions.md names what is tested, the newest first, with the number of its hooks."""
    table = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \| (\d+) \|", table, re.MULTILINE)
    expected = [
        (version, str(len(registry.of_version(registry.HOOKS, version))))
        for version in reversed(registry.TESTED_SGLANG)
    ]
    assert rows == expected
    readme = (ROOT / "README.md").read_text()
    assert all(version in readme for version in registry.TESTED_SGLANG)
    assert f"[sglang]'   # with SGLang {registry.TESTED_SGLANG[-1]}" in readme


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/versions.md"])
def test_what_documents_name(name: str) -> None:
    for code in re.findall(r"`([^`]+)`", (ROOT / name).read_text()):
        assert set(MAKE.findall(code)) <= TARGETS, code
