"""One hook into SGLang, and the checks of its target: the signature, and a hash of the source."""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

Kind = Literal["before", "after", "around", "replace", "extend", "use"]


@dataclass(frozen=True)
class Hook:
    """One function or class of SGLang that the plugin hooks, overrides or uses.

    Attributes:
        target: below ``sglang.srt.``.
        signature: the expected parameters, without annotations; ``class`` for a class.
        function: ``module:attribute`` below ``sgl_skipkv.patches.``.
        why: what would be wrong without it.
        versions: of SGLang that have this target; none: all tested ones have it.
    """

    kind: Kind
    target: str
    signature: str
    function: str
    why: str
    versions: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"sglang.srt.{self.target}"

    @property
    def hooked(self) -> bool:
        return self.kind not in ("extend", "use")


def _hook(kind: Kind, target: str, function: str, why: str, *versions: str) -> Hook:
    """With the expected signature at the end of ``target``; a class has none."""
    name, opening, parameters = target.partition("(")
    return Hook(kind, name, opening + parameters or "class", function, why, versions)


before = partial(_hook, "before")
after = partial(_hook, "after")
around = partial(_hook, "around")
replace = partial(_hook, "replace")
#: a method that a subclass in the plugin overrides
extends = partial(_hook, "extend")
#: a function that the plugin calls
uses = partial(_hook, "use")


def target_of(hook: Hook) -> Any:
    """The function or class that a hook names, as it is now.

    Raises:
        ImportError, AttributeError, KeyError: no such target in this SGLang.
    """
    owner_path, _, name = hook.path.rpartition(".")
    # From __dict__: hooking an inherited method would copy it onto the subclass.
    target = vars(pkgutil.resolve_name(owner_path))[name]
    return getattr(target, "__func__", target)


def current_signature(hook: Hook) -> str:
    """The parameters of a hook's target, without annotations; ``class`` for a class.

    Raises:
        ImportError, AttributeError, KeyError: no such target in this SGLang.
    """
    target = target_of(hook)
    if isinstance(target, type):
        return "class"
    signature = inspect.signature(target)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def body_hash(hook: Hook) -> str:
    """The first 12 hexadecimal digits of SHA-256 of the source of a hook's target.

    A wrapper has another source than the function inside, so hash before hooks are applied.

    Raises:
        ImportError, AttributeError, KeyError: no such target in this SGLang.
    """
    source = inspect.getsource(target_of(hook))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def check(hook: Hook) -> str | None:
    """What is wrong with a hook's target before it is hooked, or None."""
    try:
        signature = current_signature(hook)
    except (ImportError, AttributeError, KeyError) as error:
        return f"hook {hook.target} not found ({error!r:.100})"
    if signature != hook.signature:
        return f"hook {hook.target} has signature {signature}, expected {hook.signature}"
    return replaced(hook)


def replaced(hook: Hook) -> str | None:
    """That another plugin puts a function of its own in a target's place, or None. One that is
    loaded after ours does so too."""
    functions = [
        function
        for kind, function, _ in HookRegistry._hooks.get(hook.path, ())
        if kind is HookType.REPLACE
    ]
    modules = [str(getattr(function, "__module__", "")) for function in functions]
    others = [module for module in modules if not module.startswith("sgl_skipkv.")]
    return f"hook {hook.target} is replaced by another plugin" if others else None
