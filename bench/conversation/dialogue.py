"""A client that holds one conversation: it asks, answers the model's tool calls, and measures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.lib.sweep import GREEDY, Poster
from bench.reasoner.conversations import ANSWER, CALL
from bench.reasoner.vocabulary import OPEN_REPLY, TURN_END, message_text, token_id
from sgl_skipkv.cli.files import read_lines

Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Way:
    """How a conversation is served.

    Attributes:
        kv_reuse: "off" for none.
        policy: empty for no budget.
        kv_params: parameters of the policy, as JSON.
    """

    kv_reuse: str = "off"
    policy: str = ""
    kv_budget: int | None = None
    kv_params: str = "{}"

    @property
    def keys(self) -> dict[str, Any]:
        """What its requests say besides SGLang's own sampling parameters."""
        if not self.policy:
            return {}
        keys = {"kv_policy": self.policy, "kv_budget": self.kv_budget}
        reuse = {} if self.kv_reuse == "off" else {"kv_reuse": self.kv_reuse}
        return {**keys, "kv_params": json.loads(self.kv_params), **reuse}


@dataclass(frozen=True)
class Measured:
    """One turn: a question, and all requests until its answer.

    Attributes:
        computed_tokens: of the requests' prompts.
        held_kv_tokens: of the conversation, at the end of the turn.
    """

    right: bool
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    held_kv_tokens: int


class Dialogue:
    """One conversation with a server.

    Args:
        way: of all of its requests.
        max_new_tokens: per reply.
        body: what else its requests say.
        ignore_eos: replies go on up to ``max_new_tokens``.
    """

    def __init__(
        self,
        server: Poster,
        tokenizer: Tokenizer,
        way: Way,
        max_new_tokens: int,
        body: Mapping[str, Any] | None = None,
        *,
        ignore_eos: bool = False,
    ) -> None:
        self.max_new_tokens = max_new_tokens
        self._server, self._tokenizer, self._way = server, tokenizer, way
        self._params = {**GREEDY, "ignore_eos": ignore_eos, **way.keys}
        self._body = body or {}
        self._end = token_id(tokenizer, TURN_END)
        self._ids: list[int] = []
        self._first_prompt_tokens = 0

    def take(self, turn: Mapping[str, Any]) -> Measured:
        """Ask, hand out what the model looks up, and grade the answer."""
        answers = [self.say("user", turn["question"])]
        call, asked = CALL.search(answers[0]["text"]), True
        if turn["lookup"] is not None:
            name, text = turn["lookup"]
            asked = call is not None and call[1] == name
            if asked:
                answers.append(self.say("tool", text))
        last, found = answers[-1], ANSWER.search(answers[-1]["text"])
        infos = [answer["meta_info"] for answer in answers]
        cut_off = any(info["finish_reason"]["type"] == "length" for info in infos)
        return Measured(
            asked and not cut_off and found is not None and int(found[1]) == turn["answer"],
            last["meta_info"]["prompt_tokens"],
            sum(info["completion_tokens"] for info in infos),
            sum(map(computed_tokens, infos)),
            self._held_kv_tokens(last["meta_info"]),
        )

    def hear(self, role: str, content: str) -> list[int]:
        """The next prompt: all that was said, this message, and the opening of a reply."""
        said = "\n" if self._ids else ""
        text = f"{said}{message_text(role, content)}{OPEN_REPLY}"
        return [*self._ids, *self._tokenizer.encode(text).ids]

    def say(self, role: str, content: str) -> Mapping[str, Any]:
        """Send a message; the reply becomes part of the conversation."""
        prompt = self.hear(role, content)
        params = {**self._params, "max_new_tokens": self.max_new_tokens}
        answer: Mapping[str, Any] = self._server.post(
            "/generate", {"input_ids": prompt, "sampling_params": params, **self._body}
        )
        self._first_prompt_tokens = self._first_prompt_tokens or len(prompt)
        self._ids = [*prompt, *answer["output_ids"]]
        if self._ids[-1] != self._end:  # it ran into the limit
            self._ids.append(self._end)
        return answer

    def _held_kv_tokens(self, info: Mapping[str, Any]) -> int:
        prompt_tokens, skipkv = info["prompt_tokens"], info.get("skipkv", {})
        if not skipkv:
            return int(prompt_tokens + info["completion_tokens"])
        reused, slots = skipkv.get("reused_tokens", 0), skipkv.get("reused_kv_tokens", 0)
        if reused and self._way.kv_reuse == "budget":  # it counts all behind the first prompt
            return int(self._first_prompt_tokens + skipkv["kv_tokens"])
        return int(prompt_tokens - reused + slots + skipkv["kv_tokens"])


def computed_tokens(info: Mapping[str, Any]) -> int:
    """Prompt tokens that were not found in any cache, from a request's ``meta_info``."""
    reused = info.get("skipkv", {}).get("reused_tokens", 0)
    return int(info["prompt_tokens"] - (reused or info["cached_tokens"]))


def read_conversations(path: Path, count: int) -> list[Conversation]:
    """The first ``count`` held-out conversations of a file."""
    return [line.record["turns"] for line in read_lines("conversations", path)[:count]]
