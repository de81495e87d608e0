"""Installs all hooks into SGLang and verifies them.

SGLang applies hooks with its own registry and only logs errors. So each hook is checked twice here:
its target and signature before it is registered, and afterwards that SGLang applied it.
"""

from __future__ import annotations

import pkgutil

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_skipkv.patches.api.hooks import API_HOOKS
from sgl_skipkv.patches.engine.hooks import ENGINE_HOOKS
from sgl_skipkv.patches.hook import check
from sgl_skipkv.patches.startup.hooks import MEMORY_HOOKS, STARTUP_HOOKS

TESTED_SGLANG = ("0.5.23",)
#: also installed where eviction is not supported, so that requests with a budget get 400
ALWAYS = (*STARTUP_HOOKS, *API_HOOKS)
HOOKS = (*ALWAYS, *MEMORY_HOOKS, *ENGINE_HOOKS)

_problems_before: list[str] = []


def install(sglang_version: str) -> list[str]:
    """Register every hook whose target has the expected signature; returns what is wrong.

    With any problem only ``ALWAYS`` is hooked: requests with a budget get 400, and the engine is
    unchanged.
    """
    _problems_before.clear()
    if sglang_version not in TESTED_SGLANG:
        tested = ", ".join(TESTED_SGLANG)
        _problems_before.append(f"SGLang {sglang_version} is not a tested version ({tested})")
    problem_of = {hook: check(hook) for hook in HOOKS}
    _problems_before.extend(problem for problem in problem_of.values() if problem is not None)
    for hook in ALWAYS if _problems_before else HOOKS:
        if problem_of[hook] is None and hook.hooked:
            function = pkgutil.resolve_name(f"sgl_skipkv.patches.{hook.function}")
            HookRegistry.register(hook.path, function, HookType(hook.kind))
    return list(_problems_before)


def load() -> None:
    """Let SGLang load its plugins, as it does when a server starts."""
    load_plugins()


def problems() -> list[str]:
    """Every problem with a hook, after SGLang applied them."""
    if _problems_before:
        return list(_problems_before)
    return [
        f"hook {hook.target} was not applied"
        for hook in HOOKS
        if hook.hooked and hook.path not in HookRegistry._patched
    ]
