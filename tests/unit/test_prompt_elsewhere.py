"""PD disaggregation: what a decode server serves needs no recording of a prompt."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from synthetic import SyntheticServer, served

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches.limits import ServerLimits
from sgl_skipkv.policy import make_policy, names
from sgl_skipkv.request.settings import resolve_request

LIMITS = ServerLimits(prompt_is_elsewhere=True)
EVICTING = [name for name in names() if name != "full"]


@pytest.mark.parametrize("policy", EVICTING)
def test_no_query_of_the_prompt_is_used(policy: str) -> None:
    """With the smallest budgets, and shares and demands that are smaller."""
    server = SyntheticServer()
    for interval, window, sink, share, more in product(
        (8, 128), (1, 16), (0, 4), ({}, {"fraction": 0.1}, {"coverage": 0.5}), (0, 50)
    ):
        parameters = {"interval": interval, "window": window, "sink": sink, **share}
        budget = make_policy(policy, **parameters).min_budget_tokens + more
        state = served(
            server, prefill=False, kv_policy=policy, kv_budget=budget, kv_params=parameters
        ).state
        server.runtime.admit(state, 1, state.prompt.tokens)
        assert state.records_from >= state.prompt.tokens, parameters
        server.runtime.close(state, 0, (), "abort")


def asked(**keys: Any) -> Any:
    settings = resolve_request({"kv_budget": 64, **keys}, ServerConfig(), 0)
    assert settings is not None
    return settings


@pytest.mark.parametrize(
    ("name", "value", "served_value"),
    [("protect_prompt", False, True), ("count_prompt", True, False)],
)
def test_what_needs_the_prompt_is_refused(name: str, value: bool, served_value: bool) -> None:
    wanted = asked(kv_params={name: value})
    with pytest.raises(SettingError) as refused:
        LIMITS.check(wanted)
    assert str(refused.value) == (
        f"kv_params.{name}: expected {str(served_value).lower()} on this server (PD "
        f"disaggregation: nothing is recorded of the prompt), got {value}; choices: leave it out"
    )
    ServerLimits().check(wanted)
    LIMITS.check(asked(kv_params={name: served_value}))
