"""An SGLang program in which every ``gen`` has a KV budget of its own.

    python -m sglang.launch_server --model-path examples/reasoner --port 30000 --kv-policy distinct
    python examples/quickstart.py --url http://127.0.0.1:30000

It thinks about one problem within 512 KV tokens, and answers from what these keep (``kv_reuse``)
within 32 more. Three branches of a fork think for themselves within 384 each; they share the
question's KV cache.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.error import URLError

import sglang as sgl

import sgl_skipkv.frontend  # noqa: F401  # gives sgl.gen its kv_budget

# Compactions come more often than by default: the traces of this model are short.
KV_PARAMS = {"interval": 32}
PROBLEMS = Path(__file__).parent / "reasoner" / "heldout.jsonl"


@sgl.function
def solve(s: Any, question: str) -> None:
    s += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    branches = s.fork(3)
    thinking = {"max_tokens": 3000, "kv_params": KV_PARAMS}
    s += sgl.gen("thoughts", temperature=0, stop="</think>", kv_budget=512, **thinking)
    s += "</think>\n"
    s += sgl.gen("answer", max_tokens=8, temperature=0, kv_budget=32)
    for branch in branches:
        branch += sgl.gen("reply", temperature=0.3, top_p=0.95, kv_budget=384, **thinking)
    s["votes"] = [branch["reply"].rpartition("Answer: ")[2].strip() for branch in branches]
    s["branches"] = [branch.get_meta_info("reply")["skipkv"] for branch in branches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--problem", type=int, default=0, help="line of the held-out hard problems")
    arguments = parser.parse_args()
    lines = (json.loads(line) for line in PROBLEMS.read_text().splitlines())
    problems = [line for line in lines if line["level"] == "hard"]
    if arguments.problem not in range(len(problems)):
        parser.error(f"--problem: expected 0 to {len(problems) - 1}, got {arguments.problem}")
    problem = problems[arguments.problem]
    try:
        backend = sgl.RuntimeEndpoint(arguments.url)
    except (URLError, ValueError) as error:  # nothing listens there, or no address
        parser.error(
            f"--url: expected the address of a running server, got {arguments.url}: {error}"
        )
    state = solve.run(problem["prompt"], backend=backend, kv_reuse="keep")
    thought = state.get_meta_info("thoughts")["skipkv"]
    answered = state.get_meta_info("answer")
    reused = answered["skipkv"]
    computed = answered["prompt_tokens"] - reused["reused_tokens"]
    print(f"question  {' '.join(problem['prompt'].split())[:90]}...")
    print(f"right     Answer: {problem['answer']}")
    print(
        f"thought   {thought['full_kv_tokens']} tokens, never more than "
        f"{thought['peak_kv_tokens']} of them cached (kv_budget {thought['kv_budget']})"
    )
    print(
        f"said      {state['answer'].strip()}, from {reused['reused_kv_tokens']} cached tokens of "
        f"the {reused['reused_tokens']} before it; {computed} computed"
    )
    peaks = ", ".join(str(branch["peak_kv_tokens"]) for branch in state["branches"])
    (vote, count), *_ = Counter(state["votes"]).most_common()
    print(f"branches  {count} of 3 say {vote}, with peaks of {peaks} KV tokens (kv_budget 384)")


if __name__ == "__main__":
    main()
