"""Every way in of the contract, on the session's server: the same keys, the same answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import fastapi
import fastapi.testclient
import openai
import pytest
import requests
import sglang as sgl
import tiktoken
from fleet import STEERING_GAMMA
from servers import HTTPFailure, Server
from sglang.lang.backend.base_backend import BaseBackend

import sgl_skipkv
from sgl_skipkv.cli.scrape import Scrape
from sgl_skipkv.config import METRIC_PREFIX
from sgl_skipkv.patches.api import openai as openai_api
from sgl_skipkv.patches.api import routes
from sgl_skipkv.patches.limits import NO_LIMITS
from sgl_skipkv.request.settings import KEYS

pytestmark = pytest.mark.server

KEYS_SENT = {
    "kv_budget": 24,
    "kv_policy": "streaming",
    "kv_params": {"interval": 8},
    "steering": 1.5,
}
TOKENS = 80
PROMPT = "the quick brown fox 1234\njumps over\n"
EXPECTED = {"policy": "streaming", "kv_budget": 24, "full_kv_tokens": TOKENS - 1}


def check(info: dict[str, Any]) -> None:
    assert {name: info[name] for name in EXPECTED} == EXPECTED
    assert info["compactions"] == (TOKENS - 1 - 24) // 8
    assert info["evicted_tokens"] == 8 * info["compactions"]
    assert info["kv_tokens"] == info["full_kv_tokens"] - info["evicted_tokens"]
    assert info["peak_kv_tokens"] == 24 + 8
    count = info["nonexecution_sentences"]
    assert info["steering_alpha"] == pytest.approx(1.5 + STEERING_GAMMA * count)


GREEDY: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def generated(server: Server, keys: dict[str, Any]) -> Any:
    return server.post("/generate", {"text": PROMPT, "sampling_params": {**GREEDY, **keys}})


@pytest.fixture(scope="module")
def reference(server: Server) -> str:
    """The text that every way in must give: greedy, budget 24, steered."""
    answer = generated(server, KEYS_SENT)
    check(answer["meta_info"]["skipkv"])
    for other in ({"kv_policy": "full", "kv_params": None}, {"steering": False}):
        assert generated(server, {**KEYS_SENT, **other})["text"] != answer["text"], other
    return str(answer["text"])


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


@pytest.fixture(scope="module", autouse=True)
def frontend() -> None:
    """Our keys in SGLang's frontend programs."""
    sgl_skipkv.install()
    sgl_skipkv.install()  # again: nothing happens


def test_custom_params_work_by_themselves_and_others_pass(server: Server, reference: str) -> None:
    answer = generated(server, {"custom_params": KEYS_SENT})
    assert answer["text"] == reference
    check(answer["meta_info"]["skipkv"])
    others = {**KEYS_SENT, "custom_params": {"somebody": "else"}}
    assert generated(server, others)["text"] == reference


@pytest.mark.smoke
def test_streaming_ends_with_one_object(server: Server, reference: str) -> None:
    body = {"text": PROMPT, "sampling_params": {**GREEDY, **KEYS_SENT}, "stream": True}
    stream = requests.post(server.url + "/generate", json=body, timeout=120)
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines()]
    chunks = [json.loads(line) for line in lines if line and line != "[DONE]"]
    assert chunks[-1]["text"] == reference
    check(chunks[-1]["meta_info"]["skipkv"])
    assert len(chunks) > 1 and all("skipkv" not in chunk["meta_info"] for chunk in chunks[:-1])


@pytest.mark.smoke
def test_openai_completions(client: openai.OpenAI, reference: str) -> None:
    ask: dict[str, Any] = {"model": "default", "max_tokens": TOKENS, "temperature": 0}
    ask |= {"prompt": PROMPT, "extra_body": {**KEYS_SENT, "ignore_eos": True}}
    assert client.completions.create(**ask).choices[0].text == reference
    stream = client.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == reference


@pytest.mark.smoke
def test_openai_chat(client: openai.OpenAI, reference: str) -> None:
    ask: dict[str, Any] = {"model": "default", "max_tokens": TOKENS, "temperature": 0}
    ask["messages"] = [{"role": "user", "content": PROMPT}]
    extra = {**KEYS_SENT, "ignore_eos": True}
    answer = client.chat.completions.create(**ask, extra_body={**extra, "return_meta_info": True})
    choice = answer.choices[0]
    assert choice.message.content == reference
    check(choice.model_extra["meta_info"]["skipkv"])
    stream = client.chat.completions.create(**ask, stream=True, extra_body=extra)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(deltas) == reference


@pytest.mark.smoke
def test_openai_responses(server: Server, client: openai.OpenAI) -> None:
    model, before = client.models.list().data[0].id, _compactions(server)
    ask: Any = {"model": model, "input": PROMPT, "temperature": 0, "max_output_tokens": TOKENS}
    answer = client.responses.create(**ask, extra_body=KEYS_SENT)
    assert answer.output_text != client.responses.create(**ask).output_text
    assert _compactions(server) > before  # it ends with the model's stop token
    for wrong in ({"kv_budget": -5}, {"kv_bugdet": 24}, {"custom_params": {"kv_budget": 24}}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.responses.create(model=model, input=PROMPT, extra_body=wrong)


def test_keys_in_the_wrong_place(server: Server) -> None:
    for wrong in ({"kv_budget": 24}, {"kv_bugdet": 24}):
        with pytest.raises(HTTPFailure, match=f"{next(iter(wrong))}: expected in sampling_params"):
            server.post("/generate", {"text": PROMPT, **wrong})


def test_routes_that_were_made_before_plugins_were_loaded() -> None:
    """As in ``sgl.Runtime``: FastAPI has read the body's class from the endpoint by then."""
    app, original = fastapi.FastAPI(), openai_api.ChatCompletionRequest.__mro__[2]

    async def chat(request: Any) -> dict[str, Any]:
        return dict(request.our_keys()) if hasattr(request, "our_keys") else {"dropped": True}

    chat.__annotations__["request"] = original
    app.post("/chat")(chat)
    client = fastapi.testclient.TestClient(app)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "kv_budget": 24}
    assert client.post("/chat", json=body).json() == {"dropped": True}
    for _ in range(2):  # and again changes nothing
        routes.bind_routes(app)
        assert client.post("/chat", json=body).json() == {"kv_budget": 24}
    assert [route.path for route in app.routes].count("/chat") == 1


@pytest.mark.smoke
def test_frontend_programs(server: Server, reference: str) -> None:
    """``sgl.gen(kv_budget=)``: two gens of one program with different budgets, and a fork."""

    @sgl.function
    def program(s: Any) -> None:
        s += PROMPT
        s += sgl.gen("first", max_tokens=TOKENS, temperature=0, ignore_eos=True, **KEYS_SENT)
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            keys = {"kv_budget": 16 + 8 * i, "kv_policy": "random", "kv_params": {"interval": 8}}
            branch += sgl.gen("next", max_tokens=40, temperature=0, ignore_eos=True, **keys)
        s["budgets"] = [branch.get_meta_info("next")["skipkv"]["kv_budget"] for branch in branches]

    state = program.run(backend=sgl.RuntimeEndpoint(server.url))
    assert state["first"] == reference
    check(state.get_meta_info("first")["skipkv"])
    assert state["budgets"] == [16, 24]


def test_frontend_defaults_of_a_run(server: Server, reference: str) -> None:
    """``run`` and ``run_batch`` say what a ``gen`` does not, as with SGLang's own parameters."""

    @sgl.function
    def program(s: Any, prompt: str, kv_policy: str) -> None:
        s += prompt
        s += sgl.gen("first", kv_policy=kv_policy)
        branches = s.fork(2)
        branches[0] += sgl.gen("next", max_tokens=40, kv_budget=16, steering=None)
        branches[1] += sgl.gen("next", max_tokens=40, kv_policy="full", steering=False)
        s["infos"] = [branch.get_meta_info("next").get("skipkv") for branch in branches]

    assert KEYS_SENT["kv_policy"] == "streaming"  # the program's own parameter keeps its name
    defaults = {name: KEYS_SENT[name] for name in ("kv_budget", "kv_params", "steering")}
    common = {**GREEDY, "backend": sgl.RuntimeEndpoint(server.url)}
    batch = [{"prompt": PROMPT, "kv_policy": "streaming"}] * 2
    states = [
        program.run(PROMPT, kv_policy="streaming", **common, **defaults),
        *program.run_batch(batch, **common, **defaults),
    ]
    for state in states:
        assert state["first"] == reference
        check(state.get_meta_info("first")["skipkv"])
        assert state["infos"][0]["kv_budget"] == 16 and "steering_alpha" in state["infos"][0]
        assert state["infos"][1]["policy"] == "full"
        assert state["infos"][1]["evicted_tokens"] == 0
    after = program.run(PROMPT, kv_policy="full", **common)  # nothing is left of the runs before
    assert after["first"] != reference
    assert not {"kv_budget", "steering_alpha"} & after.get_meta_info("first")["skipkv"].keys()


def test_frontend_streaming(server: Server, reference: str) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += PROMPT + sgl.gen(
            "text", max_tokens=TOKENS, temperature=0, ignore_eos=True, **KEYS_SENT
        )

    state = program.run(backend=sgl.RuntimeEndpoint(server.url), stream=True)
    assert "".join(state.text_iter(var_name="text")) == reference


def test_frontend_on_the_openai_backend(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # The backend downloads a vocabulary for its logit biases; bytes do as well.
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda name: encoding)

    @sgl.function
    def program(s: Any) -> None:
        s += PROMPT + sgl.gen("text", max_tokens=TOKENS, temperature=0, **KEYS_SENT)

    backend = sgl.OpenAI("default", is_chat_model=False, base_url=server.url + "/v1", api_key="x")
    before = _compactions(server)
    state = program.run(backend=backend)
    assert state["text"] and _compactions(server) > before


@pytest.mark.parametrize("backend", ["anthropic", "vertexai", "litellm"])
def test_frontend_refuses_a_key_that_a_backend_would_drop(backend: str) -> None:
    params = sgl.gen("out", max_tokens=8, kv_budget=64).sampling_params
    with pytest.raises(ValueError, match=f"kv_budget: expected nothing on the {backend} backend"):
        getattr(params, f"to_{backend}_kwargs")()
    unset = sgl.gen("out", max_tokens=8, top_k=1, kv_budget=None).sampling_params
    assert "kv_budget" not in getattr(unset, f"to_{backend}_kwargs")()


@pytest.mark.parametrize("backend", ["anthropic", "vertexai", "litellm"])
def test_a_run_refuses_a_key_that_its_backend_would_drop(backend: str) -> None:
    """At once: what a ``gen`` raises is in ``state.error()`` only."""

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("out", max_tokens=8)

    of_service = type("Service", (BaseBackend,), {"__module__": f"sglang.lang.backend.{backend}"})
    for run in (program.run, lambda **keys: program.run_batch([{}, {}], **keys)):
        with pytest.raises(ValueError, match=f"kv_budget: expected nothing on the {backend}"):
            run(backend=of_service(), kv_budget=64)


def test_a_keyword_of_the_program_stays_its_own() -> None:
    seen = []

    @sgl.function
    def program(s: Any, *, kv_budget: int) -> None:
        seen.append(kv_budget)

    program.run(backend=BaseBackend(), kv_budget=32)
    assert seen == [32]


def test_frontend_refuses_a_key_where_nothing_is_generated() -> None:
    with pytest.raises(ValueError, match="kv_budget"):
        sgl.gen("pick", choices=["a", "b"], kv_budget=32)


def test_parallel_samples_have_their_own_budgets(server: Server) -> None:
    answers = generated(server, {"temperature": 1.0, "n": 3, **KEYS_SENT})
    assert len({answer["text"] for answer in answers}) == 3
    for answer in answers:
        check(answer["meta_info"]["skipkv"])


def test_one_batch_with_many_settings(server: Server) -> None:
    """One HTTP request, four prompts, four settings, one of them none at all."""
    settings: list[dict[str, Any]] = [
        {"kv_budget": 24, "kv_policy": "streaming", "kv_params": {"interval": 8}},
        {"kv_budget": 48, "kv_policy": "skipkv", "kv_params": {"interval": 16, "tau": 0.9}},
        {"kv_budget": 32, "kv_policy": "rkv", "kv_params": {"interval": 8, "sigma": 0.5}},
        {},
    ]
    body = {"text": [PROMPT] * 4, "sampling_params": [{**GREEDY, **keys} for keys in settings]}
    answers = server.post("/generate", body)
    for keys, answer in zip(settings, answers, strict=True):
        info = answer["meta_info"].get("skipkv")
        assert (info is None) == (not keys)
        if info is not None:
            assert (info["kv_budget"], info["policy"]) == (keys["kv_budget"], keys["kv_policy"])
            assert info["peak_kv_tokens"] <= keys["kv_budget"] + keys["kv_params"]["interval"] + 1
    assert answers[3]["text"] == generated(server, {})["text"]


def test_null_and_false_mean_not_set(server: Server) -> None:
    unset = {"max_new_tokens": 8, **dict.fromkeys(KEYS)}
    answer = generated(server, {**unset, "steering": False, "kv_reuse": False})
    assert "skipkv" not in answer["meta_info"]


@pytest.mark.smoke
def test_metrics_and_server_info(server: Server) -> None:
    metrics = server.get("/metrics")
    lines = [line for line in metrics.splitlines() if line.startswith("sglang:skipkv")]
    assert any('state="ready"' in line and line.endswith(" 1.0") for line in lines)
    reported = server.get("/server_info")["skipkv"]
    settings, limits = reported.pop("settings"), asdict(NO_LIMITS) | {"without_reuse": []}
    assert reported == {"reasons": [], "limits": limits}
    assert settings["trace"] == str(server.trace_path)
    assert f"sgl_skipkv: ready; settings {json.dumps(settings)}" in server.log


def _compactions(server: Server) -> float:
    return Scrape(server.get("/metrics")).total(f"{METRIC_PREFIX}compactions_total")
