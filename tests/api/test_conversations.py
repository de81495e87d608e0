"""``kv_reuse`` through every API: the second turn starts from the KV that the first one kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import sglang as sgl
from fleet import Fleet
from hostile_bodies import PATHS, Body, plain_body
from hostile_client import refusal, send
from server_parts import REASONER
from servers import Server
from transformers import AutoTokenizer

import sgl_skipkv
from bench.lib.trace import read_trace

pytestmark = pytest.mark.server

MODES = ("keep", "budget")
BUDGET, INTERVAL, TOKENS = 32, 8, 60
KEYS: dict[str, Any] = {
    "kv_budget": BUDGET,
    "kv_policy": "streaming",
    "kv_params": {"interval": INTERVAL},
}
GREEDY: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0}
MORE = "How many pens does Tim have?"
AGAIN = "\n\nWait, let me check "
CHATS = ("/v1/chat/completions", "/v1/messages", "/api/chat")
WRONG: tuple[dict[str, Any], ...] = (
    *({**KEYS, "kv_reuse": value} for value in (True, 1, 0, "", "Keep", "none", ["keep"], {})),
    *({"kv_reuse": value} for value in ("keep", "budget", True, 0)),
    {**KEYS, "kv_policy": "full", "kv_reuse": "keep"},
    {**KEYS, "kv_params": {"count_prompt": True}, "kv_reuse": "keep"},
    {**KEYS, "kv_params": {"protect_prompt": False}, "kv_reuse": "budget"},
)


@dataclass(frozen=True)
class Turn:
    """A first turn, and how many tokens it has."""

    question: str
    prompt: str
    answer: str
    tokens: int

    @property
    def chat(self) -> list[dict[str, str]]:
        """The second turn. The chat template opens every reply with ``<think>``."""
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": f"<think>\n{self.answer}"},
            {"role": "user", "content": MORE},
        ]

    @property
    def next_prompt(self) -> str:
        return rendered(self.chat)


TOKENIZER = AutoTokenizer.from_pretrained(REASONER)


def rendered(chat: list[dict[str, str]]) -> str:
    return str(TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> Iterator[Server]:
    """Of the bundled model: the text of its answers has the same tokens when it is sent again."""
    running = fleet.ready("reasoner")
    yield running
    running.assert_clean()


@pytest.fixture(scope="module")
def chat(server: Server) -> Callable[..., Any]:
    """The messages of a chat in; its only choice out."""
    create = openai.OpenAI(base_url=server.url + "/v1", api_key="none").chat.completions.create

    def ask(messages: Any, tokens: int | None, **keys: Any) -> Any:
        extra = {**keys, "return_meta_info": True}
        asked: Any = {"model": "default", "messages": messages, "max_tokens": tokens}
        return create(**asked, temperature=0, extra_body=extra).choices[0]

    return ask


@pytest.fixture(scope="module", autouse=True)
def frontend() -> None:
    sgl_skipkv.install()


@pytest.fixture(scope="module")
def turns(server: Server) -> list[Turn]:
    lines = map(json.loads, (REASONER / "heldout.jsonl").read_text().splitlines())
    found = []
    for question in [line["prompt"] for line in lines][:2]:
        prompt = rendered([{"role": "user", "content": question}])
        body = {"text": prompt, "sampling_params": {**GREEDY, **KEYS}}
        answer = server.post("/generate", body)
        assert answer["meta_info"]["skipkv"]["compactions"] > 1
        ids = TOKENIZER.encode(prompt) + answer["output_ids"]
        turn = Turn(question, prompt, answer["text"], len(ids))
        assert TOKENIZER.encode(turn.next_prompt)[: len(ids)] == ids
        found.append(turn)
    return found


@pytest.fixture(autouse=True)
def nothing_cached(server: Server) -> None:
    server.wait_idle()
    server.post("/flush_cache")


def finished(server: Server, before: int = 0) -> list[dict[str, Any]]:
    """Of every request that the plugin has seen end, the summary; the first ones are left out."""
    server.wait_idle()
    events = read_trace(server.trace_path)
    return [event for event in events if event["event"] == "finish"][before:]


def assert_second(summary: dict[str, Any], turn: Turn, mode: str) -> None:
    assert summary["kv_reuse_miss"] == "none"
    assert summary["reused_tokens"] in (turn.tokens - 1, turn.tokens)
    assert summary["reused_kv_tokens"] < summary["reused_tokens"]
    prompt = turn.tokens - TOKENS
    assert prompt < summary["reused_kv_tokens"] <= prompt + BUDGET + INTERVAL + 1
    copied = summary["reused_kv_tokens"] - prompt if mode == "budget" else 0
    assert summary["copied_kv_tokens"] == copied


def body_of(path: str, turn: Turn, number: int, mode: str, *, stream: bool) -> dict[str, Any]:
    """The first or second turn of a conversation, as that API has it."""
    params = {"temperature": 0, **KEYS, "kv_reuse": mode}
    prompt = (turn.prompt, turn.next_prompt)[number]
    body = plain_body(path, params, prompt=prompt, stream=stream, tokens=TOKENS)
    if path in CHATS:
        body["messages"] = turn.chat if number else turn.chat[:1]
    return body


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", PATHS)
def test_every_api(server: Server, turns: list[Turn], path: str, mode: str, stream: bool) -> None:
    turn, before = turns[0], len(finished(server))
    for number in range(2):
        body = body_of(path, turn, number, mode, stream=stream)
        answer = send(server, Body(path, json.dumps(body).encode()))
        assert answer.status == 200, answer.text
    first, second = finished(server, before)
    assert first["reused_tokens"] == first["reused_kv_tokens"] == first["copied_kv_tokens"] == 0
    assert first["kv_reuse_miss"] == "none" and "continues" not in first
    assert_second(second, turn, mode)
    assert first["kv_reuse"] == second["kv_reuse"] == mode
    assert second["continues"] == {"rid": first["rid"], "tokens": second["reused_tokens"]}


@pytest.mark.parametrize("mode", MODES)
def test_openai_client(chat: Any, turns: list[Turn], mode: str) -> None:
    """The messages of a chat, and the four fields in its ``meta_info``."""
    for messages in (turns[0].chat[:1], turns[0].chat):
        choice = chat(messages, TOKENS, **KEYS, kv_reuse=mode)
    assert_second(choice.model_extra["meta_info"]["skipkv"], turns[0], mode)


@pytest.mark.parametrize("mode", ["budget", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_chat_that_sends_back_the_answer_alone(chat: Any, turns: list[Turn], mode: str) -> None:
    """The template has no thought then; ``drop_thoughts`` lets the next turn find the answer."""
    parameters = {"interval": INTERVAL, "drop_thoughts": True}
    keys = {"kv_budget": 256, "kv_policy": "rkv", "kv_params": parameters, "kv_reuse": mode}

    def say(*contents: str, tokens: int | None = None) -> tuple[str, dict[str, Any]]:
        roles = ("user", "assistant", "user")
        pairs = zip(roles, contents, strict=False)
        choice = chat([{"role": role, "content": text} for role, text in pairs], tokens, **keys)
        return choice.message.content, choice.model_extra["meta_info"]["skipkv"]

    question = turns[0].question
    content, first = say(question)
    thought, _, answer = content.rpartition("</think>")
    prompt = turns[0].prompt.removesuffix("<think>\n")
    kept = TOKENIZER.encode(f"{prompt}{answer.strip()}<|im_end|>")
    assert thought and answer.strip() and first["evicted_tokens"] > 200
    _, second = say(question, answer.strip(), MORE)
    assert second["kv_reuse_miss"] == "none"
    assert second["reused_tokens"] in (len(kept) - 1, len(kept))
    # The first prompt keeps what opened its thought.
    assert second["reused_kv_tokens"] - second["reused_tokens"] == 2
    # A blank where the thought was, and the thought itself, are other tokens.
    for sent in (answer, content):
        assert sent != answer.strip()
        _, other = say(question, sent, MORE, tokens=4)
        assert (other["kv_reuse_miss"], other["reused_tokens"]) == ("diverged", 0)


def test_requests_without_the_key_reuse_nothing(server: Server, turns: list[Turn]) -> None:
    for keys in ({}, {"kv_reuse": False}, {"kv_reuse": None}, {"kv_reuse": "keep"}):
        params = {**GREEDY, **KEYS, **keys}
        first = server.post("/generate", {"text": turns[0].prompt, "sampling_params": params})
        assert first["text"] == turns[0].answer
        params = {**GREEDY, **KEYS, **({"kv_reuse": "budget"} if keys.get("kv_reuse") else keys)}
        later = server.post("/generate", {"text": turns[0].next_prompt, "sampling_params": params})
        info = later["meta_info"]["skipkv"]
        assert info.get("reused_tokens", 0) == 0, "of its own mode only"
        assert ("kv_reuse_miss" in info) == (keys.get("kv_reuse") == "keep")


@pytest.mark.parametrize("path", PATHS)
def test_wrong_values(server: Server, path: str) -> None:
    for stream in (False, True):
        for keys in WRONG:
            message = refusal(server, path, plain_body(path, keys, stream=stream))
            assert message.startswith("kv_reuse: expected "), message
            assert ", got " in message and "; choices: false, " in message, message


def program_of(in_run: bool, mode: Any) -> tuple[Any, dict[str, Any]]:
    """A program of two gens and a fork, and what its ``run`` is given."""
    keys = {**KEYS, "kv_reuse": mode}
    of_run, of_gen = (keys, {}) if in_run else ({}, keys)

    @sgl.function
    def program(s: Any, prompt: str) -> None:
        s += prompt
        s += sgl.gen("first", max_tokens=TOKENS, temperature=0, **of_gen)
        s += AGAIN
        s.sync()  # a fork that finds no text yet sends none
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            branch += f"{i}: " + sgl.gen("next", max_tokens=4, temperature=0, **of_gen)
        s["infos"] = [branch.get_meta_info("next") for branch in branches]
        nested = branches[0].fork(2)
        nested[1] += AGAIN + sgl.gen("last", max_tokens=4, temperature=0, **of_gen)
        s["last"] = nested[1].get_meta_info("last")

    return program, of_run


@pytest.mark.parametrize("in_run", [True, False], ids=["run", "gen"])
@pytest.mark.parametrize("mode", MODES)
def test_frontend_fork(server: Server, turns: list[Turn], mode: str, in_run: bool) -> None:
    """What a fork sends once carries the keys too, of ``run`` or of the latest ``gen``."""
    program, of_run = program_of(in_run, mode)
    before = len(finished(server))
    state = program.run(turns[0].prompt, backend=sgl.RuntimeEndpoint(server.url), **of_run)
    assert state["first"] == turns[0].answer
    first, fork, *branches, nested, last = finished(server, before)
    assert first["reused_tokens"] == 0 and len(branches) == 2
    assert_second(fork, turns[0], "keep" if fork["copied_kv_tokens"] == 0 else mode)
    common = fork["prompt_tokens"]
    for info, summary in zip(state["infos"], branches, strict=True):
        assert info["prompt_tokens"] > common
        assert summary["kv_reuse_miss"] == "none"
        assert summary["reused_tokens"] >= common - 1, "what the fork sent"
        assert summary["reused_kv_tokens"] < summary["reused_tokens"]
    assert nested["reused_tokens"] > common, "what the branch generated"
    assert last["reused_tokens"] >= nested["prompt_tokens"] - 1


def test_frontend_fork_without_reuse(server: Server, turns: list[Turn]) -> None:
    """SGLang's own request, without a budget."""
    before = len(finished(server))
    program, of_run = program_of(True, False)
    state = program.run(turns[0].prompt, backend=sgl.RuntimeEndpoint(server.url), **of_run)
    assert all("kv_reuse_miss" not in one["skipkv"] for one in [*state["infos"], state["last"]])
    assert len(finished(server, before)) == 4


@pytest.mark.parametrize("budget_in_run", [True, False], ids=["run", "gen"])
def test_frontend_fork_before_the_first_gen(server: Server, budget_in_run: bool) -> None:
    """What it sends has the reuse of ``run``, and may be without a budget: each ``gen`` has one."""
    of_run, of_gen = (KEYS, {}) if budget_in_run else ({}, KEYS)

    @sgl.function
    def program(s: Any) -> None:
        s += "One text for both branches."
        s.sync()
        branches = s.fork(2)
        for branch in branches:
            branch += sgl.gen("next", max_tokens=4, **of_gen)
        s["infos"] = [branch.get_meta_info("next") for branch in branches]

    backend = sgl.RuntimeEndpoint(server.url)
    state = program.run(backend=backend, kv_reuse="keep", **of_run)
    assert state.error() is None
    assert all(info["skipkv"]["kv_budget"] == KEYS["kv_budget"] for info in state["infos"])


def test_frontend_batch(server: Server, turns: list[Turn]) -> None:
    @sgl.function
    def program(s: Any, prompt: str) -> None:
        s += prompt + sgl.gen("first", max_tokens=TOKENS)
        s += AGAIN + sgl.gen("second", max_tokens=4)

    keys = {**KEYS, "kv_reuse": "budget", "temperature": 0}
    backend = sgl.RuntimeEndpoint(server.url)
    batch = [{"prompt": turn.prompt} for turn in turns[:2]]
    for turn, state in zip(turns, program.run_batch(batch, backend=backend, **keys), strict=False):
        summary = state.get_meta_info("second")["skipkv"]
        assert summary["kv_reuse_miss"] == "none"
        assert summary["reused_tokens"] in (turn.tokens - 1, turn.tokens)
