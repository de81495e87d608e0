"""Fifteen model families under the masking oracle: every policy, and steering where it works.

Llama, Qwen2 and Qwen3 have the same in ``make test``: tests/server/test_oracle.py.

    python tests/load/models.py                                  # about 10 minutes of a core
    python tests/load/models.py --models glm4 gemma --requests 1

One row per family and policy, one per family of its steered requests. Where steering is not
supported, a server with a vector must not start, and says why. Ends with 1 if something does not
hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), *(str(ROOT / "tests" / one) for one in ("helpers", "load", "."))])

from isolated import isolate

isolate()  # before anything imports sglang

from fleet import addition_of, flags_of
from media_oracle import oracle_of
from oracle import MaskingOracle
from pictures import image_data, with_picture
from row_table import show
from server_parts import CHECKED, ONE_BATCH
from servers import Server, logprob_gap
from tiny_models import ARGUMENTS, ENVIRONMENT, WITH_VISION, prompt_ids, save_model

from sgl_skipkv.cli.progress import track
from sgl_skipkv.policy import names, policy_class

MODELS = (
    *("qwen3_moe", "mistral", "phi3", "glm4", "glm4_moe"),
    *("olmo2", "granite", "gemma", "gemma3", "deepseek_v3", "gpt_oss", "lfm2"),
    "qwen3_next",
    *WITH_VISION,
)
UNSTEERED = ("olmo2", "granite", "gemma", "gemma3", "deepseek_v3", "lfm2", "qwen3_next")
POLICIES = [name for name in names() if name != "full"]
#: whose queries no policy turns back: MLA, and rotary embeddings with three axes
NOT_TURNED_BACK = ("deepseek_v3", *WITH_VISION)
STEERED_POLICIES = ("full", "streaming", "skipkv+")
BUDGET, INTERVAL, TOKENS, PROMPT_TOKENS = 40, 16, 150, 60
LAYER, STRENGTH = 1, 1.25
LOGPROB_TOLERANCE, STEERED_TOLERANCE = 2e-3, 2e-4
REFUSAL = "steering_vector: expected a model whose layers steering was tested on"
START_WITHIN_S = 600
Row = dict[str, Any]


def request(family: str, rid: str, policy: str, **keys: Any) -> Row:
    prompt = (with_picture if family in WITH_VISION else prompt_ids)(rid, PROMPT_TOKENS)
    parameters = {"interval": INTERVAL, "delimiters": "any-newline"}
    budget = {} if policy == "full" else {"kv_budget": BUDGET, "kv_params": parameters}
    return {
        **{"rid": rid, "input_ids": prompt, "tokens": TOKENS},
        **({"image_data": image_data(prompt)} if family in WITH_VISION else {}),
        **{"kv_policy": policy, **budget, **keys},
    }


def started(family: str, model: Path, folder: Path, vector: bool) -> Server:
    folder.mkdir(parents=True)
    flags = [*flags_of(folder, CHECKED, LAYER if vector else None), *ARGUMENTS.get(family, ())]
    return Server(model, folder, [*ONE_BATCH, *flags], env=ENVIRONMENT.get(family))


def judged(
    family: str, oracle: MaskingOracle, server: Server, policy: str, requests: Sequence[Row]
) -> Row:
    """The oracle's word on the answers to these requests, all of them sent already."""
    steered = any("steering" in one for one in requests)
    found = {"requests": len(requests), "compactions": 0, "tokens": 0}
    found |= {"wrong_tokens": 0, "wrong_without_masks": 0}
    gap = 0.0
    for asked in requests:
        answer, events = asked["answer"], server.events(asked["rid"])
        ids = answer["output_ids"]
        added = addition_of(LAYER, ids, asked["steering"]) if steered else None
        prompt = oracle.expanded(asked["input_ids"])
        verdict = oracle.judge(prompt, ids, events, added)
        blind = oracle.judge(prompt, ids, [])  # neither masks nor vector
        found["compactions"] += answer["meta_info"]["skipkv"].get("compactions", 0)
        found["tokens"] += len(ids)
        found["wrong_tokens"] += len(verdict.wrong)
        found["wrong_without_masks"] += len(blind.wrong)
        gap = max(gap, logprob_gap(answer, verdict.logprobs.tolist()))
    held = found["wrong_tokens"] == 0 < found["wrong_without_masks"]
    held &= gap <= (STEERED_TOLERANCE if steered else LOGPROB_TOLERANCE)
    return {
        **{"family": family, "policy": f"{policy}, steered" if steered else policy, **found},
        **{"logprob_gap": float(f"{gap:.3g}"), "ok": "yes" if held else "no"},
    }


def run(family: str, folder: Path, count: int) -> list[Row]:
    model, steers = save_model(family, folder / "model"), family not in UNSTEERED
    asked = {
        name: [request(family, f"{name}-{i}", name) for i in range(count)]
        for name in POLICIES
        if not (family in NOT_TURNED_BACK and policy_class(name).needs_rotation)
    }
    steered = {
        policy: [
            request(family, f"steered-{policy}-{i}", policy, steering=STRENGTH)
            for i in range(count)
        ]
        for policy in (STEERED_POLICIES if steers else ())
    }
    groups = [*asked.items(), *steered.items()]
    with started(family, model, folder / "server", vector=steers) as server:
        server.wait_ready(START_WITHIN_S)
        every = [one for _, requests in groups for one in requests]
        for one, answer in zip(every, server.generate_all(every), strict=True):
            one["answer"] = answer
        server.assert_clean()
    oracle = oracle_of(family, model)
    rows = [judged(family, oracle, server, policy, requests) for policy, requests in groups]
    return rows if steers else [*rows, refused(family, model, folder / "refused")]


def refused(family: str, model: Path, folder: Path) -> Row:
    """A server with a vector for a model that cannot be steered ends at start and names it."""
    with started(family, model, folder, vector=True) as server:
        held = server.wait_exit() != 0 and REFUSAL in server.log
    counts = dict.fromkeys(("requests", "compactions", "tokens", "wrong_tokens"), 0)
    counts |= {"wrong_without_masks": 0, "logprob_gap": 0.0}
    named = {"family": family, "policy": "steering refused"}
    return {**named, **counts, "ok": "yes" if held else "no"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--requests", type=int, default=2, help="of each policy")
    parser.add_argument("--record", action="store_true", help="append to bench/rows/models.csv")
    arguments = parser.parse_args()
    folder, missed = Path(tempfile.mkdtemp(prefix="models-")), False
    print("logs and traces, kept if anything goes wrong:", folder)
    for family in track(arguments.models, "models"):
        rows = run(family, folder / family, arguments.requests)
        show(rows, family, record="models" if arguments.record else None)
        missed |= any(row["ok"] == "no" for row in rows)
    if not missed:
        shutil.rmtree(folder)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
