"""Two more ways in: SGLang's Anthropic and Ollama APIs. The same keys, the same answer."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from hostile_bodies import Body, plain_body
from hostile_client import refusal, send
from servers import HTTPFailure, Server

pytestmark = pytest.mark.server

KEYS_SENT = {"kv_budget": 24, "kv_policy": "streaming", "kv_params": {"interval": 8}}
TOKENS = 80
PROMPT = "the quick brown fox 1234\njumps over\n"
TURNS: Any = [{"role": "user", "content": PROMPT}]
WRONG = ({"kv_budget": -5}, {"kv_bugdet": 24}, {"kv_policy": "rkv"}, {"steering": "much"})
PATHS = ("/v1/messages", "/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def reference(server: Server) -> str:
    """The text that every way in must give: greedy, to the model's stop token, budget 24."""
    params = {"max_new_tokens": TOKENS, "temperature": 0}
    with_keys, without = (
        server.post("/generate", {"text": PROMPT, "sampling_params": {**params, **keys}})
        for keys in (KEYS_SENT, {})
    )
    assert with_keys["meta_info"]["skipkv"]["compactions"] > 0
    assert with_keys["text"] != without["text"]
    return str(with_keys["text"])


def body_of(path: str, keys: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    """A greedy call, the keys where that API has its parameters."""
    params = {"temperature": 0, **keys}
    return plain_body(path, params, prompt=PROMPT, stream=stream, tokens=TOKENS)


def streamed(server: Server, path: str, keys: dict[str, Any]) -> str:
    """A streamed answer, whole."""
    body = json.dumps(body_of(path, keys, stream=True))
    answer = send(server, Body(path, body.encode()))
    assert answer.status == 200, answer
    return answer.text


@pytest.mark.smoke
def test_anthropic_messages(server: Server, reference: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    ask: Any = {"model": "default", "messages": TURNS, "max_tokens": TOKENS}
    greedy = {"temperature": 0}
    answer: Any = client.messages.create(**ask, extra_body={**greedy, **KEYS_SENT})
    assert answer.content[0].text == reference
    with client.messages.stream(**ask, extra_body={**greedy, **KEYS_SENT}) as stream:
        assert "".join(stream.text_stream) == reference
    without: Any = client.messages.create(**ask, extra_body=greedy)
    assert without.content[0].text != reference
    assert client.messages.count_tokens(model="default", messages=TURNS).input_tokens > 0


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_options(server: Server, reference: str, path: str) -> None:
    def text_of(part: dict[str, Any]) -> str:
        return str(part["message"]["content"] if path == "/api/chat" else part["response"])

    assert text_of(server.post(path, body_of(path, KEYS_SENT))) == reference
    assert text_of(server.post(path, body_of(path, {}))) != reference
    parts = [json.loads(line) for line in streamed(server, path, KEYS_SENT).splitlines()]
    # SGLang's last part says that it is the last, and leaves out what was generated since.
    assert parts[-1]["done"] and len(parts) > 2
    assert reference.startswith("".join(map(text_of, parts))) and text_of(parts[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keys", WRONG, ids=lambda keys: next(iter(keys)))
@pytest.mark.parametrize("path", PATHS)
def test_wrong_keys(server: Server, path: str, keys: dict[str, Any], stream: bool) -> None:
    """Refused with 400 before a streamed answer begins."""
    expected = "kv_budget" if keys == {"kv_policy": "rkv"} else next(iter(keys))
    body = body_of(path, keys, stream=stream)
    assert refusal(server, path, body).startswith(f"{expected}: expected ")
    if path == "/v1/messages":
        answer = send(server, Body(path, json.dumps(body).encode()))
        assert json.loads(answer.text)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("keys", [{"kv_budget": 24}, {"kv_bugdet": 24}])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_keys_in_the_wrong_place(server: Server, path: str, keys: dict[str, Any]) -> None:
    with pytest.raises(
        HTTPFailure, match=f"{next(iter(keys))}: expected nothing outside of options"
    ):
        server.post(path, {**body_of(path, {}), **keys})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_what_the_prompt_decides(server: Server, path: str, stream: bool) -> None:
    """Found out when the prompt is tokenized. SGLang's Anthropic streams have begun by then."""
    keys = {**KEYS_SENT, "kv_params": {"count_prompt": True}}
    expected = "because count_prompt counts"
    if stream and path == "/v1/messages":
        events = streamed(server, path, keys).split("\n\n")
        assert any(event.startswith("event: error\n") and expected in event for event in events)
        return
    assert expected in refusal(server, path, body_of(path, keys, stream=stream))
