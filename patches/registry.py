"""Installs all hooks into SGLang and verifies them.

SGLang applies hooks with its own registry and only logs errors. So each hook is checked twice here:
its target and signature before it is registered, and afterwards that SGLang applied it.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_skipkv.config import variable_of
from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.patches.api.hooks import API_HOOKS
from sgl_skipkv.patches.engine.hooks import ENGINE_HOOKS
from sgl_skipkv.patches.hook import Hook, check, replaced
from sgl_skipkv.patches.startup.hooks import MEMORY_HOOKS, STARTUP_HOOKS

#: from the oldest to the newest
TESTED_SGLANG = ("0.5.22", "0.5.23")
#: also installed where eviction is not supported, so that requests with a budget get 400
ALWAYS = (*STARTUP_HOOKS, *API_HOOKS)
HOOKS = (*ALWAYS, *MEMORY_HOOKS, *ENGINE_HOOKS)
#: names the one untested SGLang version that may run all the same (CONTRIBUTING.md)
GATE_VARIABLE = "SGL_SKIPKV_UNTESTED_SGLANG"

_problems_before: list[str] = []


def tested_version_for(sglang_version: str) -> str:
    """The tested version whose hooks are meant for this one; the newest for an untested one."""
    return sglang_version if sglang_version in TESTED_SGLANG else TESTED_SGLANG[-1]


def of_version(hooks: Iterable[Hook], sglang_version: str) -> tuple[Hook, ...]:
    """Those of ``hooks`` that this version of SGLang is to have."""
    version = tested_version_for(sglang_version)
    return tuple(hook for hook in hooks if not hook.versions or version in hook.versions)


def opened_for(sglang_version: str) -> str | None:
    """What to log where an untested SGLang runs because the operator named it; None elsewhere."""
    named = os.environ.get(variable_of(GATE_VARIABLE, os.environ))
    if sglang_version in TESTED_SGLANG or named != sglang_version:
        return None
    tested = ", ".join(TESTED_SGLANG)
    return (
        f"sgl_skipkv: SGLang {sglang_version} is not a tested version ({tested}); budgets are "
        f"served because {GATE_VARIABLE} names it, and their results may be wrong"
    )


def install(sglang_version: str) -> list[str]:
    """Register every hook whose target has the expected signature; returns what is wrong.

    With any problem only ``ALWAYS`` is hooked: requests with a budget get 400, and the engine is
    unchanged.
    """
    _problems_before.clear()
    if sglang_version not in TESTED_SGLANG and opened_for(sglang_version) is None:
        tested = ", ".join(TESTED_SGLANG)
        _problems_before.append(f"SGLang {sglang_version} is not a tested version ({tested})")
    hooks = of_version(HOOKS, sglang_version)
    functions: dict[Hook, Callable[..., Any]] = {}
    # All are imported before one is registered: SGLang swallows what a plugin raises, and would
    # serve with only some hooks installed.
    for hook in hooks:
        problem = check(hook)
        if problem is None and hook.hooked:
            function, error = attempt(f"sgl_skipkv: hook {hook.target}", partial(function_of, hook))
            if function is not None:
                functions[hook] = function
            else:
                problem = f"hook {hook.target}: {error}"
        if problem is not None:
            _problems_before.append(problem)
    for hook in of_version(ALWAYS, sglang_version) if _problems_before else hooks:
        if hook in functions:
            HookRegistry.register(hook.path, functions[hook], HookType(hook.kind))
    return list(_problems_before)


def note(problem: str) -> None:
    """What is wrong with this SGLang and shows only later than ``install``."""
    if problem not in _problems_before:
        _problems_before.append(problem)


def function_of(hook: Hook) -> Callable[..., Any]:
    """Ours, imported. Its module may not import beside an SGLang that is not tested."""
    function: Callable[..., Any] = pkgutil.resolve_name(f"sgl_skipkv.patches.{hook.function}")
    return function


def problems() -> list[str]:
    """Every problem with a hook, after SGLang applied them."""
    if _problems_before:
        return list(_problems_before)
    found = []
    for hook in of_version(HOOKS, sglang.__version__):
        if hook.hooked and hook.path not in HookRegistry._patched:
            found.append(f"hook {hook.target} was not applied")
        elif (problem := replaced(hook)) is not None:
            found.append(problem)
    return found
