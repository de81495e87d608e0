"""Policies of other packages, which register them by entry points.

    [project.entry-points."sgl_skipkv.policies"]
    openings = "openings:Openings"

A package's code is imported when its policy is first asked for, so one that is broken affects the
requests with its name and nothing else.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, get_args

from sgl_skipkv.policy.base import AttentionOver, Policy, PolicyParams

GROUP: Final = "sgl_skipkv.policies"

logger = logging.getLogger(__name__)


@functools.cache
def entries() -> Mapping[str, Sequence[EntryPoint]]:
    """Name -> its entry points, in the order of names. Read once per process."""
    found = defaultdict(list)
    for entry in entry_points(group=GROUP):
        found[entry.name].append(entry)
    return dict(sorted(found.items()))


def owners(name: str) -> str:
    """The packages that register a name, for messages."""
    return " and ".join(sorted({entry.dist.name for entry in entries()[name] if entry.dist}))


@functools.cache
def load(name: str) -> type[Policy] | str:
    """The class that a package registers under this name, or why there is none."""
    if len(entries()[name]) > 1:
        return f"several packages register it: {owners(name)}"
    (entry,) = entries()[name]
    try:
        found = entry.load()
    except Exception as error:  # another package's code: whatever it raises, requests go on
        logger.exception("kv_policy %s of package %s (%s)", name, owners(name), entry.value)
        why = f"{entry.value} of package {owners(name)} fails to import, {type(error).__name__}"
        return f"{why}; see the log"
    wrong = _wrong(found, name)
    return f"{entry.value} of package {owners(name)} {wrong}" if wrong else found


def _wrong(found: Any, name: str) -> str | None:
    """What keeps it from being a policy. A wrong word in one of these would go unnoticed until
    ranks combine their scores."""
    if not (isinstance(found, type) and issubclass(found, Policy)):
        return "is no subclass of sgl_skipkv.policy.Policy"
    if getattr(found, "name", None) != name:
        return f"has another name: {getattr(found, 'name', None)!r}"
    if not (isinstance(found.Params, type) and issubclass(found.Params, PolicyParams)):
        return "has Params that are no subclass of sgl_skipkv.policy.PolicyParams"
    if found.over_ranks not in ("mean", "max", None):
        return f"has over_ranks {found.over_ranks!r}, not one of mean, max, None"
    if found.attention_over not in get_args(AttentionOver):
        choices = ", ".join(get_args(AttentionOver))
        return f"has attention_over {found.attention_over!r}, not one of {choices}"
    return None
