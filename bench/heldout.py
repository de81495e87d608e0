"""The bundled model's bar, through the real server: held-out problems right at each level.

    python bench/heldout.py                                    # FullKV, 200 problems per level
    python bench/heldout.py --levels hard --policy streaming --kv-budget 64
    python bench/heldout.py --policy skipkv --kv-budget 512 --kv-params '{"tau": 0.85}'

Greedy, all levels in one server. Appends one row per level to bench/rows/heldout.csv.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from record import append_row
from tqdm import tqdm
from transformers import AutoTokenizer

from sgl_skipkv.server_process import ServerProcess

MODEL = Path(__file__).resolve().parent.parent / "examples" / "reasoner"
ANSWER = re.compile(r"Answer: (-?\d+)")


def wilson(right: int, n: int) -> tuple[float, float]:
    """95% Wilson score interval of a proportion."""
    z, p = 1.959964, right / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


def is_right(text: str, answer: int) -> bool:
    found = ANSWER.search(text)
    return found is not None and int(found[1]) == answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", default=["easy", "medium", "hard"])
    parser.add_argument("--problems", type=int, default=200, help="per level")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--kv-budget", type=int)
    parser.add_argument("--kv-params", type=json.loads, default={}, help="JSON object")
    parser.add_argument("--max-new-tokens", type=int, default=3000)
    parser.add_argument("--parallel", type=int, default=16)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    problems = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    params: dict[str, Any] = {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": 0,
        "kv_policy": arguments.policy,
        "kv_budget": arguments.kv_budget,
        "kv_params": arguments.kv_params,
    }

    def solve(problem: dict[str, Any]) -> dict[str, Any]:
        chat = [{"role": "user", "content": problem["prompt"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer: dict[str, Any] = server.post("/generate", {"text": text, "sampling_params": params})
        return answer

    flags = ["--max-total-tokens", "40960", "--max-running-requests", "64"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(MODEL, Path(folder), flags) as server,
    ):
        server.wait_ready()
        for level in arguments.levels:
            chosen = [p for p in problems if p["level"] == level][: arguments.problems]
            with ThreadPoolExecutor(arguments.parallel) as pool:
                answers = list(tqdm(pool.map(solve, chosen), total=len(chosen), desc=level))
            right = sum(
                is_right(answer["text"], problem["answer"])
                for answer, problem in zip(answers, chosen, strict=True)
            )
            infos = [answer["meta_info"] for answer in answers]
            tokens = [info["completion_tokens"] for info in infos]
            peaks = [info["skipkv"]["peak_kv_tokens"] for info in infos]
            low, high = wilson(right, len(chosen))
            row = {
                "level": level,
                "policy": arguments.policy,
                "kv_budget": arguments.kv_budget or "",
                "kv_params": json.dumps(arguments.kv_params),
                "problems": len(chosen),
                "right": right,
                "accuracy": round(right / len(chosen), 4),
                "wilson_low": round(low, 4),
                "wilson_high": round(high, 4),
                "output_tokens_mean": round(sum(tokens) / len(tokens), 1),
                "output_tokens_max": max(tokens),
                "peak_kv_tokens_max": max(peaks),
            }
            append_row("heldout", row)
            print(row)


if __name__ == "__main__":
    main()
