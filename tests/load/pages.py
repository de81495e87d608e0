"""Pages of 16, 32 and 64 tokens at length: the sets of pages of one, the oracle, and restores.

    python tests/load/pages.py                        # about half an hour of two cores
    python tests/load/pages.py --parts sets --pages 16 --models llama --requests 1

One row per model, page size and policy, one per other run. Ends with 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), *(str(ROOT / "tests" / one) for one in ("helpers", "load", "."))])

from isolated import isolate

isolate()  # before anything imports sglang

from fleet import flags_of
from moved_bytes import moved_over_survivors
from oracle import MaskingOracle
from row_table import show
from server_parts import CHECKED, ONE_BATCH, WITHOUT_OVERLAP
from servers import Server, logprob_gap
from talks import MODES, TEXT, Asked, Turn, converse, distance, draw, keys, verdict
from tiny_models import prompt_ids, save_model

from sgl_skipkv.policy import names, policy_class

POLICIES = [name for name in names() if name != "full"]
#: heads, heads, windows, latents
PAGES, MODELS = (16, 32, 64), ("llama", "qwen3", "gemma3", "deepseek_v3")
BUDGET, INTERVAL, TOKENS, RESTORED_TOKENS = 40, 16, 216, 104
LOGPROB_TOLERANCE, START_WITHIN_S = 2e-3, 900
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
PARTS, TURNS = ("sets", "restores", "bytes", "turns"), 3
Row = dict[str, Any]


def policies_of(model: str) -> list[str]:
    """All; with latents those that turn no query back."""
    latent = model == "deepseek_v3"
    return [name for name in POLICIES if not (latent and policy_class(name).needs_rotation)]


def requests_of(model: str, count: int, tokens: int = TOKENS) -> list[list[Row]]:
    """Waves of one request per policy; prompts of every length in a page of 16."""
    return [
        [
            {
                "rid": f"{policy}-{wave}",
                "input_ids": prompt_ids(f"{policy} {wave}", 40 + (7 * i + wave) % 16),
                "tokens": tokens,
                "kv_budget": BUDGET,
                "kv_policy": policy,
                "kv_params": {"interval": INTERVAL, "delimiters": "any-newline"},
            }
            for i, policy in enumerate(policies_of(model))
        ]
        for wave in range(count)
    ]


def served(
    model: Path, folder: Path, page: int, waves: Sequence[Sequence[Row]], overlap: bool, **env: str
) -> tuple[dict[str, Row], dict[str, list[Row]]]:
    """Answers and trace lines by request, of a server whose checks had nothing to say."""
    folder.mkdir(parents=True)
    flags = [*flags_of(folder, CHECKED), *ONE_BATCH, "--page-size", str(page)]
    answers, events = dict[str, Row](), dict[str, list[Row]]()
    with Server(model, folder, [*flags, *(() if overlap else WITHOUT_OVERLAP)], env=env) as server:
        server.wait_ready(START_WITHIN_S)
        for wave in waves:
            for request, answer in zip(wave, server.generate_all(wave), strict=True):
                answers[request["rid"]] = answer
                events[request["rid"]] = server.events(request["rid"])
        server.assert_clean()
    return answers, events


def kept_sets(events: Sequence[Row]) -> list[list[int]]:
    return [event["kept"] for event in events if event["event"] == "compact"]


def sets(model: Path, name: str, folder: Path, pages: Sequence[int], count: int) -> list[Row]:
    """The same requests with pages of one token and with these."""
    waves, rows = requests_of(name, count), list[Row]()
    _, alone = served(model, folder / "1", 1, waves, True)
    oracle = MaskingOracle(model)
    for i, page in enumerate(pages):
        overlap = i % 2 == 0
        answers, events = served(model, folder / str(page), page, waves, overlap)
        for policy in policies_of(name):
            own = [one for wave in waves for one in wave if one["kv_policy"] == policy]
            rows.append(judged(oracle, name, page, overlap, own, answers, events, alone))
    return rows


def judged(
    oracle: MaskingOracle,
    model: str,
    page: int,
    overlap: bool,
    requests: Sequence[Row],
    answers: Mapping[str, Row],
    events: Mapping[str, list[Row]],
    alone: Mapping[str, list[Row]],
) -> Row:
    compactions = same = wrong = 0
    gap = 0.0
    for request in requests:
        rid, ids = request["rid"], answers[request["rid"]]["output_ids"]
        own, expected = kept_sets(events[rid]), kept_sets(alone[rid])
        compactions += len(expected)
        same += sum(map(list.__eq__, own, expected))
        verdict = oracle.judge(request["input_ids"], ids, events[rid])
        wrong += len(verdict.wrong)
        gap = max(gap, logprob_gap(answers[rid], verdict.logprobs.tolist()))
    held = 0 < same == compactions and wrong == 0 and gap <= LOGPROB_TOLERANCE
    return {
        **{"model": model, "page_tokens": page, "overlap": "on" if overlap else "off"},
        **{"policy": requests[0]["kv_policy"], "compactions": compactions, "as_page_1": same},
        **{"wrong_tokens": wrong, "logprob_gap": float(f"{gap:.3g}")},
        **{"ok": "yes" if held else "no"},
    }


def run_row(run: str, page: int, quantity: str, value: float, limit: str, held: bool) -> Row:
    named = {"run": run, "page_tokens": page, "quantity": quantity}
    return {
        **named,
        "value": float(f"{value:.4g}"),
        "limit": limit,
        "ok": "yes" if held else "no",
    }


def restores(model: Path, name: str, folder: Path, pages: Sequence[int]) -> list[Row]:
    """Retracted every few steps: restored requests keep what they keep when nobody retracts.

    SGLang retracts the shorter output and never its last request: so each request has one of its
    policy beside it, and one of the two is retracted again and again. Without overlap, or those
    that have just compacted would be recomputed.
    """
    (wave,) = requests_of(name, 1, RESTORED_TOKENS)
    rows, waves = list[Row](), [[one, beside(one)] for one in wave]
    _, calm = served(model, folder / "calm", 1, waves, False)
    for page in pages:
        _, events = served(model, folder / str(page), page, waves, False, **RETRACTING)
        kinds = {rid: [event["event"] for event in own] for rid, own in events.items()}
        restored = [rid for rid in kinds if "restore" in kinds[rid]]
        exact = sum(kept_sets(events[rid]) == kept_sets(calm[rid]) for rid in restored)
        policies = {one["kv_policy"] for pair in waves for one in pair if one["rid"] in restored}
        count, again = (
            sum(one.count(kind) for one in kinds.values()) for kind in ("restore", "recompute")
        )
        told = (
            ("restores", count, ">= 20", count >= 20),
            ("recomputed instead", again, "0", again == 0),
            ("policies restored", len(policies), "all", len(policies) == len(wave)),
            ("requests restored", len(restored), "", True),
            ("of them as pages of one, never retracted", exact, "all", exact == len(restored)),
        )
        rows += [run_row(f"restores, {name}", page, *one) for one in told]
    return rows


def beside(one: Row) -> Row:
    own = {"rid": f"beside-{one['rid']}", "input_ids": prompt_ids(one["rid"], 8)}
    return {**one, **own, "tokens": one["tokens"] + 32}


def moved(pages: Sequence[int]) -> list[Row]:
    """What a compaction's move reads and writes of the KV cache."""
    rows = list[Row]()
    for page in pages:
        for kind in ("random", "most recent"):
            share = moved_over_survivors(kind, page)
            what = f"read and written, over the survivors' KV, {kind} kept"
            rows.append(run_row("moved bytes", page, what, share, "<= 2.2", 1 < share <= 2.2))
    return rows


def turns(model: Path, folder: Path, pages: Sequence[int]) -> list[Row]:
    """Conversations with ``kv_reuse``: every turn is the one that pages of one give."""
    rows, expected = list[Row](), dict[str, Turn]()
    oracle, cases = MaskingOracle(model), [(m, policy) for policy in POLICIES for m in MODES]
    for page in (1, *pages):
        (place := folder / str(page)).mkdir(parents=True)
        flags = [*flags_of(place, CHECKED), *ONE_BATCH, "--page-size", str(page)]
        said = dict[str, Turn]()
        with Server(model, place, [*flags, "--max-total-tokens", "32768"]) as server:
            server.wait_ready(START_WITHIN_S)
            for some in (cases[::2], cases[1::2]):
                for talk, branches in converse(server, some, asked, TURNS).values():
                    said |= {turn.asked.rid: turn for turn in (*talk, *branches)}
            server.assert_clean()
        expected = expected or said
        compactions = same = wrong = alike = 0
        gap = 0.0
        for rid, turn in said.items():
            found, other = verdict(oracle, turn, turn.compactions), expected[rid]
            wrong, gap = wrong + len(found.wrong), max(gap, distance(turn, found))
            own, others = kept_sets(turn.own), kept_sets(other.own)
            compactions, same = compactions + len(others), same + sum(map(list.__eq__, own, others))
            names = ("reused_tokens", "reused_kv_tokens", "kv_reuse_miss")
            alike += [turn.info[name] for name in names] == [other.info[name] for name in names]
        right = wrong == 0 and gap <= LOGPROB_TOLERANCE
        told = (
            ("turns", len(said), "", True),
            ("that reuse what pages of one do", alike, "all", alike == len(said)),
            ("compactions", compactions, "> 0", compactions > 0),
            ("of them as pages of one", same, "all", same == compactions),
            ("wrong tokens", wrong, "0", right),
        )
        rows += [run_row("conversations", page, *one) for one in told]
    return rows


def asked(case: tuple[str, str], number: object, after: Turn | None) -> Asked:
    text = draw((*case, number), TEXT if after else 90 + TEXT)
    return Asked(f"talk-{'-'.join(case)}-{number}", text, keys(*case), after)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pages", nargs="+", type=int, choices=PAGES, default=PAGES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--requests", type=int, default=2, help="of each policy")
    parser.add_argument("--record", action="store_true", help="append to bench/rows")
    arguments = parser.parse_args()
    folder, rows = Path(tempfile.mkdtemp(prefix="pages-")), list[Row]()
    print("logs and traces, kept if anything goes wrong:", folder)
    models = {name: save_model(name, folder / name) for name in arguments.models}

    def told(found: list[Row], file: str, title: str) -> None:
        show(found, title, record=file if arguments.record else None)
        rows.extend(found)

    if "sets" in arguments.parts:
        for name, model in models.items():
            place = folder / f"{name}-sets"
            told(sets(model, name, place, arguments.pages, arguments.requests), "pages", "pages")
    for name, model in models.items():
        if "restores" in arguments.parts and name != "qwen3":  # it has nothing that llama lacks
            place = folder / f"{name}-restores"
            told(restores(model, name, place, arguments.pages), "page_runs", "restores")
    model = next(iter(models.values()))
    if "bytes" in arguments.parts:
        told(moved(arguments.pages), "page_runs", "moved bytes")
    if "turns" in arguments.parts:
        told(turns(model, folder / "turns", arguments.pages), "page_runs", "conversations")
    missed = [row for row in rows if row["ok"] == "no"]
    if not missed:
        shutil.rmtree(folder)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
