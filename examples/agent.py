"""What a conversation computes and holds, turn by turn, without and with ``kv_reuse``.

    python examples/agent.py                                # starts a server of examples/conversant
    python examples/agent.py --url http://127.0.0.1:30000   # or uses one that runs

An agent loop through the OpenAI client: the user asks, the model thinks, calls a tool where it has
to, answers, and later questions need what earlier turns found. Then a program in SGLang's frontend
language that forks, lets the branches vote, and goes on from the majority.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang as sgl
from openai import OpenAI
from rich.console import Console
from rich.table import Table

import sgl_skipkv.frontend  # noqa: F401  # gives run its kv_reuse
from sgl_skipkv.cli.server_process import ServerProcess, exit_on_sigterm

MODEL = Path(__file__).resolve().parent / "conversant"
BUDGET = 128
# Compactions come more often than by default: what this model writes is short.
KEYS: dict[str, Any] = {"kv_budget": BUDGET, "kv_params": {"interval": 32}}
MODES = (False, "keep", "budget")
VOTED_ON = 1  # a conversation whose first three turns need no tool


def row(name: str, info: Mapping[str, Any], first_prompt: int, said: str) -> list[str]:
    """One request of a conversation, from its ``meta_info``.

    ``kv_tokens`` counts what the request generated; with ``kv_reuse: "budget"`` it counts all of
    the conversation behind its first prompt.
    """
    prompt, skipkv = info["prompt_tokens"], info["skipkv"]
    reused, slots = skipkv.get("reused_tokens", 0), skipkv.get("reused_kv_tokens", 0)
    counts_history = reused > 0 and skipkv["full_kv_tokens"] > info["completion_tokens"]
    before = first_prompt if counts_history else prompt - reused + slots
    computed = prompt - (reused or info["cached_tokens"])
    numbers = (prompt + info["completion_tokens"], computed, before + skipkv["kv_tokens"])
    found = f"{reused:,} in {slots:,}" if reused else skipkv.get("kv_reuse_miss", "")
    return [name, *(f"{one:,}" for one in numbers), found, said]


def table(title: str) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    made.add_column("")
    for column in ("tokens of the\nconversation", "prompt tokens\ncomputed", "KV tokens\nheld"):
        made.add_column(column, justify="right")
    made.add_column("reused: tokens\nin KV tokens, or miss", justify="right")
    made.add_column("answer")
    return made


def conversation(number: int) -> list[dict[str, Any]]:
    """The turns of a held-out conversation."""
    turns: list[dict[str, Any]] = json.loads(
        (MODEL / "heldout.jsonl").read_text().splitlines()[number]
    )["turns"]
    return turns


def tool_loop(url: str, mode: str | bool, turns: int) -> Table:
    """The agent: each request sends the whole conversation, as chat clients do."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    shown = table(f"tool loop, kv_budget {BUDGET}, kv_reuse {json.dumps(mode)}")
    messages: list[Any] = []
    first_prompt = 0
    extra = {**KEYS, "kv_reuse": mode, "return_meta_info": True, "skip_special_tokens": False}
    for number, turn in enumerate(conversation(0)[:turns], start=1):
        messages.append({"role": "user", "content": turn["question"]})
        name, told = turn["lookup"] or ("", "")
        while True:
            answer = client.chat.completions.create(
                model="default", messages=messages, max_tokens=1000, temperature=0, extra_body=extra
            )
            choice = answer.choices[0]
            content = choice.message.content or ""
            info: dict[str, Any] = (choice.model_extra or {})["meta_info"]
            first_prompt = first_prompt or info["prompt_tokens"]
            # The thoughts are part of what is sent again, or the row could not be continued.
            messages.append({"role": "assistant", "content": content})
            call = re.search(r"</think>\nLet me check (\w+)\.", content)
            if call is None or not told:
                break
            shown.add_row(*row(f"turn {number}, a call", info, first_prompt, f"checks {call[1]}"))
            known = told if call[1] == name else f"{call[1]} is not known."
            messages.append({"role": "tool", "tool_call_id": f"{number}", "content": known})
            told = ""
        match = re.search(r"Answer: (\d+)", content)
        said = f"{match[1] if match else 'none'} (right: {turn['answer']})"
        shown.add_row(*row(f"turn {number}", info, first_prompt, said))
    return shown


def reply_to(question: str) -> str:
    """What a prompt goes on with, up to where the model replies."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"


@sgl.function
def vote(s: Any, questions: list[str], branches: int) -> None:
    """The second question is answered by several branches; the third goes on from the majority."""
    s += reply_to(questions[0]) + sgl.gen("first", max_tokens=1000, temperature=0)
    s += "<|im_end|>\n" + reply_to(questions[1])
    s.sync()  # or the fork may come before there is a text that it could send once for all branches
    forks = s.fork(branches)
    for fork in forks:
        fork += sgl.gen("second", max_tokens=1000, temperature=0.7)
    replies = [fork["second"] for fork in forks]
    answers = [reply.rpartition("Answer: ")[2] for reply in replies]
    majority = max(answers, key=answers.count)
    s += replies[answers.index(majority)] + "<|im_end|>\n" + reply_to(questions[2])  # the join
    s += sgl.gen("third", max_tokens=1000, temperature=0)
    s["branches"] = [(fork.get_meta_info("second"), fork["second"]) for fork in forks]


def fork_and_join(url: str, mode: str | bool) -> Table:
    """``run`` gives every ``gen`` and every fork the same keys."""
    turns = conversation(VOTED_ON)[:3]
    asked = [turn["question"] for turn in turns]
    state = vote.run(asked, 3, backend=sgl.RuntimeEndpoint(url), kv_reuse=mode, **KEYS)
    shown = table(f"fork and join, kv_budget {BUDGET}, kv_reuse {json.dumps(mode)}")
    first = state.get_meta_info("first")
    replies = [("turn 1", first, state["first"], turns[0])]
    for number, (info, reply) in enumerate(state["branches"], start=1):
        replies.append((f"turn 2, branch {number}", info, reply, turns[1]))
    replies.append(("turn 3", state.get_meta_info("third"), state["third"], turns[2]))
    for name, info, reply, turn in replies:
        said = f"{reply.rpartition('Answer: ')[2] or 'none'} (right: {turn['answer']})"
        shown.add_row(*row(name, info, first["prompt_tokens"], said))
    return shown


@contextmanager
def server_at(url: str | None) -> Iterator[str]:
    """The address of a running server, or of one of the bundled model that ends with the block."""
    if url is not None:
        yield url
        return
    flags = ["--max-total-tokens", "16384", "--kv-policy", "distinct"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(MODEL, Path(folder), flags) as server,
    ):
        yield server.wait_ready().url


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--turns", type=int, default=8, help="of the conversation")
    arguments = parser.parse_args()
    exit_on_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 110)
    with server_at(arguments.url) as url:
        for mode in MODES:
            sgl.RuntimeEndpoint(url).flush_cache()  # so that each starts with nothing cached
            console.print(tool_loop(url, mode, arguments.turns), "")
        for mode in MODES:
            sgl.RuntimeEndpoint(url).flush_cache()
            console.print(fork_and_join(url, mode), "")


if __name__ == "__main__":
    main()
