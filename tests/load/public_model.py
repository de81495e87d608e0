"""A public model with its own weights under the masking oracle: every policy, on real questions.

    python tests/load/public_model.py             # about 15 minutes of two cores
    python tests/load/public_model.py --policies distinct rkv --record

``bench/public/model.py`` says how to get the model. Every greedy token of an answer must be the
most likely one of a forward in which exactly what was evicted is masked. One row per policy, beside
those of the small random models; ends with 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.extend([str(ROOT), *(str(ROOT / "tests" / one) for one in ("helpers", "load", "."))])

from isolated import isolate

isolate()  # before anything imports sglang

from fleet import flags_of
from models import POLICIES, START_WITHIN_S, Row, judged
from oracle import MaskingOracle
from row_table import show
from server_parts import CHECKED, ONE_BATCH
from servers import Server
from transformers import AutoTokenizer

from bench.public.model import FOLDER, made
from sgl_skipkv.cli.progress import track

QUESTIONS = (
    "Explain step by step how a bicycle pump works, and why it becomes warm.",
    "A shop sells pens in packs of 6. Ann needs 45 pens. How many packs must she buy?",
)
BUDGET, INTERVAL, TOKENS = 96, 32, 320


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--record", action="store_true", help="append to bench/rows/models.csv")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(made(FOLDER))
    asked: dict[str, list[Row]] = {}
    for policy in arguments.policies:
        keys = {"kv_policy": policy, "kv_budget": BUDGET, "kv_params": {"interval": INTERVAL}}
        asked[policy] = [
            {"rid": f"{policy}-{i}", "input_ids": prompt, "tokens": TOKENS, **keys}
            for i, prompt in enumerate(_prompt(tokenizer, text) for text in QUESTIONS)
        ]
    folder = Path(tempfile.mkdtemp(prefix="public-"))
    print("log and trace:", folder)
    with Server(FOLDER, folder, [*ONE_BATCH, *flags_of(folder, CHECKED)]) as server:
        server.wait_ready(START_WITHIN_S)
        every = [one for requests in asked.values() for one in requests]
        for one, answer in zip(every, server.generate_all(every), strict=True):
            one["answer"] = answer
        server.assert_clean()
    oracle = MaskingOracle(FOLDER)
    rows = [
        judged(FOLDER.name, oracle, server, policy, requests)
        for policy, requests in track([*asked.items()], "policies")
    ]
    show(rows, FOLDER.name, record="models" if arguments.record else None)
    return int(any(row["ok"] == "no" for row in rows))


def _prompt(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(written)


if __name__ == "__main__":
    sys.exit(main())
