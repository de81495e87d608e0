"""How many tokens a compaction keeps, from docs/settings.md: none of the package's arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any


def budget_at(
    policy: Any, kv_budget: int, compaction: int, generated: int, prompt_tokens: int = 0
) -> int:
    """The budget of a request's n-th compaction after so many generated tokens, without coverage.

    Args:
        compaction: n, the first is 1; 0: of no compaction, from which the first is due.
        policy: only its name and settings are read.
        prompt_tokens: of the prompt, where ``count_prompt`` may be true.
    """
    params = policy.params
    counted = prompt_tokens if params.count_prompt else 0
    least = least_budget(policy, prompt_tokens)
    if policy.name == "rpc":
        grown = params.window + compaction * params.interval // params.ratio
        kv_budget = min(kv_budget, max(grown, least - (0 if compaction else params.interval)))
    share = math.floor(Fraction(params.fraction) * (generated + counted))
    return min(kv_budget, max(share, least))


def least_budget(policy: Any, prompt_tokens: int = 0) -> int:
    """What every compaction keeps."""
    params = policy.params
    counted = prompt_tokens if params.count_prompt and params.protect_prompt else 0
    return params.sink + max(params.window, policy.model_window_tokens) + 1 + counted
