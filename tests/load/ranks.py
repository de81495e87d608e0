"""Several ranks at length: sets of them and of one alone, faults, a killed rank, mistakes.

    python tests/load/ranks.py                        # all of it: hours of two cores
    python tests/load/ranks.py --scale 0.1            # 50 compactions of each policy, not 500
    python tests/load/ranks.py --parts sets --models llama

One row per model, overlap and policy, one per other run, and one per policy of what its gathers
cost. Ends with 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), *(str(ROOT / "tests" / one) for one in ("helpers", "load", "."))])

from isolated import isolate

isolate()  # before anything imports sglang

import psutil
from fleet import flags_of
from oracle import MaskingOracle
from rank_costs import costs
from rank_plants import environment, trace_of
from row_table import show
from server_parts import CHECKED, ONE_BATCH, REASONER, WITHOUT_OVERLAP
from servers import HTTPFailure, Server, logprob_gap
from tiny_models import prompt_ids, save_model

from bench.lib.trace import read_trace
from sgl_skipkv.cli.progress import track
from sgl_skipkv.policy import names, policy_class

POLICIES = [name for name in names() if name != "full"]


@dataclass(frozen=True)
class Spread:
    """How a model is spread over ranks, and what the same requests run on alone.

    Attributes:
        family: of ``tiny_models``; none: the bundled model.
        group: ranks of an attention group: they share a request.
        flags, alone: beside ``--tp-size``.
    """

    family: str
    ranks: int = 2
    group: int = 2
    flags: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    plants: tuple[str, ...] = ()

    @property
    def is_latent(self) -> bool:
        return self.family == "deepseek_v3"


IN_GROUPS = ("--attn-dp-size", "2")
MODELS = {
    "bundled": Spread(""),
    **{name: Spread(name) for name in ("llama", "qwen3", "qwen3_moe")},
    # Experts are shared out, too.
    "qwen3_moe_ep": Spread(
        "qwen3_moe",
        flags=("--ep-size", "2"),
        alone=("--ep-size", "1"),
        plants=("experts-apart",),
    ),
    "deepseek_v3": Spread("deepseek_v3"),
    # DP attention: two attention groups, of one rank and of two.
    "deepseek_v3_dp": Spread("deepseek_v3", group=1, flags=IN_GROUPS),
    "qwen3_moe_dp": Spread("for_four_ranks", ranks=4, flags=IN_GROUPS),
}
BEST_OF_GROUP = ("skipkv", "skipkv+", "rkv", "snapkv", "gkv")
#: compactions of each policy, and of one request
COMPACTIONS, PER_REQUEST = 500, 10
BUDGET, INTERVAL, LOGPROB_TOLERANCE = 40, 16, 2e-3
JUDGED = 1  # requests of each policy that the oracle looks at
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}
#: SGLang waits so long for core dumps of CUDA, also where there is none
NO_CORE_DUMPS = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
START_WITHIN_S, GONE_WITHIN_S = 900, 15
Row = dict[str, Any]
Events = dict[str, list[dict[str, Any]]]


def started(
    model: Path, folder: Path, ranks: int, *plants: str, more: Sequence[str] = (), **env: str
) -> Server:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [*flags_of(folder, {**CHECKED, "check_agreement": True}), *ONE_BATCH, *more]
    environ = {**environment(*plants), **NO_CORE_DUMPS, **env}
    server = Server(model, folder, ["--tp-size", str(ranks), *arguments], env=environ)
    return server.wait_ready(START_WITHIN_S)


def requests_of(policy: str, count: int) -> list[Row]:
    tokens = BUDGET + (PER_REQUEST + 1) * INTERVAL
    return [
        {
            "rid": f"{policy}-{i}",
            "input_ids": prompt_ids(f"{policy} {i}", 40),
            "tokens": tokens,
            "kv_budget": BUDGET,
            "kv_policy": policy,
            "kv_params": {"interval": INTERVAL, "delimiters": "any-newline"},
        }
        for i in range(count)
    ]


def events_of(server: Server, rank: int) -> Events:
    """By request, in order: what this rank of every attention group has traced."""
    found: Events = {}
    for path in server.trace_files:
        for event in read_trace(trace_of(path, rank)):
            found.setdefault(event["rid"], []).append(event)
    return found


def kept_sets(events: Events, requests: Sequence[Row]) -> list[list[int]]:
    return [
        event["kept"]
        for request in requests
        for event in events[request["rid"]]
        if event["event"] == "compact"
    ]


def sets(model: Path, name: str, folder: Path, overlap: bool, scale: float) -> list[Row]:
    """The same requests on several ranks and on one."""
    spread, count = MODELS[name], max(1, round(COMPACTIONS * scale / PER_REQUEST))
    asked = {policy: requests_of(policy, count) for policy in _policies_of(spread)}
    waves = [[requests[i] for requests in asked.values()] for i in range(count)]
    more = () if overlap else WITHOUT_OVERLAP
    answers: dict[str, Row] = {}
    traces: list[Events] = []  # of the first and the last rank of a group, and of one alone
    for ranks, flags in ((spread.ranks, spread.flags), (1, spread.alone)):
        place = folder / f"{ranks}"
        with started(model, place, ranks, *spread.plants, more=(*more, *flags)) as server:
            for wave in track(waves, f"{name}, {ranks} ranks, overlap {overlap}"):
                found = server.generate_all(wave)
                if ranks > 1:
                    answers |= {one["rid"]: two for one, two in zip(wave, found, strict=True)}
            server.assert_clean()
            of_group = (0, spread.group - 1) if ranks > 1 else (0,)
            traces += [events_of(server, rank) for rank in of_group]
    oracle, rows = MaskingOracle(model), []
    for policy, requests in asked.items():
        first, second, alone = (kept_sets(events, requests) for events in traces)
        wrong, gap = 0, 0.0
        for request in requests[:JUDGED]:
            answer, events = answers[request["rid"]], traces[0][request["rid"]]
            verdict = oracle.judge(request["input_ids"], answer["output_ids"], events)
            wrong += len(verdict.wrong)
            gap = max(gap, logprob_gap(answer, verdict.logprobs.tolist()))
        equal, same = matches(first, second), matches(first, alone)
        held = equal == len(first)
        if not (spread.is_latent and spread.group > 1 and policy in BEST_OF_GROUP):
            held &= same >= 0.99 * len(first)
        held &= wrong == 0 and gap <= LOGPROB_TOLERANCE
        rows.append(
            {
                "model": name,
                "overlap": "on" if overlap else "off",
                "policy": policy,
                "compactions": len(first),
                "equal_on_ranks": equal if spread.group > 1 else "",
                "as_one_rank": same,
                "wrong_tokens": wrong,
                "logprob_gap": float(f"{gap:.3g}"),
                "ok": "yes" if held else "no",
            }
        )
    return rows


def _policies_of(spread: Spread) -> list[str]:
    """All but those that MLA is refused with."""
    turning_back = [name for name in POLICIES if policy_class(name).needs_rotation]
    return [name for name in POLICIES if not (spread.is_latent and name in turning_back)]


def matches(some: Sequence[object], others: Sequence[object]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def run_row(run: str, quantity: str, value: float, limit: str, held: bool) -> Row:
    shown = float(f"{value:.4g}")
    named = {"run": run, "quantity": quantity, "value": shown, "limit": limit}
    return {**named, "ok": "yes" if held else "no"}


def restores(model: Path, folder: Path) -> list[Row]:
    """Retractions every few steps, of every policy, with overlap and without."""
    rows = []
    for overlap in (True, False):
        more = () if overlap else WITHOUT_OVERLAP
        run = f"restores, overlap {'on' if overlap else 'off'}"
        with started(model, folder / str(overlap), 2, more=more, **RETRACTING) as server:
            requests = [requests_of(policy, 1)[0] for policy in POLICIES]
            server.generate_all(requests)
            server.assert_clean()
            first, second = (trace_of(server.trace_path, rank) for rank in (0, 1))
        events = read_trace(first)
        count = sum(event["event"] == "restore" for event in events)
        equal = matches(events, read_trace(second))
        rows.append(run_row(run, "restores", count, ">= 20", count >= 20))
        rows.append(run_row(run, "lines of the trace", len(events), "", True))
        rows.append(run_row(run, "equal on ranks", equal, "all", equal == len(events)))
    return rows


def kill(model: Path, folder: Path) -> list[Row]:
    """``kill -9`` of each rank, among compactions."""
    rows = []
    for rank in (0, 1):
        server = started(model, folder / str(rank), 2)
        with server:
            pids = [p for p in psutil.process_iter(["cmdline"]) if _is_rank(p, server, rank)]
            (victim,) = pids
            with ThreadPoolExecutor(4) as pool:
                ends = [
                    pool.submit(_ended, server, request) for request in requests_of("distinct", 4)
                ]
                while "compact" not in server.trace_path.read_text():
                    time.sleep(0.05)
                victim.kill()
                start = time.monotonic()
                gone = server.wait_gone(120)
                seconds = time.monotonic() - start
                told = sum(end.result() for end in ends)
        run = f"kill -9 of rank {rank}"
        held = gone and seconds <= GONE_WITHIN_S
        rows.append(run_row(run, "seconds until all processes are gone", seconds, "<= 15", held))
        rows.append(run_row(run, "clients told by an error", told, "= 4", told == 4))
    return rows


def _is_rank(process: psutil.Process, server: Server, rank: int) -> bool:
    title = " ".join(process.info["cmdline"] or ())
    try:
        own = os.getpgid(process.pid) == server.process.pid
    except ProcessLookupError:
        return False
    return own and title.startswith("sglang::scheduler") and f"TP{rank}" in title


def _ended(server: Server, request: Mapping[str, Any]) -> bool:
    """Whether the request ended with an error."""
    try:
        server.generate(**request)
    except (HTTPFailure, OSError):
        return True
    return False


def mistakes(model: Path, folder: Path) -> list[Row]:
    """Ranks that keep different tokens: the check of agreement ends the server."""
    rows = []
    for planted, policy in (("no-gather", "skipkv"), ("other-draw", "random")):
        with started(model, folder / planted, 2, planted) as server:
            start = time.monotonic()
            _ended(server, requests_of(policy, 1)[0])
            gone = server.wait_gone(120)
            seconds = time.monotonic() - start
            seen = gone and "DisagreementError" in server.log
        run = f"planted: {planted}"
        rows.append(run_row(run, "seconds until the server has ended", seconds, "seen", seen))
    return rows


RUNS = {"restores": restores, "kill": kill, "mistakes": mistakes}
PARTS = ("sets", *RUNS, "costs")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--overlap", nargs="+", choices=("on", "off"), default=("on", "off"))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--record", action="store_true", help="append to bench/rows")
    arguments = parser.parse_args()
    folder, rows = Path(tempfile.mkdtemp(prefix="ranks-")), list[Row]()
    print("logs and traces, kept if anything goes wrong:", folder)
    models = {
        name: save_model(MODELS[name].family, folder / name) if MODELS[name].family else REASONER
        for name in arguments.models
    }

    def told(found: list[Row], file: str, title: str) -> None:
        show(found, title, record=file if arguments.record else None)
        rows.extend(found)

    if "sets" in arguments.parts:
        for name, model in models.items():
            for overlap in arguments.overlap:
                place = folder / f"{name}-{overlap}"
                found = sets(model, name, place, overlap == "on", arguments.scale)
                told(found, "ranks", "several ranks")
    for part, run in RUNS.items():
        if part in arguments.parts:
            told(run(next(iter(models.values())), folder / part), "rank_runs", part)
    if "costs" in arguments.parts:
        told(costs(), "rank_costs", "gathers of one compaction")
    missed = [row for row in rows if row.get("ok") == "no"]
    if not missed:
        shutil.rmtree(folder)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
