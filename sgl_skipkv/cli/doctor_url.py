"""``skipkv doctor --url``: whether budgets arrive at a running server, or through a router.

Each request has ``kv_budget: 0``, which every server with the plugin refuses. Where the key
arrives, the answer is 400 in the plugin's own words, and nothing is generated. Where something on
the way dropped the key, the request runs, for a few tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import requests
from rich.console import Console
from rich.markup import escape

from sgl_skipkv.cli.no_answer import why_no_answer
from sgl_skipkv.cli.tables import Column, plain, print_json, table_of
from sgl_skipkv.config import SettingError, brief

TIMEOUT_S: Final = 60
_KEY: Final = {"kv_budget": 0}
_AS_TEXT: Final = {"metadata": {"kv_budget": "0"}}  # OpenAI's metadata has text only
# The words of ``SettingError`` and ``Unavailable``, in whatever object an API wraps them.
_OURS: Final = re.compile(r"kv_budget: expected (.*), got 0; choices: ", re.DOTALL)
_UNAVAILABLE: Final = re.compile(r"nothing, because this server cannot evict \((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Probe:
    """One request: an API, and the place in its body that has the key."""

    path: str
    place: str
    body: Mapping[str, Any]


def probes(model: str) -> list[Probe]:
    """The requests for every API that takes budgets, as small as each allows."""
    chat = {"model": model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
    text = {"model": model, "prompt": "1", "max_tokens": 1}
    # sglang-router turns a missing ``stream`` into null, which SGLang refuses.
    response = {"model": model, "input": "1", "max_output_tokens": 16, "store": False}
    response |= {"stream": False}
    ollama = {"model": model, "messages": chat["messages"], "stream": False}
    top, metadata = "top level", "metadata"
    return [
        Probe(  # a server with --skip-tokenizer-init takes no text
            *("/generate", "sampling_params"),
            {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, **_KEY}},
        ),
        *(
            Probe(path, place, {**body, **key})
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/completions", text),
                ("/v1/responses", response),
            )
            for place, key in ((top, _KEY), (metadata, _AS_TEXT))
        ),
        Probe("/v1/messages", top, {**chat, **_KEY}),
        Probe("/api/chat", "options", {**ollama, "options": {"num_predict": 1, **_KEY}}),
    ]


@dataclass(frozen=True)
class Finding:
    """What became of the key of one probe, and that in words.

    Attributes:
        outcome: "acts": it reached a server that can evict.
    """

    outcome: Literal["acts", "dropped", "other"]
    text: str


def judge(status: int, answer: str, body: object = None) -> Finding:
    """Read one answer; ``body`` is its decoded JSON."""
    if (ours := _OURS.search(answer)) is not None:
        unavailable = _UNAVAILABLE.match(ours[1])
        if unavailable is None:
            return Finding("acts", "[green]arrive[/]")
        why = escape(unavailable[1])
        return Finding("other", f"[yellow]arrive[/], but the server cannot evict: {why}")
    if status == 200:
        return Finding("dropped", f"[red]dropped[/]{_default_budget(body)}")
    if status in (404, 405):
        return Finding("other", "not served")
    return Finding("other", f"[yellow]status {status}[/]: {escape(brief(answer))}")


def _default_budget(body: object) -> str:
    """What the request ran with instead: only the answers of /generate report that."""
    info = body.get("meta_info") if isinstance(body, Mapping) else None
    if not isinstance(info, Mapping):
        return ""
    summary = info.get("skipkv")
    default = summary.get("kv_budget") if isinstance(summary, Mapping) else None
    with_what = "without a budget" if default is None else f"with the server's default of {default}"
    return f": the request ran {with_what}"


def _send(session: requests.Session, url: str, probe: Probe) -> Finding:
    try:
        answer = session.post(url + probe.path, json=probe.body, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        return Finding("other", f"[yellow]no answer[/]: {why_no_answer(error)}")
    try:
        body = answer.json()
    except requests.JSONDecodeError:
        body = None
    return judge(answer.status_code, answer.text, body)


def _model_of(session: requests.Session, url: str) -> str:
    """The first model that the endpoint serves.

    Raises:
        SettingError: nothing answers there, or no list of models.
    """
    expected = "the address of a running server or router, without /v1"
    choices = "such as http://127.0.0.1:30000, with --api-key where it asks for one"
    try:
        answer = session.get(url + "/v1/models", timeout=TIMEOUT_S)
        if answer.status_code != 200:
            raise SettingError("url", expected, f"{url} (status {answer.status_code})", choices)
        return str(answer.json()["data"][0]["id"])
    except requests.RequestException as error:
        raise SettingError("url", expected, f"{url} ({why_no_answer(error)})", choices) from error
    except (LookupError, TypeError) as error:
        raise SettingError("url", expected, f"{url} (no list of models)", choices) from error


def check_endpoint(url: str, api_key: str | None, console: Console, *, as_json: bool) -> int:
    """Print by API whether budgets arrive; 0 if they arrive in one at least.

    Raises:
        SettingError: no server or router answers at this URL.
    """
    url = url.rstrip("/")
    with requests.Session() as session:
        if api_key is not None:
            session.headers["Authorization"] = f"Bearer {api_key}"
        asked = [(probe, _send(session, url, probe)) for probe in probes(_model_of(session, url))]
    rows = [{"api": probe.path, "place": probe.place, **vars(finding)} for probe, finding in asked]
    acts = any(finding.outcome == "acts" for _, finding in asked)
    if as_json:
        texts = [{**row, "text": plain(row["text"])} for row in rows]
        print_json({"url": url, "arrive": acts, "budgets": texts})
        return int(not acts)
    columns = Column("api", "API"), Column("place", "where the key is"), Column("text", "budgets")
    console.print(table_of(f"budgets at {escape(url)}", columns, rows))
    arrive = [
        f"{probe.path} ({probe.place})" for probe, finding in asked if finding.outcome == "acts"
    ]
    if not acts:
        console.print("[bold red]budgets arrive nowhere[/]: requests run as the servers' defaults.")
        return 1
    console.print(f"[bold green]budgets arrive[/] in {', '.join(arrive)}.")
    if any(finding.outcome == "dropped" for _, finding in asked):
        console.print("Where they are dropped, a server's default (--kv-budget) applies.")
    return 0
