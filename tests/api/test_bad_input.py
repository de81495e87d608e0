"""Wrong values over HTTP: 400 with the four parts of the message, and the server serves on."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from hostile_bodies import PATHS, plain_body
from hostile_client import refusal
from servers import Server
from tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.server

OK = {"kv_budget": 64, "kv_policy": "skipkv"}
# (field named in the message, keys)
WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("kv_budget", {"kv_budget": v}) for v in (True, False, "64", "", 0, -5, 1.5, 64.0, [64], {})),
    *(("kv_budget", {"kv_budget": v}) for v in (12, 10**18, 2**64, 10**40, [[1]], {"n": 1})),
    ("kv_budget", {"kv_policy": "rkv"}),
    ("kv_budget", {"kv_params": {"power": 2}}),
    *(("kv_policy", {**OK, "kv_policy": v}) for v in ("", "SkipKV", "h3o", 7, True, ["rkv"], {})),
    *(("kv_params", {**OK, "kv_params": v}) for v in (1, "tau", [], [1], True)),
    ("kv_params.tua", {**OK, "kv_params": {"tua": 0.9}}),
    ("kv_params.tau", {**OK, "kv_policy": "rkv", "kv_params": {"tau": 0.9}}),
    *(("kv_params.tau", {**OK, "kv_params": {"tau": v}}) for v in ("0.9", True, -0.1, 1.1, [0.9])),
    *(("kv_params.sigma", {**OK, "kv_params": {"sigma": v}}) for v in (2, "x", [])),
    *(("kv_params.kernel", {**OK, "kv_params": {"kernel": v}}) for v in (0, 4, 7.0, True)),
    *(("kv_params.interval", {**OK, "kv_params": {"interval": v}}) for v in (0, 7, 1.5, "16")),
    *(("kv_params.window", {**OK, "kv_params": {"window": v}}) for v in (0, 17, "8")),
    ("kv_params.delimiters", {**OK, "kv_params": {"delimiters": "sentence"}}),
    ("kv_params.seed", {**OK, "kv_policy": "random", "kv_params": {"seed": -1}}),
    ("kv_params.protect_prompt", {**OK, "kv_params": {"protect_prompt": 1}}),
    *(("kv_reuse", {**OK, "kv_reuse": v}) for v in (True, 0, 1, "", "Keep", "keep ", ["keep"], {})),
    *(("kv_reuse", {"kv_reuse": v}) for v in ("keep", 0, {})),
    ("kv_reuse", {**OK, "kv_policy": "full", "kv_reuse": "keep"}),
    ("kv_reuse", {**OK, "kv_params": {"count_prompt": True}, "kv_reuse": "budget"}),
    ("kv_params.drop_thoughts", {**OK, "kv_params": {"drop_thoughts": True}}),
    ("kv_params.drop_thoughts", {**OK, "kv_params": {"drop_thoughts": 1}, "kv_reuse": "keep"}),
    *(
        (name, {name: 64})
        for name in ("kv_resue", "kv_bugdet", "KV_BUDGET", "kv-budget", "stering", "kv_interval")
    ),
    ("skipkv_budget", {**OK, "skipkv_budget": 64}),
    *(("steering", {"steering": v}) for v in (10.5, -11, 10**40, True, "on", [1.0], {})),
]


def assert_refused(
    server: Server, field: str, body: dict[str, Any], path: str = "/generate"
) -> str:
    """With 400, and a message of field, expectation, value and choices."""
    message = refusal(server, path, body)
    assert message.startswith(f"{field}: expected "), message
    assert ", got " in message and "; choices: " in message, message
    assert len(message) < 500
    return message


def assert_generate_refuses(server: Server, field: str, params: dict[str, Any], **top: Any) -> str:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 4, **params}, **top}
    return assert_refused(server, field, body)


@pytest.mark.smoke
@pytest.mark.parametrize("where", ["sampling_params", "custom_params", "streamed"])
def test_generate_refuses_every_wrong_value(server: Server, where: str) -> None:
    def send(wrong: tuple[str, dict[str, Any]]) -> None:
        keys = {"custom_params": wrong[1]} if where == "custom_params" else wrong[1]
        assert_generate_refuses(server, wrong[0], keys, stream=where == "streamed")

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(send, WRONG))) == len(WRONG)
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"text": "abc", "sampling_params": params})
    assert answer["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_refuses_every_wrong_value(server: Server, path: str, stream: bool) -> None:
    for field, keys in WRONG[::3] if stream else WRONG:
        body = plain_body(path, {"max_tokens": 4, **keys}, stream=stream)
        assert_refused(server, field, body, path)


def test_prompt_that_uses_up_a_counted_budget(server: Server) -> None:
    params = {"kv_budget": 40, "kv_params": {"count_prompt": True}}
    assert_generate_refuses(server, "kv_budget", params, text="a" * 50)


def test_thoughts_of_a_model_that_has_none(server: Server) -> None:
    """Known only once the model is loaded, and 400 before any stream begins."""
    params = {**OK, "kv_reuse": "keep", "kv_params": {"drop_thoughts": True}}
    for path, stream in itertools.product(PATHS, (False, True)):
        body = plain_body(path, params, stream=stream)
        message = assert_refused(server, "kv_params.drop_thoughts", body, path)
        assert "the model's vocabulary has no </think>" in message


@pytest.mark.parametrize("stream", [False, True])
def test_ids_that_use_up_a_counted_budget(server: Server, stream: bool) -> None:
    """Streamed too: their number is known before the answer begins. Each prompt by its own keys."""
    ids, counts = [5] * 100, {"kv_params": {"count_prompt": True}}
    params = [{"max_new_tokens": 2, **counts, "kv_budget": budget} for budget in (200, 40)]
    body = {"input_ids": [ids, ids], "sampling_params": params, "stream": stream}
    assert_refused(server, "kv_budget", body)
    server.post("/generate", {**body, "input_ids": [ids, [5] * 8]})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_ids_outside_the_vocabulary(server: Server, path: str, stream: bool) -> None:
    """Each of these ends the scheduler of SGLang without the plugin. No key of ours is needed."""
    for wrong in (-1, VOCAB_SIZE, 2**31, 2**62):
        for ids in ([5, wrong], [[5], [6, wrong]]):
            body = plain_body(path, {}, prompt=ids, stream=stream)
            assert_refused(server, "input_ids", body, path)
        least = "min_new_tokens" if path == "/generate" else "min_tokens"
        params = {"stop_token_ids": [5, wrong], least: 1}
        assert_refused(server, "stop_token_ids", plain_body(path, params, stream=stream), path)
    server.post(path, plain_body(path, {}, prompt=[VOCAB_SIZE - 1]))


@pytest.mark.smoke
def test_beam_search_and_sessions_are_refused_beside_a_budget(server: Server) -> None:
    session = server.post("/open_session", {"capacity_of_str_len": 1000})
    try:
        for keys, off in (
            ({"kv_budget": 64}, 'kv_policy "full"'),
            ({"steering": 0.1}, "steering false"),
            ({"kv_budget": 64, "steering": 0.1}, 'kv_policy "full" and steering false'),
        ):
            for params, top in (({"beam_width": 2}, {}), ({}, {"session_params": {"id": session}})):
                field = next(iter(keys))
                message = assert_generate_refuses(server, field, {**params, **keys}, **top)
                assert f"only one of the two, or {off}" in message
    finally:
        server.post("/close_session", {"session_id": session})


def test_keys_in_objects_that_sglang_drops_are_refused(server: Server) -> None:
    """The request would run without the budget that it asks for. The message has nothing else of
    the body."""
    assert_generate_refuses(server, "custom_params.kv_budget", {}, custom_params={"kv_budget": 64})
    assert_generate_refuses(server, "extra_body.kv_bugdet", {}, extra_body={"kv_bugdet": 64})
    nested = {"metadata": {"kv_budget": "64"}}
    wrong: tuple[tuple[str, dict[str, Any]], ...] = (
        ("extra_body.kv_budget", {"kv_budget": 64}),
        ("extra_body.kv_bugdet", {"kv_bugdet": 64}),
        ("extra_body.metadata.kv_budget", nested),
        ("extra_body.custom_params.kv_budget", {"custom_params": {"kv_budget": 64}}),
        ("sampling_params.kv_budget", {"kv_budget": 64}),
        ("options.kv_budget", {"kv_budget": 64}),
    )
    paths = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
    cases = [*itertools.product(paths, wrong)]
    for path in ("/v1/responses", "/v1/messages"):
        cases.append((path, ("custom_params.kv_budget", {"kv_budget": 64})))
    more = {"input": "1", "model": server.get("/v1/models")["data"][0]["id"]}  # of responses
    for path, (field, content) in cases:
        place = field.partition(".")[0]
        for stream in (False, True):
            body = {**plain_body(path, {}, stream=stream), **more, place: content}
            message = assert_refused(server, field, body, path)
            assert "expected nothing" in message and "at the top of the body" in message
        server.post(path, {**plain_body(path, {}), **more, place: {"somebody": "else"}})
    for path, place in (("/api/generate", "extra_body"), ("/api/chat", "sampling_params")):
        message = refusal(server, path, {**plain_body(path, {}), place: {"kv_budget": 64}})
        assert f"{place}.kv_budget: expected nothing outside of options" in message


def test_a_turn_that_is_refused_leaves_its_session_alone(server: Server) -> None:
    """With ``replace`` SGLang's scheduler drops the turns behind the one that is named; a stream is
    refused before it begins."""
    session = server.post("/open_session", {"capacity_of_str_len": 1000})

    def turn(rid: str | None, keys: dict[str, Any], **more: Any) -> dict[str, Any]:
        where = {"id": session, "rid": rid, **more}
        params = {"max_new_tokens": 3, "ignore_eos": True, **keys}
        return {"input_ids": [5, 6, 7], "session_params": where, "sampling_params": params}

    try:
        first = server.post("/generate", turn(None, {}))["meta_info"]["id"]
        second = server.post("/generate", turn(first, {}))["meta_info"]["id"]
        for stream in (False, True):
            body = {**turn(first, {"kv_budget": 64}, replace=True), "stream": stream}
            assert_refused(server, "kv_budget", body, "/generate")
        third = server.post("/generate", turn(second, {}))["meta_info"]
        assert third["prompt_tokens"] == 15
    finally:
        server.post("/close_session", {"session_id": session})


def test_the_name_of_a_session_changes_nothing(server: Server) -> None:
    """``session_id`` alone reconstructs no prompt."""
    params = {"max_new_tokens": 40, "ignore_eos": True, "kv_budget": 16}
    body = {"text": "abc", "sampling_params": params, "session_id": "a user's"}
    assert server.post("/generate", body)["meta_info"]["skipkv"]["kv_budget"] == 16


def test_sglang_checks_its_own_parameters_late_in_a_stream(server: Server) -> None:
    """As docs/settings.md says. A key of ours beside them is refused before."""
    body = plain_body("/generate", {"max_new_tokens": -3}, stream=True)
    answer = requests.post(server.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 200 and "max_new_tokens must be at least 0" in answer.text
    assert "max_new_tokens must be" in refusal(server, "/generate", {**body, "stream": False})
    assert_generate_refuses(
        server, "kv_budget", {"max_new_tokens": -3, "kv_budget": 0}, stream=True
    )


@pytest.mark.smoke
def test_unknown_names_are_still_refused_by_sglang(server: Server) -> None:
    for params in ({"kv_cache": 64}, {"kv_budget": 64, "nonsense": 1}):
        assert refusal(server, "/generate", {"text": "abc", "sampling_params": params})
