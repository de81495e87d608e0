"""Tables of the policies: what each keeps, and its parameters."""

from __future__ import annotations

import json
from typing import Literal, get_args, get_origin

from bench.lib.table_text import markdown
from sgl_skipkv.policy import PolicyParams, built_in, policy_class


def policies() -> str:
    """In the order of the registry, whose first is the default."""
    lines = []
    for name in built_in():
        policy, default = policy_class(name), " (default)" if name == built_in()[0] else ""
        lines.append([f"`{name}`{default}", policy.keeps, policy.source])
    return markdown(["`kv_policy`", "keeps", "source"], lines)


def parameters() -> str:
    """Every parameter once, with the policies that have it."""
    of_policies: dict[tuple[str, str, str], list[str]] = {}
    for name in built_in():
        for parameter, field in policy_class(name).Params.model_fields.items():
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            given = field.annotation
            literals = get_args(given) if get_origin(given) is Literal else ()
            choices = ", ".join(f"`{choice}`" for choice in literals)
            meaning = ": ".join(filter(None, [field.description, choices]))
            of_policies.setdefault((parameter, default, meaning), []).append(f"`{name}`")
    shared = PolicyParams.model_fields
    lines = [
        [f"`{parameter}`", default, "all" if parameter in shared else ", ".join(owners), meaning]
        for (parameter, default, meaning), owners in of_policies.items()
    ]
    return markdown(["parameter", "default", "policies", "meaning"], lines)
