"""Every place where this package touches SGLang: installing and verifying them.

SGLang applies hooks with its own registry and only logs what goes wrong. So each seam is checked
twice here: its target and signature before it is registered, and that it took afterwards.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_skipkv.patches.api_seams import API_SEAMS
from sgl_skipkv.patches.engine_seams import ENGINE_SEAMS
from sgl_skipkv.patches.seam import Seam, check

TESTED_SGLANG = ("0.5.23",)
SEAMS = (*API_SEAMS, *ENGINE_SEAMS)

_problems_before: list[str] = []


def install(sglang_version: str) -> None:
    """Register every hook whose target is as expected.

    With any problem nothing that changes the engine is hooked, only what answers calls with 400.
    """
    _problems_before.clear()
    if sglang_version not in TESTED_SGLANG:
        tested = ", ".join(TESTED_SGLANG)
        _problems_before.append(f"SGLang {sglang_version} is not a tested version ({tested})")
    found = {seam: check(seam) for seam in SEAMS}
    _problems_before.extend(problem for problem in found.values() if problem is not None)
    for seam in API_SEAMS if _problems_before else SEAMS:
        if found[seam] is None and seam.hooked:
            HookRegistry.register(seam.path, _load_hook(seam), HookType(seam.kind))


def _load_hook(seam: Seam) -> Callable[..., Any]:
    hook: Callable[..., Any] = pkgutil.resolve_name(f"sgl_skipkv.patches.{seam.hook}")
    return hook


def problems_before() -> list[str]:
    """What was wrong before hooking: the version, a target, a signature."""
    return list(_problems_before)


def load() -> None:
    """Let SGLang load its plugins, as it does at the start of a server."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


def problems() -> list[str]:
    """Every seam that is not as it should be, after SGLang applied the hooks."""
    if _problems_before:
        return list(_problems_before)
    return [
        f"seam {seam.target} did not take"
        for seam in SEAMS
        if seam.hooked and seam.path not in HookRegistry._patched
    ]
