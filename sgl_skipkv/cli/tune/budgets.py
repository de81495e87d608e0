"""The settings to compare: budgets as given, or as shares of the full cache's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sgl_skipkv.cli.tune.runs import Setting
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.request.settings import RequestSettings, resolve_request


def resolved(setting: Setting, kv_params: Mapping[str, Any]) -> RequestSettings:
    """The settings of its requests on a server without settings of its own.

    Raises:
        SettingError: what such a server refuses.
    """
    keys = {
        "kv_policy": setting.policy,
        "kv_budget": setting.kv_budget,
        "kv_params": dict(kv_params),
    }
    settings = resolve_request(keys, ServerConfig())
    assert settings is not None  # because the keys name a policy
    return settings


def given_settings(
    policies: Sequence[str],
    budgets: Sequence[int],
    kv_params: Mapping[str, Any],
    prompt_tokens: int,
) -> list[Setting]:
    """Every policy with every budget.

    Args:
        prompt_tokens: of the longest prompt, for policies that count it.

    Raises:
        SettingError: a budget below a policy's smallest.
    """
    settings = [Setting(policy, budget) for policy in policies for budget in sorted({*budgets})]
    for setting in settings:
        resolved(setting, kv_params).check_prompt(prompt_tokens)
    return settings


def least_tokens(policy: str, kv_params: Mapping[str, Any], prompt_tokens: int) -> int:
    """The policy's smallest budget with these parameters, for prompts of up to this length."""
    largest = Setting(policy, ServerConfig().kv_budget_max)
    return resolved(largest, kv_params).least_tokens(prompt_tokens)


def shared_settings(
    leasts: Mapping[str, int], shares: Sequence[float], full_tokens: float
) -> tuple[list[Setting], list[str]]:
    """Every policy with these shares of the full cache's output, and a note for each that is left
    out because its budget is too small.

    Args:
        leasts: the smallest budget of every policy.
        full_tokens: median output of the full cache.

    Raises:
        SettingError: all of them are too small.
    """
    settings, notes = [], []
    budgets = {share: round(share * full_tokens) for share in sorted(shares)}
    for policy, least in leasts.items():
        enough = {budget for budget in budgets.values() if budget >= least}
        settings += [Setting(policy, budget) for budget in sorted(enough)]
        notes += [
            f"Left out: share {share:g} with kv_policy {policy}, because {budget} of "
            f"{full_tokens:g} tokens (median) are below its smallest kv_budget, {least}."
            for share, budget in budgets.items()
            if budget < least
        ]
    if not settings:
        smallest = min(leasts.values())
        expected = f"one that is {smallest} tokens or more of a median output of {full_tokens:g}"
        choices = "larger shares, --budgets, or prompts with longer outputs"
        raise SettingError("shares", expected, [*shares], choices)
    return settings, notes
