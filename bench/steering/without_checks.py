"""Whether a model can go on when a check is left out: whether steering can shorten its traces.

    python -m bench.steering.without_checks

Teacher forcing, no steering, no eviction: the true solution with all of its checks and with none,
one forward pass each. A passage is wrong when one of its tokens after the first is not the argmax;
the first is the decision whether to check. One row per model and form in
bench/rows/without_checks.csv.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.lib.record import append_row
from bench.lib.serving import ROOT
from bench.reasoner.problems import heldout_problem, solution_passages
from sgl_skipkv.cli.progress import track


def wrong_passages(model: torch.nn.Module, prompt: list[int], passages: list[list[int]]) -> int:
    """Passages with a token that the model would not have written."""
    ids = torch.tensor([*prompt, *(token for passage in passages for token in passage)])
    with torch.inference_mode():
        chosen = model(ids[None]).logits[0].argmax(dim=-1)
    at, wrong = len(prompt), 0
    for passage in passages:
        stop = at + len(passage)
        wrong += not torch.equal(chosen[at : stop - 1], ids[at + 1 : stop])
        at = stop
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    models = [ROOT / "examples" / name for name in ("reasoner", "wanderer")]
    parser.add_argument("--model-path", type=Path, nargs="+", default=models)
    parser.add_argument("--problems", type=int, default=20)
    arguments = parser.parse_args()
    for path in arguments.model_path:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for checks in (True, False):
            wrong = count = 0
            for index in track(range(arguments.problems), path.name):
                problem = heldout_problem("hard", index)
                chat = [{"role": "user", "content": problem.prompt}]
                prompt = tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True
                )
                texts = solution_passages(problem, lambda kept=checks: kept)
                passages = [tokenizer.encode(text) for text in texts]
                wrong += wrong_passages(model, tokenizer.encode(prompt), passages)
                count += len(passages)
            row = {
                "model": path.name,
                "level": "hard",
                "problems": arguments.problems,
                "checks": "all" if checks else "none",
                "passages": count,
                "wrong_passages": wrong,
            }
            append_row("without_checks", row)
            print(row)


if __name__ == "__main__":
    main()
