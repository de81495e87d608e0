"""Hundreds of drawn bodies through the real server: 200 or 400, never anything else.

``hostile_bodies.py`` draws them and says what must come of each; ``make reliability`` sends 2,000.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hostile_bodies import Body, judge, plain_body
from hostile_client import (
    answers_to_values,
    drawn,
    error_of,
    p99_ms,
    refusal,
    send,
    wrongly_answered,
)
from servers import HTTPFailure, Server
from test_bad_input import WRONG

from sgl_skipkv.config import ServerConfig

pytestmark = pytest.mark.server

BODIES = 800
# The session's server: a vector, no defaults. What the file is called does not matter here.
SETTINGS = ServerConfig(steering_vector="v.safetensors")


def admitted(server: Server) -> int:
    """Requests that SGLang has ever finished."""
    found = re.findall(r"^sglang:num_requests_total\{.*\} (\S+)$", server.get("/metrics"), re.M)
    return int(sum(map(float, found)))


def test_every_body_is_answered_as_the_schema_says(server: Server) -> None:
    """Nothing wrong is admitted, nothing right refused, and no message repeats what it was sent."""
    sent = drawn(BODIES)
    verdicts = [judge(body, SETTINGS) for body in sent]
    before = admitted(server)
    wrong = wrongly_answered(server, sent, verdicts)
    assert not wrong, f"{len(wrong)} of {len(sent)}, the first: {wrong[0]}"
    accepted = [verdict.settings for verdict in verdicts if not verdict.names]
    budgeted = sum(one is not None for one in accepted)
    # an empty run proves nothing
    assert len(sent) == BODIES and budgeted > 120 and len(sent) - len(accepted) > 360
    server.assert_clean()
    assert admitted(server) - before == len(accepted)


@pytest.mark.parametrize("custom", [[1], "kv_budget", 5, [["kv_budget", 64]]])
@pytest.mark.parametrize("stream", [False, True])
def test_keys_beside_custom_params_that_are_no_object(
    server: Server, custom: Any, stream: bool
) -> None:
    """Found by the draws above: 500, and a stream that broke off."""
    body = plain_body("/generate", {"kv_budget": 64, "custom_params": custom}, stream=stream)
    assert refusal(server, "/generate", body).startswith("custom_params: expected an object")


@pytest.mark.parametrize("depth", [400, 900, 1000, 1015])
def test_values_that_are_nested_too_deep_to_compare(server: Server, depth: int) -> None:
    """The two places are compared: found at a depth of 1,000, where Python gives up."""
    deep = "[" * depth + "]" * depth
    params = '{"max_new_tokens": 1, "kv_params": %s, "custom_params": {"kv_params": %s}}'
    body = '{"text": "abc", "sampling_params": ' + params % (deep, deep) + "}"
    answer = send(server, Body("/generate", body.encode()))
    assert answer.status == 400, answer
    assert error_of(HTTPFailure(400, answer.text)).startswith("kv_params: expected ")


def test_refusals_are_quick(server: Server) -> None:
    """One at a time. Alone on a machine the slowest of a hundred takes under 50 ms."""
    answers = answers_to_values(server, [keys for _, keys in WRONG * 4])
    assert {answer.status for answer in answers} == {400}
    print(f"{len(answers)} refusals: p99 {p99_ms(answers):.1f} ms")
    assert p99_ms(answers) < 250  # the machine that tests run on does other things meanwhile


def test_the_model_of_the_schema_is_not_empty() -> None:
    """A few bodies by hand, so that the model itself is not what is wrong."""
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("/generate", {"kv_budget": 64}, True),
        ("/generate", {"kv_budget": "64"}, False),
        ("/generate", {"kv_bugdet": 64}, False),
        ("/v1/completions", {"kv_bugdet": 64}, False),
        ("/v1/completions", {"k": 64}, True),  # OpenAI's schema ignores what it lacks
        ("/v1/completions", {"kv_policy": "full", "custom_params": {"kv_policy": "rkv"}}, False),
    ]
    for path, keys, right in cases:
        holder = {"sampling_params": keys} if path == "/generate" else keys
        body = Body(path, json.dumps(holder).encode())
        assert (judge(body, SETTINGS).names == ()) is right, (path, keys)
