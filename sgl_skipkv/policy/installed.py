"""Policies of other packages, which register them by entry points.

    [project.entry-points."sgl_skipkv.policies"]
    openings = "openings:Openings"

A package's code is imported when its policy is first asked for, so one that is broken affects the
requests with its name and nothing else. A name of this package stays this package's.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, get_args

from sgl_skipkv.policy.base import AttentionOver, JointPolicy, Policy, PolicyParams

GROUP: Final = "sgl_skipkv.policies"
#: read for every running request in every step, where an error would end the server
_SEALED: Final = {
    *("budget_after", "candidates", "span", "min_budget_tokens", "pinned_tail_tokens"),
    *("needs_track", "records_queries"),
}
#: what a class says of itself, beside its texts
_FLAGS: Final = Policy.__annotations__.keys() - {"name", "keeps", "source", "Params"}

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
    return " and ".join(sorted({str(entry.dist and entry.dist.name) for entry in entries()[name]}))


def described() -> list[str]:
    """Every entry, its package and version, to be compared with another machine's."""
    every = (entry for found in entries().values() for entry in found)
    return [
        f"{entry.name} = {entry.value} ({entry.dist and entry.dist.name} "
        f"{entry.dist and entry.dist.version})"
        for entry in every
    ]


@functools.cache
def load(name: str) -> type[Policy] | str:
    """The class that a package registers under this name, or why there is none."""
    if len(entries()[name]) > 1:
        return f"several packages register it: {owners(name)}"
    (entry,) = entries()[name]
    what, failed = f"{entry.value} of package {owners(name)}", "fails to import"
    try:
        found = entry.load()
        wrong = _wrong(found, name)
        if wrong is None:
            failed = "cannot be made without parameters"
            hash(found(found.Params()).params)  # requests with equal parameters are scored together
    except (Exception, SystemExit) as error:  # another package's code: requests go on
        logger.exception("kv_policy %s: %s", name, what)
        return f"{what} {failed}, {type(error).__name__}; see the log"
    return f"{what} {wrong}" if wrong else found


def _wrong(found: Any, name: str) -> str | None:
    """What keeps it from being a policy."""
    if not (isinstance(found, type) and issubclass(found, Policy)):
        return "is no subclass of sgl_skipkv.policy.Policy"
    if getattr(found, "name", None) != name:
        return f"has another name: {getattr(found, 'name', None)!r}"
    if not (isinstance(found.Params, type) and issubclass(found.Params, PolicyParams)):
        return "has Params that are no subclass of sgl_skipkv.policy.PolicyParams"
    return _wrong_members(found) or _wrong_parameters(found.Params)


def _wrong_members(cls: type[Policy]) -> str | None:
    """Members that would go unnoticed until they do harm: a wrong word until ranks combine their
    scores, a misspelt flag for good."""
    if cls.over_ranks not in ("mean", "max", None):
        return f"has over_ranks {cls.over_ranks!r}, not one of mean, max, None"
    if cls.attention_over not in get_args(AttentionOver):
        choices = ", ".join(get_args(AttentionOver))
        return f"has attention_over {cls.attention_over!r}, not one of {choices}"
    others = (base for base in cls.__mro__ if base.__module__.partition(".")[0] != "sgl_skipkv")
    own = {
        name: value for base in others if base is not object for name, value in vars(base).items()
    }
    if sealed := sorted(_SEALED & own.keys()):
        return f"overrides {', '.join(sealed)}, which the scheduler reads in every step"
    if not isinstance(cls.keeps, str):
        return f"has keeps {cls.keeps!r}, not a text"
    for name in sorted(own.keys() - Policy.__annotations__.keys()):
        meant = get_close_matches(name, _FLAGS, n=1, cutoff=0.8)
        if meant and not callable(own[name]):
            return f"has {name}; perhaps {meant[0]} is meant"
    if cls.evicts and cls.scores_together is JointPolicy.scores_together:
        return "has no scores_together, as a JointPolicy needs"
    if cls.evicts and cls.scores_together is Policy.scores_together and cls.scores is Policy.scores:
        return "has neither scores nor scores_together"
    return None


def _wrong_parameters(params: type[PolicyParams]) -> str | None:
    """A range of every policy's parameters is what the engine can do."""
    for name, field in PolicyParams.model_fields.items():
        own = params.model_fields[name]
        if (own.annotation, own.metadata) != (field.annotation, field.metadata):
            return f"has another type or range for {name}"
    return None
