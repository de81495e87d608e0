"""Bodies that nobody should send, and what the schema says about each of them.

A body is drawn as JSON text, so that it may hold what Python's own ``json`` would not write: NaN,
numbers that no float holds, lists in lists in lists. What must come of it is worked out from the
text by the parser that SGLang uses and by ``sgl_skipkv.request``, not from how it was drawn.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.policy import names
from sgl_skipkv.request.settings import RequestSettings, misspelt_keys, resolve_request, take_keys

OPENAI = ("/v1/chat/completions", "/v1/completions")
OLLAMA = ("/api/chat", "/api/generate")
TAKE_IDS = ("/generate", "/v1/completions")
PATHS = ("/generate", *OPENAI, "/v1/messages", *OLLAMA)
PROMPT = "abc"
PARAMETERS = (
    *("interval", "sink", "window", "protect_prompt", "count_prompt", "delimiters", "sigma"),
    *("kernel", "threshold", "tau", "ending", "recent", "alpha", "ratio", "seed", "tua", ""),
)
UNKNOWN = ("kv_bugdet", "kv_interval", "skipkv_budget", "skipkv", "KV_BUDGET", "kv_budget ", "k")
# Written into the text as they are, quotes taken off.
RAW = (
    *("NaN", "-Infinity", "1e400", "1E2", "-0", "64.0", "0x40", "9" * 400, "18446744073709551616"),
    *("[" * 90 + "]" * 90, '{"a":' * 90 + "1" + "}" * 90),
)

_NOT_VALID = "1 validation error"
_RAW_MARK = re.compile(r'"@raw (\d+)@"')
_SCALARS = st.one_of(
    st.integers(-5, 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text('aZ_.-"\\\n\0\u2028\u00e9\U0001f600', max_size=6),
    st.sampled_from(
        [
            *(None, True, False, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 2**64, 10**40, -(10**40)),
            *("64", "true", "skipkv", "math", "x" * 81, "y" * 5000, "__import__('os')"),
        ]
    ),
)
_NESTED = st.one_of(
    st.lists(_SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["", "tau", "kv_budget", "z" * 200]), _SCALARS, max_size=3),
    st.builds(lambda one: [[{"a": [one]}], one], _SCALARS),
)
_JUNK = st.one_of(
    _SCALARS, _NESTED, st.sampled_from([f"@raw {number}@" for number in range(len(RAW))])
)
_PARAMETER = st.sampled_from([0, 1, 8, 16, 128, 0.5, 0.9, 3, True, False, "math", "paper"])


def _mostly(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A wrong value once in four times."""
    return st.integers(0, 3).flatmap(lambda n: _JUNK if n == 3 else right)


_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "kv_budget": _mostly(st.integers(13, 100)),
        "kv_policy": _mostly(st.sampled_from(names())),
        "kv_params": _mostly(
            st.dictionaries(
                st.sampled_from(PARAMETERS), st.one_of(_PARAMETER, _SCALARS), max_size=2
            )
        ),
        "kv_reuse": _mostly(st.sampled_from(["keep", "budget", False])),
        "steering": _mostly(st.one_of(st.floats(-10, 10), st.just(False))),
    },
)
# Without a budget most other keys mean nothing, so most requests have one.
_BUDGETED = st.builds(
    lambda keys, budget: {"kv_budget": budget, **keys}, _KEYS, st.integers(13, 99)
)
_OURS = st.one_of(_KEYS, _BUDGETED, _BUDGETED, _BUDGETED)
_STRANGE = st.dictionaries(st.sampled_from(UNKNOWN), _NESTED, min_size=1, max_size=2)
_RARELY = st.sampled_from([False] * 7 + [True])
# A prompt of ids, two times in three with one that is wrong: for its value or for its type.
_ID = st.integers(0, VOCAB_SIZE - 1)
_WRONG_ID = st.sampled_from([-1, VOCAB_SIZE, 2**31, 2**62, -(2**31), 1.5, "x", None, [5], [[5]]])
_PROMPT = st.builds(
    lambda ids, wrong, nest: [[*ids, *wrong]] if nest else [*ids, *wrong],
    st.lists(_ID, min_size=1, max_size=4),
    st.one_of(st.just([]), st.tuples(_WRONG_ID), st.tuples(_WRONG_ID)),
    st.booleans(),
)


@dataclass(frozen=True)
class Body:
    """One request: where it goes, and its text."""

    path: str
    text: bytes


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """Our keys at the top, in ``custom_params``, or both; sometimes names that nobody knows."""
    path = draw(st.sampled_from(PATHS))
    params: dict[str, Any] = {}
    where = draw(st.sampled_from(["top"] * 4 + ["custom"] * 3 + ["both", "beside"]))
    if where != "custom":
        params |= draw(_OURS)
    if where == "both":
        params["custom_params"] = draw(st.one_of(st.just(dict(params)), _OURS))
    elif where == "custom":
        params["custom_params"] = draw(_OURS)
    elif where == "beside":  # no object at all, perhaps
        params["custom_params"] = draw(_NESTED)
    if draw(_RARELY):
        holder = params.get("custom_params")
        (holder if isinstance(holder, dict) else params).update(draw(_STRANGE))
    prompt = PROMPT
    if path in TAKE_IDS and draw(_RARELY):
        prompt = draw(_PROMPT)
    return Body(path, _text(path, params, prompt=prompt, stream=draw(_RARELY)))


def plain_body(
    path: str,
    params: dict[str, Any],
    *,
    prompt: str | list[Any] = PROMPT,
    stream: bool = False,
    tokens: int = 1,
) -> dict[str, Any]:
    """The parameters where that API has them; what they do not say is valid and tiny."""
    if path == "/generate":
        params = {"max_new_tokens": tokens, **params}
        field = "text" if isinstance(prompt, str) else "input_ids"
        return {"stream": stream, field: prompt, "sampling_params": params}
    body: dict[str, Any] = {"stream": stream, "model": "default"}
    if path in ("/v1/completions", "/api/generate"):
        body["prompt"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if path in OLLAMA:
        return {**body, "options": {"num_predict": tokens, **params}}
    return {**body, "max_tokens": tokens, **params}


def _text(path: str, params: dict[str, Any], **how: Any) -> bytes:
    body = json.dumps(plain_body(path, params, **how))
    return _RAW_MARK.sub(lambda mark: RAW[int(mark[1])], body).encode()


@dataclass(frozen=True)
class Verdict:
    """What must come of a body.

    Attributes:
        names: 400, and the message begins with one of these; nothing for 200.
        settings: of an accepted call, None for one without a budget.
    """

    names: tuple[str, ...] = ()
    settings: RequestSettings | None = None


def judge(body: Body, server: ServerConfig) -> Verdict:
    """By the schema. More than one thing may be wrong; any of them may be named."""
    try:
        parsed = orjson.loads(body.text)
    except orjson.JSONDecodeError:
        # SGLang's own; its Anthropic API begins with where the text stops to be JSON.
        return Verdict(tuple("0123456789" if body.path == "/v1/messages" else [_NOT_VALID]))
    generate = body.path == "/generate"
    holder = {"/generate": "sampling_params", **dict.fromkeys(OLLAMA, "options")}.get(body.path)
    rest, keys = take_keys(parsed[holder] if holder else parsed)
    custom, wrong = rest.get("custom_params"), []
    if body.path == "/v1/messages":  # that API has no such field, and a key in it would be dropped
        dropped = take_keys(custom)[1] if isinstance(custom, dict) else {}
        wrong += [f"custom_params.{key}: expected nothing" for key in dropped]
        custom = None
    if custom is not None and not isinstance(custom, dict):
        if body.path in OPENAI:
            wrong.append(_NOT_VALID)  # SGLang's own schema
        elif keys:
            wrong.append("custom_params: expected ")
    elif custom is not None:
        nested = take_keys(custom)[1]
        wrong += [
            f"{key}: expected one value"
            for key in nested
            if nested[key] != keys.get(key, nested[key])
        ]
        keys = {**nested, **keys}
        wrong += [f"{name}: expected a key of a request" for name in misspelt_keys(custom)]
    wrong += [f"{name}: expected a key of a request" for name in misspelt_keys(rest)]
    if generate:
        wrong += [f"unknown field `{key}`" for key in rest if key in UNKNOWN]
    ids = parsed.get("input_ids" if generate else "prompt")
    if isinstance(ids, list):
        ids = ids[0] if isinstance(ids[0], list) else ids
        wrong += _wrong_ids(ids, generate)
    prompt_tokens = len(ids) if isinstance(ids, list) else len(PROMPT)
    settings = None
    try:
        settings = resolve_request(keys, server)
        if settings is not None:
            settings.check_prompt(prompt_tokens)
    except SettingError as error:
        wrong.append(f"{error.field}: expected {error.expected}, got ")
    return Verdict(tuple(wrong), settings)


def _wrong_ids(ids: list[Any], generate: bool) -> list[str]:
    """SGLang refuses what is no list of integers, and counts what completions might have been."""
    if any(type(one) is not int for one in ids):
        return [_NOT_VALID] if generate else list("0123456789")
    inside = all(0 <= one < VOCAB_SIZE for one in ids)
    return [] if inside else ["input_ids: expected token ids in "]


def echoes(message: str, sent: bytes, most: int = 80) -> bool:
    """Whether a message repeats more than so many characters of what was sent."""
    text = sent.decode(errors="replace")
    return any(message[i : i + most + 1] in text for i in range(len(message) - most))
