"""kvpress on the same problems: run by ``bench/accuracy/peer.py``, in an environment that has
kvpress 0.5.x.

Reads one JSON object with ``model_path``, ``max_new_tokens`` and ``jobs`` (``press``,
``kv_budget``, ``interval``, ``prompts``) from standard input; writes one JSON line per job: its
answers, generated tokens and seconds. kvpress generates one request at a time. Its cache size
counts the prompt, so it gets ``kv_budget`` plus the length of each prompt; it may evict prompt
tokens, we do not.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline


def press_for(name: str, target_tokens: int, interval: int) -> Any:
    """Decoding compression with one of kvpress's scorers; None without a budget."""
    if name == "none":
        return None
    scorer = getattr(kvpress, name)
    base = scorer(window_size=8) if name == "SnapKVPress" else scorer()
    return kvpress.DecodingPress(
        base, compression_interval=interval, target_size=target_tokens, hidden_states_buffer_size=32
    )


def main() -> None:
    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(request["model_path"])
    model = AutoModelForCausalLM.from_pretrained(request["model_path"], dtype=torch.float32)
    generate = pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
    for job in request["jobs"]:
        answers, tokens, started = [], 0, time.monotonic()
        for prompt in job["prompts"]:
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            prompt_tokens = len(tokenizer.encode(chat, add_special_tokens=False))
            target = prompt_tokens + (job["kv_budget"] or 0)
            reply = generate(
                prompt,
                press=press_for(job["press"], target, job["interval"]),
                max_new_tokens=request["max_new_tokens"],
            )
            answers.append(reply["answer"])
            tokens += len(tokenizer.encode(reply["answer"], add_special_tokens=False)) + 1
        seconds = time.monotonic() - started
        print(json.dumps({"answers": answers, "tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
