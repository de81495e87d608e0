"""Our keys in the ``metadata`` of the OpenAI API, as text, which is how they pass a router."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hostile_bodies import plain_body
from servers import HTTPFailure, Server
from test_bad_input import assert_refused

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.api.gate import collect_keys
from sgl_skipkv.patches.api.metadata import METADATA, MetadataKeys

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
KEYS: dict[str, Any] = {
    "kv_budget": 24,
    "kv_policy": "streaming",
    "kv_params": {"interval": 8},
    "steering": 1.5,
}
AS_TEXT = {
    "kv_budget": "24",
    "kv_policy": "streaming",
    "kv_params": '{"interval": 8}',
    "steering": "1.5",
}
TOKENS = 60
# (field named behind ``metadata.``, metadata)
WRONG: list[tuple[str, dict[str, Any]]] = [
    *(
        ("kv_budget", {"kv_budget": v})
        for v in ("abc", "", "0", "12", "1.5", "64.0", "1e2", "true")
    ),
    *(("kv_budget", {"kv_budget": v}) for v in ("NaN", '"64"', "[64]", "9" * 5000, "[" * 9999, 0)),
    *(("kv_policy", {"kv_budget": "64", "kv_policy": v}) for v in ("h3o", "", "7")),
    *(("kv_params", {"kv_budget": "64", "kv_params": v}) for v in ("tau", "[]", "interval=8")),
    ("kv_params.tua", {"kv_budget": "64", "kv_params": '{"tua": 1}'}),
    ("kv_params.interval", {"kv_budget": "64", "kv_params": {"interval": 7}}),
    ("kv_reuse", {"kv_budget": "64", "kv_reuse": "Keep"}),
    ("steering", {"steering": "strong"}),
    ("kv_bugdet", {"kv_bugdet": "64"}),
]


def body_of(server: Server, path: str, tokens: int = 1, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        model = server.get("/v1/models")["data"][0]["id"]
        return {"model": model, "input": "abc", "max_output_tokens": 16, **more}
    return {**plain_body(path, {"temperature": 0, "ignore_eos": True}, tokens=tokens), **more}


def text_of(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.server
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_they_act_as_at_the_top(server: Server, path: str) -> None:
    at_top = server.post(path, body_of(server, path, TOKENS, **KEYS))
    assert text_of(at_top) != text_of(server.post(path, body_of(server, path, TOKENS)))
    for metadata in (AS_TEXT, KEYS, {**AS_TEXT, "user": "7"}):
        in_metadata = server.post(path, body_of(server, path, TOKENS, metadata=metadata))
        assert text_of(in_metadata) == text_of(at_top)
    both = server.post(path, body_of(server, path, TOKENS, **KEYS, metadata=AS_TEXT))
    assert text_of(both) == text_of(at_top)


@pytest.mark.server
def test_they_report_what_they_did(server: Server) -> None:
    body = body_of(
        server, CHAT, TOKENS, metadata={**AS_TEXT, "steering": "false"}, return_meta_info=True
    )
    info = server.post(CHAT, body)["choices"][0]["meta_info"]
    events = server.events(info["id"])
    assert [event["after"] - event["prompt_tokens"] for event in events[:-1]] == [24] * 4
    assert info["skipkv"]["kv_budget"] == 24 and info["skipkv"]["compactions"] == 4
    assert "steering_alpha" not in info["skipkv"]


@pytest.mark.server
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_wrong_value_is_named_with_its_place(server: Server, path: str) -> None:
    for field, metadata in WRONG:
        assert_refused(server, f"metadata.{field}", body_of(server, path, metadata=metadata), path)
    streamed = body_of(server, path, metadata={"kv_budget": "0"}, stream=True)
    assert_refused(server, "metadata.kv_budget", streamed, path)
    counted = {"kv_budget": "16", "kv_params": '{"count_prompt": true}'}
    if path != RESPONSES:
        prompt = "a" * 40
        body = {**plain_body(path, {}, prompt=prompt), "metadata": counted}
        assert_refused(server, "metadata.kv_budget", body, path)


@pytest.mark.server
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_two_values_of_a_key_are_both_named(server: Server, path: str) -> None:
    body = body_of(server, path, kv_budget=48, metadata={"kv_budget": "24"})
    message = assert_refused(server, "kv_budget", body, path)
    assert "but metadata.kv_budget is 24, got 48" in message
    body = body_of(server, path, custom_params={"kv_budget": 48}, metadata={"kv_budget": "24"})
    if path != RESPONSES:
        assert "metadata.kv_budget is 24, got 48" in assert_refused(server, "kv_budget", body, path)


@pytest.mark.server
def test_other_metadata_passes_untouched(server: Server) -> None:
    metadata = {"user": "7", "budget": "24", "policy": "rkv", "note": '{"kv_budget": 24}'}
    body = body_of(server, CHAT, TOKENS, metadata=metadata, return_meta_info=True)
    choice = server.post(CHAT, body)["choices"][0]
    assert "skipkv" not in choice["meta_info"]
    assert choice["message"]["content"] == text_of(server.post(CHAT, body_of(server, CHAT, TOKENS)))
    for sent in (metadata, {**metadata, **AS_TEXT}, {}):
        answer = server.post(RESPONSES, body_of(server, RESPONSES, metadata=sent))
        assert answer["metadata"] == sent


@pytest.mark.server
def test_generate_has_no_metadata(server: Server) -> None:
    for metadata in ({"kv_budget": 24}, {"user": "7"}):
        with pytest.raises(HTTPFailure, match="metadata") as failure:
            server.post("/generate", plain_body("/generate", {"metadata": metadata}))
        assert failure.value.status == 400


def test_text_is_decoded_as_json_or_is_itself() -> None:
    for text, value in (
        *(("24", 24), (" 24 ", 24), ("1e2", 100.0), ("true", True), ("abc", "abc"), ("", "")),
        *(("9" * 5000, "9" * 5000), ("[" * 10**5, "[" * 10**5), ("\ud800", "\ud800")),
    ):
        _, keys = collect_keys({METADATA: MetadataKeys.of({"kv_budget": text})})
        assert keys == {"kv_budget": value} and type(keys["kv_budget"]) is type(value)
        assert keys.written("kv_budget") == "metadata.kv_budget"
    for unset in (None, "null"):
        assert collect_keys({METADATA: MetadataKeys.of({"kv_budget": unset})}) == ({}, {})


def test_what_is_no_metadata_has_no_keys() -> None:
    for metadata in (None, 7, "kv_budget", ["kv_budget"], {}, {"user": "7"}):
        assert MetadataKeys.of(metadata) == {}
    assert collect_keys({METADATA: {"kv_budget": 24}}) == ({METADATA: {"kv_budget": 24}}, {})


def test_the_place_is_that_of_the_only_value() -> None:
    metadata = MetadataKeys.of({"kv_budget": "24", "kv_params": json.dumps({"interval": 8})})
    _, keys = collect_keys({"kv_budget": 24, METADATA: metadata})
    assert keys == {"kv_budget": 24, "kv_params": {"interval": 8}}
    assert keys.written("kv_budget") == "kv_budget"
    assert keys.written("kv_params.interval") == "metadata.kv_params.interval"
    with pytest.raises(SettingError, match=r"kv_budget: expected one value, but metadata"):
        collect_keys({"kv_budget": 48, METADATA: metadata})
