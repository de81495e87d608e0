"""What a conversation remembers, holds and computes, with a full cache, with a budget, with reuse.

    python -m bench.conversation
    python -m bench.conversation --only accuracy --policies streaming --kv-budgets 64

- ``accuracy``: share of right answers by turn, KV tokens held at the end of the turn, prompt tokens
  computed. One row per way and turn in bench/rows/conversation.csv; rows that are there are kept.
- ``first_token``: seconds from the last turn's question to its first token, one request at a time,
  of every way over that of the same budget without reuse, in turn. Replies have a fixed length.
- ``pressure``: one pool that holds a few full conversations, more conversations than that: turns
  per minute, share of right answers, prompt tokens computed and requests at once. With
  ``--hicache-ratio`` the same with HiCache, in bench/rows/conversation_hicache.csv.

``bench/conversation/figure.py`` draws the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.conversation.dialogue import (
    Conversation,
    Dialogue,
    Measured,
    Way,
    computed_tokens,
    read_conversations,
)
from bench.lib.accuracy import accuracy_columns
from bench.lib.pairs import START_S, paired_ratio
from bench.lib.record import append_row, recorded
from bench.lib.server_log import retractions, running_requests
from bench.reasoner.vocabulary import build_tokenizer
from sgl_skipkv import policy
from sgl_skipkv.cli.progress import track
from sgl_skipkv.cli.server_process import ServerProcess, exit_on_sigterm

MODEL = Path(__file__).resolve().parents[2] / "examples" / "conversant"
MEASUREMENTS = ("accuracy", "first_token", "pressure")
REUSES = ("off", "keep", "budget")
#: this model's compactions come more often than the default, because its conversations are short
PARAMS: dict[str, Any] = {"interval": 32}
TOKENIZER = build_tokenizer()


def ways_of(
    policies: Sequence[str],
    budgets: Sequence[int],
    reuses: Sequence[str] = REUSES,
) -> list[Way]:
    """A full cache, then every policy and budget with these kinds of reuse."""
    ways = [Way()]
    for name in policies:
        own = {**PARAMS, **({"tau": 0.85} if name == "skipkv" else {})}
        params = json.dumps(own, sort_keys=True)
        ways += [Way(reuse, name, budget, params) for budget in budgets for reuse in reuses]
    return ways


def columns(way: Way) -> dict[str, str | int]:
    return {name: "" if value is None else value for name, value in asdict(way).items()}


def hold(
    server: ServerProcess, way: Way, max_new_tokens: int, conversation: Conversation
) -> list[Measured]:
    dialogue = Dialogue(server, TOKENIZER, way, max_new_tokens)
    return [dialogue.take(turn) for turn in conversation]


def accuracy(
    server: ServerProcess, arguments: argparse.Namespace, conversations: Sequence[Conversation]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for every way and turn that has none."""
    size = {"conversations": len(conversations), "max_new_tokens": arguments.max_new_tokens}
    done = {tuple(row[name] for name in columns(Way())) for row in recorded("conversation")
            if all(row[name] == str(value) for name, value in size.items())}  # fmt: skip
    ways = ways_of(arguments.policies, arguments.kv_budgets, arguments.reuses)
    for way in ways:
        if tuple(map(str, columns(way).values())) in done:
            continue
        server.post("/flush_cache")
        work = partial(hold, server, way, arguments.max_new_tokens)
        with ThreadPoolExecutor(arguments.parallel) as pool:
            name = " ".join(map(str, columns(way).values()))
            held = list(track(pool.map(work, conversations), name, len(conversations)))
        for number, turns in enumerate(zip(*held, strict=True), start=1):
            right = sum(turn.right for turn in turns)
            means = {
                one: round(statistics.mean(getattr(turn, one) for turn in turns), 1)
                for one in ("prompt_tokens", "output_tokens", "computed_tokens", "held_kv_tokens")
            }
            shares = accuracy_columns(right, len(turns))
            yield "conversation", {**columns(way), **size, "turn": number, **shares, **means}


def first_token(
    server: ServerProcess, arguments: argparse.Namespace, conversations: Sequence[Conversation]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for every way over the same budget without reuse."""
    full, *ways = ways_of(arguments.policies[:1], arguments.kv_budgets[-1:])
    ways = [*ways, full]
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    computed: dict[Way, list[int]] = {way: [] for way in ways}

    def until_last(way: Way, conversation: Conversation) -> Dialogue:
        """Its last turn comes next. Ways share nothing, and all replies are of one length."""
        dialogue = Dialogue(
            *(server, TOKENIZER, way, arguments.reply_tokens),
            body={"extra_key": str(ways.index(way))},
            ignore_eos=True,
        )
        for turn in conversation[:-1]:
            dialogue.say("user", turn["question"])
        return dialogue

    held = [(way, one) for one in conversations for way in ways]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        prepared = pool.map(until_last, *zip(*held, strict=True))
        dialogues = list(track(prepared, "all turns but the last", len(held)))
    for number, conversation in enumerate(track(conversations, "last turn")):
        of_it = dialogues[number * len(ways) : (number + 1) * len(ways)]
        pairs = list(zip(ways, of_it, strict=True))
        for way, dialogue in pairs if number % 2 else reversed(pairs):
            dialogue.max_new_tokens = 1
            start = time.perf_counter()
            answer = dialogue.say("user", conversation[-1]["question"])
            if number > 0:  # the first one warms up
                seconds[way].append(time.perf_counter() - start)
                computed[way].append(computed_tokens(answer["meta_info"]))
    for way in ways:
        yield (
            "conversation_first_token",
            {
                **columns(way),
                "turn": len(conversations[0]),
                "reply_tokens": arguments.reply_tokens,
                "rounds": len(seconds[way]),
                "first_token_ms_p50": round(1000 * statistics.median(seconds[way]), 2),
                **paired_ratio(seconds[way], seconds[ways[0]]),
                "computed_tokens_p50": statistics.median(computed[way]),
            },
        )


def pressure(
    server: ServerProcess, arguments: argparse.Namespace, conversations: Sequence[Conversation]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row for every way, each at its best: all conversations begin at once."""
    ways = ways_of(arguments.policies[:1], arguments.kv_budgets[-1:], arguments.reuses)
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    taken: dict[Way, list[Measured]] = {way: [] for way in ways}
    running: dict[Way, int] = dict.fromkeys(ways, 0)
    retracted: dict[Way, int] = dict.fromkeys(ways, 0)
    for way in ways:
        hold(server, way, arguments.max_new_tokens, conversations[0])  # warms up
    for number in track(range(arguments.pressure_rounds), "rounds"):
        for way in ways if number % 2 else reversed(ways):
            server.post("/flush_cache")
            logged, start = len(server.log), time.perf_counter()
            work = partial(hold, server, way, arguments.max_new_tokens)
            with ThreadPoolExecutor(len(conversations)) as pool:
                turns = [turn for held in pool.map(work, conversations) for turn in held]
            rates[way].append(60 * len(turns) / (time.perf_counter() - start))
            taken[way] += turns
            log = server.log[logged:]
            running[way] = max([running[way], *running_requests(log)])
            retracted[way] += retractions(log)
    hicache = {} if not arguments.hicache_ratio else {"hicache_ratio": arguments.hicache_ratio}
    for way in ways:
        mean_computed_tokens = statistics.mean(turn.computed_tokens for turn in taken[way])
        yield (
            "conversation_hicache" if hicache else "conversation_pressure",
            {
                **columns(way),
                **hicache,
                "pool_tokens": arguments.pool_tokens,
                "conversations": len(conversations),
                "rounds": arguments.pressure_rounds,
                "turns_per_minute_p50": round(statistics.median(rates[way]), 1),
                **paired_ratio(rates[way], rates[ways[0]]),
                **accuracy_columns(sum(turn.right for turn in taken[way]), len(taken[way])),
                "computed_tokens": round(mean_computed_tokens, 1),
                "peak_running": running[way],
                "retractions": retracted[way],
            },
        )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model-path", default=str(MODEL))
    made.add_argument("--conversation-file", type=Path, default=MODEL / "heldout.jsonl")
    made.add_argument("--only", nargs="+", default=MEASUREMENTS, choices=MEASUREMENTS)
    made.add_argument(
        "--policies", nargs="*", choices=policy.names(), default=["skipkv", "skipkv+", "streaming"]
    )
    made.add_argument("--kv-budgets", type=int, nargs="+", default=[64, 128, 256])
    made.add_argument(
        "--reuses", nargs="+", choices=REUSES, default=REUSES, help="not of first_token"
    )
    made.add_argument("--conversations", type=int, default=200, help="at most, for the accuracy")
    made.add_argument("--turns", type=int, default=8, help="of each conversation, from its start")
    made.add_argument("--max-new-tokens", type=int, default=600, help="per reply")
    made.add_argument("--parallel", type=int, default=32, help="conversations at once")
    made.add_argument("--rounds", type=int, default=11, help="conversations whose turn is timed")
    made.add_argument("--reply-tokens", type=int, default=400, help="of those conversations")
    made.add_argument("--pool-tokens", type=int, default=8192, help="under pressure")
    made.add_argument("--crowd", type=int, default=16, help="conversations under pressure")
    made.add_argument("--pressure-rounds", type=int, default=3)
    made.add_argument(
        "--hicache-ratio", type=float, default=0, help="host memory over the pool, under pressure"
    )
    return made


def main() -> None:
    arguments = parser().parse_args()
    exit_on_sigterm()
    for name in arguments.only:
        measure, count = {
            "accuracy": (accuracy, arguments.conversations),
            "first_token": (first_token, arguments.rounds + 1),
            "pressure": (pressure, arguments.crowd),
        }[name]
        pool = arguments.pool_tokens if name == "pressure" else 4096 * arguments.parallel
        most = max(arguments.parallel, arguments.crowd)
        flags = ["--max-total-tokens", str(pool), "--max-running-requests", str(most)]
        flags += ["--decode-log-interval", "5", "--kv-policy", "distinct"]
        if name == "pressure" and arguments.hicache_ratio:
            flags += ["--enable-hierarchical-cache"]
            flags += ["--hicache-ratio", str(arguments.hicache_ratio)]
        held_out = read_conversations(arguments.conversation_file, count)
        conversations = [conversation[: arguments.turns] for conversation in held_out]
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess(arguments.model_path, Path(folder) / "server", flags) as server,
        ):
            server.wait_ready(START_S)
            for file, row in measure(server, arguments, conversations):
                append_row(file, row)
                print(row)


if __name__ == "__main__":
    main()
