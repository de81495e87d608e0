"""One place where this package touches SGLang, and whether it is as expected there."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from typing import Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

Kind = Literal["before", "after", "around", "replace", "extend", "use"]


@dataclass(frozen=True)
class Hook:
    """One touched place of SGLang.

    Attributes:
        target: below ``sglang.srt.``.
        kind: how it is hooked; ``extend`` marks a method that a subclass of ours overrides,
            ``use`` a function that we call.
        signature: parameters expected there, without annotations.
        function: ``module:attribute`` below ``sgl_skipkv.patches.``.
        why: what would be wrong without it.
    """

    target: str
    kind: Kind
    signature: str
    function: str
    why: str

    @property
    def path(self) -> str:
        return f"sglang.srt.{self.target}"

    @property
    def hooked(self) -> bool:
        return self.kind not in ("extend", "use")


def current_signature(hook: Hook) -> str:
    """The parameters found at a hook's target, without annotations; ``class`` for a class.

    Raises:
        ImportError, AttributeError, KeyError: no such target in this SGLang.
    """
    owner_path, _, name = hook.path.rpartition(".")
    # Through __dict__: an inherited method would be copied onto the subclass by hooking it there.
    found = vars(pkgutil.resolve_name(owner_path))[name]
    found = getattr(found, "__func__", found)
    if isinstance(found, type):
        return "class"
    signature = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def check(hook: Hook) -> str | None:
    """What is wrong with a hook's target before it is hooked, or None."""
    try:
        found = current_signature(hook)
    except (ImportError, AttributeError, KeyError) as error:
        return f"hook {hook.target} not found ({error!r:.100})"
    if found != hook.signature:
        return f"hook {hook.target} has signature {found}, expected {hook.signature}"
    others = [
        hook for kind, hook, _ in HookRegistry._hooks.get(hook.path, ()) if kind is HookType.REPLACE
    ]
    return f"hook {hook.target} is replaced by another plugin" if others else None
