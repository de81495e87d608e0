"""Draw the packages of sgl_skipkv and what imports what: docs/figures/packages.svg.

    python -m bench.report.packages

A package is a folder, or a module at the top, that owns one thing. An arrow says "imports"; arrows
that follow from others are left out. ``tests/unit/test_layout.py`` holds the imports to the order
of the packages, and the picture to the imports.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "sgl_skipkv"
LINKED = ("kernels", "patches")
FIGURE = ROOT / "docs" / "figures" / "packages.svg"

#: from the lowest up; a module may import its own package and every package below it
PACKAGES = {
    "kernels": "formulas in plain torch,\nTriton kernels",
    "config": "server settings, and how\na wrong value is refused",
    "error_boundary": "which errors end a request,\nand which the server",
    "ranks": "what the ranks that share\na request combine",
    "cpu": "SGLang platform for machines\nwithout an accelerator",
    "offload": "host memory for retracted\nand finished requests",
    "policy": "one file per policy: scores\nof cached tokens",
    "recording": "what decoding leaves: recent\nqueries, sentence vectors",
    "steering": "the vector, and when and how\nstrongly it is added",
    "request": "what one request asked for,\nand what is known of it",
    "metrics": "what Prometheus is told",
    "reuse": "what finished requests leave,\nand what continues it",
    "eviction": "plan a compaction, rewrite\nthe row, free the slots",
    "explorer": "a trace as a page: its data,\nits parts, a live one",
    "patches/hook": "one hook into SGLang",
    "patches/readiness": "ready, unavailable\nor refused",
    "patches/limits": "what one server cannot do\nfor a request",
    "patches/request_kind": "requests that keep\nout of the defaults",
    "patches/hooks": "tables of every hooked\nfunction",
    "patches/engine": "hooks into the scheduler,\nmemory, forward pass",
    "patches/api": "hooks into every API",
    "patches/registry": "install the hooks,\nverify that they took",
    "patches/startup": "flags, capabilities, start",
    "plugin": "SGLang's entry point",
    "frontend": "sgl.gen(kv_budget=)",
    "cli": "skipkv doctor, trace, view,\ntop, tune, report, steering",
    "": "sgl_skipkv.install()",
}


def own_files() -> list[Path]:
    """Every Python file that is installed, at its real path."""
    return sorted(
        path
        for folder in (SOURCE, *(ROOT / name for name in LINKED))
        for path in folder.rglob("*.py")
        if not any(part.is_symlink() for part in path.parents)
    )


def parts_of(path: Path) -> tuple[str, ...]:
    """Of a module's name below ``sgl_skipkv``: ("policy", "rkv"); () for that itself."""
    relative = path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT)
    return tuple(part for part in relative.with_suffix("").parts if part != "__init__")


def package_of(parts: Sequence[str]) -> str:
    """``policy`` for ("policy", "rkv"), ``patches/api`` for ("patches", "api", "gate").

    The tables of hooks, ``patches/*/hooks.py``, are data: on their own here, below all code.
    """
    if parts and parts[0] == "patches":
        return "patches/hooks" if parts[2:3] == ("hooks",) else "/".join(parts[:2])
    return parts[0] if parts and parts[0] in PACKAGES else ""


def imported_modules(path: Path) -> Iterator[tuple[str, ...]]:
    """Modules of ours that a file imports, at its top or inside a function."""
    known = {parts_of(file) for file in own_files()}
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = tuple(name.split("."))
            if parts[0] == "sgl_skipkv":
                rest = parts[1:]
                yield rest if rest in known else rest[:-1]


def imports_between_packages() -> set[tuple[str, str]]:
    """(package, package that it imports), without what follows from others."""
    edges = set()
    for path in own_files():
        package = package_of(parts_of(path))
        edges |= {(package, package_of(module)) for module in imported_modules(path)}
    below: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for package in PACKAGES:  # from the lowest up
        for _, other in sorted(edge for edge in edges if edge[0] == package != edge[1]):
            below[package] |= {other, *below[other]}
    return {
        (package, other)
        for package, other in edges
        if package != other
        and not any(
            other in below[between] for left, between in edges if left == package != between
        )
    }


def floors(edges: set[tuple[str, str]]) -> dict[str, int]:
    """The floor of each package: one above the highest that it imports."""
    found: dict[str, int] = {}
    for package in PACKAGES:
        found[package] = max(
            (found[other] + 1 for one, other in edges if one == package), default=0
        )
    return found


def draw(path: Path) -> None:
    """A box per package, the lowest floor at the bottom, and an arrow per import."""
    edges = imports_between_packages()
    of_floor: dict[int, list[str]] = {}
    for package, floor in floors(edges).items():
        of_floor.setdefault(floor, []).append(package)
    width = max(map(len, of_floor.values()))
    plt.rcParams.update({"svg.hashsalt": "packages", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(2.6 * width, 1.25 * len(of_floor)))
    centre: dict[str, tuple[float, float]] = {}
    for floor, packages in of_floor.items():
        for i, package in enumerate(packages):
            centre[package] = (2.6 * (i + (width - len(packages)) / 2), 1.3 * floor)
    for package, (x, y) in centre.items():
        hooks = package.startswith("patches")
        box = FancyBboxPatch((x - 1.05, y - 0.38), 2.1, 0.76, boxstyle="round,pad=0.04")
        box.set(facecolor="#e8eef7" if hooks else "#f4f1ea", edgecolor="#555555", linewidth=0.8)
        axes.add_patch(box)
        axes.text(x, y + 0.2, package or "sgl_skipkv", ha="center", va="center", weight="bold")
        axes.text(
            x, y - 0.13, PACKAGES[package], ha="center", va="center", size=7.5, linespacing=1.1
        )
    for package, other in sorted(edges):
        (x, y), (to_x, to_y) = centre[package], centre[other]
        arrow = FancyArrowPatch((x, y - 0.42), (to_x, to_y + 0.42), arrowstyle="-|>")
        # Behind a box, an arrow that passes it would look like two imports.
        passes = y - to_y > 1.5
        arrow.set(mutation_scale=8, linewidth=0.7, color="#0072b2" if passes else "#888888")
        arrow.set(zorder=3 if passes else 0, alpha=0.6 if passes else 1)
        axes.add_patch(arrow)
    axes.set_xlim(-1.3, 2.6 * (width - 1) + 1.3)
    axes.set_ylim(-0.6, 1.3 * (len(of_floor) - 1) + 0.6)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Description": told(edges)})
    plt.close(figure)


def told(edges: set[tuple[str, str]]) -> str:
    """The imports as text, kept in the picture, so that a test can hold it against them."""
    return "; ".join(
        f"{package or 'sgl_skipkv'} imports {other}" for package, other in sorted(edges)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=FIGURE)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
