"""The recorded source hashes of hooked functions: what was read when a version was tested.

An equal signature says little about what a function does. So ``hook_bodies.json`` has, for every
tested SGLang, a hash of the source of each hook's target. Another hash is no error, because most
changes do not matter to a hook; it says which functions somebody has to read.
``python tests/release/hooks.py --record`` writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

import sglang
from sglang.srt.plugins import load_plugins

from sgl_skipkv.patches import registry
from sgl_skipkv.patches.hook import Hook, body_hash

FILE = Path(__file__).with_name("hook_bodies.json")


class HookState(NamedTuple):
    """How one hook stands: ``text`` says what is wrong, or from which version its body differs."""

    hook: Hook
    state: Literal["ok", "changed", "wrong"]
    text: str


def body_hashes(sglang_version: str) -> dict[str, str]:
    """Target -> hash of its source as it is now; without targets that this SGLang lacks."""
    hashes = {}
    for hook in registry.of_version(registry.HOOKS, sglang_version):
        try:
            hashes[hook.target] = body_hash(hook)
        except (ImportError, AttributeError, KeyError):
            continue  # ``hook.check`` names it
    return hashes


def hook_states() -> tuple[list[HookState], list[str]]:
    """Every hook of the installed SGLang, and all problems, after SGLang has loaded its plugins.

    Call it before anything else loads them: a hooked function has another source.
    """
    version = sglang.__version__
    tested = registry.tested_version_for(version)
    known: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    now = body_hashes(version)
    load_plugins()
    problems = registry.problems()
    states = []
    for hook in registry.of_version(registry.HOOKS, version):
        name = f"hook {hook.target} "
        errors = [problem.removeprefix(name) for problem in problems if name in problem]
        if errors:
            states.append(HookState(hook, "wrong", errors[0]))
        elif now[hook.target] != known[tested].get(hook.target):
            states.append(HookState(hook, "changed", f"body changed since {tested}"))
        else:
            states.append(HookState(hook, "ok", "ok"))
    return states, problems
