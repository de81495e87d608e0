"""What a KV budget does, on the bundled model and this machine: ``make demo``.

Starts the real SGLang server, runs ``quickstart.py`` against it, then gives the same problems to
the same small KV pool without a budget, with two, and with one that is too small. It shows one
trace with what was evicted struck through, and writes the explorer's page of one problem under
three policies. It needs no network, ends by itself and leaves no process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoTokenizer

from sgl_skipkv.cli.progress import progress as progress_bar
from sgl_skipkv.cli.server_process import ServerProcess, exit_on_sigterm
from sgl_skipkv.cli.trace import finished_request, show
from sgl_skipkv.cli.view import write_page
from sgl_skipkv.explorer.text import pieces

HERE = Path(__file__).resolve().parent
MODEL = HERE / "reasoner"
POOL_TOKENS = 4096
BUDGETS: tuple[int | None, ...] = (None, 512, 256)
#: two or three sentences of this model
TOO_SMALL = 64
# Compactions come more often than by default: the traces of this model are short.
KV_PARAMS = {"interval": 32}
#: side by side on the page, with the last budget; ``skipkv`` with the model's own threshold
POLICIES: dict[str, dict[str, Any]] = {"distinct": {}, "skipkv": {"tau": 0.85}, "streaming": {}}


@dataclass(frozen=True)
class Round:
    """The same problems, all sent at once, under one budget."""

    kv_budget: int | None
    right: int
    problems: int
    output_tokens: int
    peak_kv_tokens: int
    compactions: int
    evicted_sentences: int
    peak_running: int
    retractions: int
    seconds: float


class RunningWatch:
    """The largest number of requests that SGLang reports as running, while a block runs."""

    def __init__(self, server: ServerProcess) -> None:
        self.peak = 0
        self._server, self._done = server, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            load = self._server.get("/v1/loads?include=core")["loads"][0]
            self.peak = max(self.peak, load["num_running_reqs"])

    def __enter__(self) -> RunningWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def hard_problems(count: int) -> list[dict[str, Any]]:
    lines = (MODEL / "heldout.jsonl").read_text().splitlines()
    return [problem for problem in map(json.loads, lines) if problem["level"] == "hard"][:count]


def run_round(
    server: ServerProcess,
    problems: list[dict[str, Any]],
    kv_budget: int | None,
    tokenizer: Any,
    progress: Progress,
) -> Round:
    """Send every problem at once, greedy; count what is right and what it held."""
    params: dict[str, Any] = {"max_new_tokens": 3000, "temperature": 0}
    if kv_budget is not None:
        params |= {"kv_budget": kv_budget, "kv_params": KV_PARAMS}
    name = "no budget" if kv_budget is None else f"kv_budget {kv_budget}"
    task = progress.add_task(f"{len(problems)} problems, {name}", total=len(problems))

    def solve(i: int) -> dict[str, Any]:
        chat = [{"role": "user", "content": problems[i]["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        body = {"text": text, "sampling_params": params, "rid": f"{kv_budget}-{i}"}
        answer: dict[str, Any] = server.post("/generate", body)
        progress.advance(task)
        return answer

    server.post("/flush_cache?timeout=60")  # idle a moment after the last answer
    start = time.perf_counter()
    with RunningWatch(server) as watch, ThreadPoolExecutor(len(problems)) as pool:
        answers = list(pool.map(solve, range(len(problems))))
    seconds = time.perf_counter() - start
    infos = [answer["meta_info"] for answer in answers]
    skipkv = [info.get("skipkv", {}) for info in infos]
    own = [
        info["skipkv"]["peak_kv_tokens"] if "skipkv" in info else info["completion_tokens"] - 1
        for info in infos
    ]
    said = [re.search(r"Answer: (\d+)", answer["text"]) for answer in answers]
    return Round(
        kv_budget=kv_budget,
        right=sum(
            match is not None and int(match[1]) == problem["answer"]
            for match, problem in zip(said, problems, strict=True)
        ),
        problems=len(problems),
        output_tokens=sum(info["completion_tokens"] for info in infos),
        peak_kv_tokens=max(own),
        compactions=sum(info.get("compactions", 0) for info in skipkv),
        evicted_sentences=sum(info.get("evicted_sentences", 0) for info in skipkv),
        peak_running=watch.peak,
        retractions=sum(info["num_retractions"] for info in infos),
        seconds=seconds,
    )


def ask_policies(server: ServerProcess, problem: dict[str, Any], tokenizer: Any) -> list[str]:
    """One problem under several policies; returns their request ids."""
    chat = [{"role": "user", "content": problem["prompt"]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    keys = {"max_new_tokens": 3000, "temperature": 0, "kv_budget": BUDGETS[-1]}

    def ask(policy: str) -> str:
        params = {**keys, "kv_policy": policy, "kv_params": {**KV_PARAMS, **POLICIES[policy]}}
        server.post("/generate", {"text": text, "sampling_params": params, "rid": policy})
        return policy

    with ThreadPoolExecutor(len(POLICIES)) as pool:
        return list(pool.map(ask, POLICIES))


def results_table(rounds: list[Round]) -> Table:
    table = Table(
        title=f"{rounds[0].problems} hard problems at once, a KV pool of {POOL_TOKENS:,} tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for column in (
        *("kv_budget", "right\nanswers", "output\ntokens", "peak KV\ntokens", "compac-\ntions"),
        *("evicted\nsentences", "running\nat once", "tokens/s"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for one in rounds:
        table.add_row(
            "none" if one.kv_budget is None else str(one.kv_budget),
            f"{one.right} of {one.problems}",
            f"{one.output_tokens:,}",
            f"{one.peak_kv_tokens:,}",
            str(one.compactions),
            str(one.evicted_sentences),
            str(one.peak_running),
            f"{one.output_tokens / one.seconds:,.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", type=Path, default=Path("skipkv-demo.html"), help="file for the explorer's page"
    )
    parser.add_argument("--problems", type=int, default=10, help="hard problems per round")
    arguments = parser.parse_args()
    exit_on_sigterm()
    console = Console(width=None if sys.stdout.isatty() else 110)
    problems = hard_problems(arguments.problems)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        flags = [
            *("--max-total-tokens", str(POOL_TOKENS), "--skipkv-trace", str(trace)),
            *("--max-running-requests", "64"),
        ]
        console.print("Starting the real SGLang server on the bundled model (about half a minute).")
        with ServerProcess(MODEL, Path(folder) / "server", flags) as server:
            server.wait_ready()
            console.rule("quickstart.py: one program, three budgets, a fork")
            quickstart = [sys.executable, "-P", str(HERE / "quickstart.py"), "--url", server.url]
            subprocess.run(quickstart, check=True, cwd=folder, env=dict(os.environ))
            console.rule("the same pool, with and without a budget")
            with progress_bar(transient=True) as progress:
                rounds = [
                    run_round(server, problems, kv_budget, tokenizer, progress)
                    for kv_budget in BUDGETS
                ]
                lossy = run_round(server, problems, TOO_SMALL, tokenizer, progress)
            console.print(results_table(rounds))
            rids = ask_policies(server, problems[0], tokenizer)
            request = finished_request(trace, f"{BUDGETS[-1]}-0")
        write_page(trace, arguments.page, partial(pieces, tokenizer), rids)
    console.rule(f"one trace, kv_budget {BUDGETS[-1]}: evicted text is struck through")
    show(console, request, tokenizer)
    none, small = rounds[0], rounds[-1]
    console.rule()
    console.print(
        f"In the same {POOL_TOKENS:,} tokens, {small.peak_running} requests ran at once with "
        f"kv_budget {small.kv_budget} ({small.right} of {small.problems} answers right) and "
        f"{none.peak_running} without one ({none.right} right)."
    )
    console.print(
        f"A budget can be too small: with kv_budget {TOO_SMALL}, {lossy.right} of "
        f"{lossy.problems} answers were right. `skipkv tune` compares budgets on your own prompts."
    )
    console.print("The same problem under three policies, token by token; open it in a browser:")
    console.print(str(arguments.page.resolve()), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
