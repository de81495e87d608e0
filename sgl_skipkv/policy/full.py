"""Nothing is ever evicted: the baseline through the same plugin, and a request's way to opt out."""

from sgl_skipkv.policy.base import Policy


class Full(Policy):
    """Without scores: no compaction is ever due."""

    name = "full"
    keeps = "everything: the baseline, and a request's way to opt out"
    evicts = False
