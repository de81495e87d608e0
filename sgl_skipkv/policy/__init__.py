"""Eviction policies by name. A policy is one file here and one line in ``_POLICIES``, or a class of
another package (``installed.py``)."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any, Final

from sgl_skipkv.config import SettingError, Unabridged, build
from sgl_skipkv.policy import installed
from sgl_skipkv.policy.base import JointPolicy, Policy, PolicyParams
from sgl_skipkv.policy.inputs.score_input import ScoreInput, Statistics, Steps
from sgl_skipkv.policy.inputs.sentences import Sentences
from sgl_skipkv.policy.sentence_quotas import with_quotas

# Name -> "module:class". Imported when first asked for, so one policy's imports cost the others
# nothing.
_POLICIES: Final[Mapping[str, str]] = {
    "distinct": "sgl_skipkv.policy.distinct:Distinct",
    "skipkv": "sgl_skipkv.policy.skipkv:SkipKV",
    "skipkv+": "sgl_skipkv.policy.skipkv_plus:SkipKVPlus",
    "rkv": "sgl_skipkv.policy.rkv:RKV",
    "snapkv": "sgl_skipkv.policy.snapkv:SnapKV",
    "tova": "sgl_skipkv.policy.tova:TOVA",
    "h2o": "sgl_skipkv.policy.h2o:H2O",
    "raas": "sgl_skipkv.policy.raas:RaaS",
    "lazy": "sgl_skipkv.policy.lazy:Lazy",
    "rpc": "sgl_skipkv.policy.rpc:RPC",
    "gkv": "sgl_skipkv.policy.gkv:GKV",
    "crystal": "sgl_skipkv.policy.crystal:Crystal",
    "keydiff": "sgl_skipkv.policy.keydiff:KeyDiff",
    "vase": "sgl_skipkv.policy.vase:VaSE",
    "triattention": "sgl_skipkv.policy.triattention:TriAttention",
    "expected": "sgl_skipkv.policy.expected:Expected",
    "streaming": "sgl_skipkv.policy.streaming:Streaming",
    "random": "sgl_skipkv.policy.random:Random",
    "full": "sgl_skipkv.policy.full:Full",
}


def names() -> tuple[str, ...]:
    """All policy names, the default first, those of other packages last."""
    return (*_POLICIES, *(name for name in installed.entries() if name not in _POLICIES))


def built_in() -> tuple[str, ...]:
    """The names of this package's policies, the default first."""
    return tuple(_POLICIES)


def policy_class(name: object) -> type[Policy]:
    """The class behind a name.

    Raises:
        SettingError: no such policy, or one of another package that cannot be used; the message
            lists the names.
    """
    if not isinstance(name, str) or name not in names():
        raise SettingError("kv_policy", "a policy name", name, ", ".join(names()))
    if name in _POLICIES:
        cls: type[Policy] = pkgutil.resolve_name(_POLICIES[name])
        return cls
    found = installed.load(name)
    if isinstance(found, str):
        others = ", ".join(other for other in names() if other != name)
        raise SettingError("kv_policy", "a policy that can be used", Unabridged(found), others)
    return found


def make_policy(name: str, **params: Any) -> Policy:
    """A policy with its parameters validated.

    Args:
        params: by the names of the policy's ``Params`` class; the others keep their defaults.

    Raises:
        SettingError: unknown policy, unknown parameter, wrong type or range.
    """
    return with_params(policy_class(name), params)


def with_params(
    cls: type[Policy], params: Mapping[str, Any], model_window_tokens: int = 0
) -> Policy:
    """A policy of this class, or with quotas for sentences where the parameters ask for them.

    Args:
        model_window_tokens: the largest window of the model's layers; 0: they have none.

    Raises:
        SettingError: unknown parameter, wrong type or range.
    """
    checked = build(cls.Params, params, prefix="kv_params.")
    try:
        hash(checked)  # requests with equal parameters are scored together
    except TypeError as error:
        expected, choices = "values that can be hashed", "tuples instead of lists in its Params"
        raise SettingError(f"kv_params of {cls.name}", expected, f"{error}", choices) from error
    return (with_quotas(cls) if checked.quotas else cls)(checked, model_window_tokens)


__all__ = [
    "JointPolicy",
    "Policy",
    "PolicyParams",
    "ScoreInput",
    "Sentences",
    "Statistics",
    "Steps",
    "built_in",
    "make_policy",
    "names",
    "policy_class",
    "with_params",
]
