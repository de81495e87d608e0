"""One selection for all layers against each layer's own: what an engine with shared slots gives up.

    python -m bench.accuracy.layers

Offline, on the tensors of real traces: R-KV's score is computed per layer and KV head; then the
same number of tokens is chosen once for all (as in this package), once per layer, and once per
layer and KV head (as in most papers). One row per layer in bench/rows/layers.csv: how much of the
shared set each layer would have chosen itself, and how much attention of the next queries falls on
tokens that are gone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from bench.lib.record import append_row
from bench.lib.serving import BUNDLED, prompts_of
from sgl_skipkv.cli.files import read_lines
from sgl_skipkv.cli.progress import track
from sgl_skipkv.kernels.reference import key_redundancy, window_attention
from sgl_skipkv.policy.rkv import RKVParams

NEXT_QUERIES = 32
seen: list[tuple[Tensor, Tensor, Tensor]] = []


def remembering(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:  # fmt: skip
    """Eager attention that keeps queries [T, Hq, d], keys [T, Hkv, d] and weights [Hq, T, T]."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)  # whole traces: causal
    weights = (q @ keys.transpose(2, 3) * scaling).masked_fill(future, -torch.inf).softmax(-1)
    seen.append((q[0].transpose(0, 1), k[0].transpose(0, 1), weights[0]))
    return (weights @ values).transpose(1, 2).contiguous(), None


def head_scores(q: Tensor, k: Tensor, params: RKVParams) -> Tensor:
    """R-KV's ``Z`` of every token before the window, [Hkv, n - W]."""
    important = window_attention(q, k, kernel=params.kernel)
    redundant = key_redundancy(k, threshold=params.threshold)[:, : important.shape[1]]
    return params.sigma * important - (1 - params.sigma) * redundant


def top(scores: Tensor, first: int, keep: int) -> Tensor:
    """bool [..., n]: everything before ``first`` and the ``keep`` best after it."""
    chosen = torch.zeros(scores.shape, dtype=torch.bool)
    chosen[..., :first] = True
    return chosen.scatter(-1, scores[..., first:].topk(keep, dim=-1).indices + first, True)


def lost(weights: Tensor, kept: Tensor, at: int) -> float:
    """Share of the next queries' attention to tokens before ``at`` that the kept set misses.

    Args:
        weights: [Hq, T, T]. kept: bool [Hkv or 1, m], m <= at; later tokens are all kept.
    """
    after = weights[:, at : at + NEXT_QUERIES, : kept.shape[1]]
    per_head = kept.repeat_interleave(len(weights) // len(kept), 0)
    return float((after * ~per_head[:, None]).sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default=str(BUNDLED))
    parser.add_argument("--traces", type=Path, help="JSONL of prompt_ids and output_ids")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--kv-budget", type=int, default=323)
    parser.add_argument("--every", type=int, default=128, help="generated tokens between two looks")
    arguments = parser.parse_args()
    AttentionInterface.register("remembering", remembering)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model_path, dtype=torch.float32, attn_implementation="remembering"
    ).eval()
    params, totals, looks = RKVParams(), None, 0
    for prompt, ids in track(traces(arguments, model), "traces"):
        seen.clear()
        with torch.no_grad():
            model(torch.tensor([ids]))
        for at in range(
            prompt + arguments.kv_budget + arguments.every, len(ids) - NEXT_QUERIES, arguments.every
        ):
            scores = torch.stack(
                [head_scores(q[at - params.window : at], k[:at], params) for q, k, _ in seen]
            )
            keep = arguments.kv_budget - params.window
            shared = top(scores.mean(dim=(0, 1)), prompt, keep)
            of_layer = top(scores.mean(dim=1), prompt, keep)
            of_head = top(scores, prompt, keep)
            measures = []
            for layer, (_, _, weights) in enumerate(seen):
                both = (shared & of_layer[layer])[prompt:].sum() / keep
                measures.append(
                    [
                        float(both),
                        lost(weights, shared[None], at),
                        lost(weights, of_layer[layer][None], at),
                        lost(weights, of_head[layer], at),
                    ]
                )
            totals = torch.tensor(measures) + (0 if totals is None else totals)
            looks += 1
    assert totals is not None, "no trace is longer than the budget"
    for layer, means in enumerate((totals / looks).tolist()):
        names = ("overlap", "lost_shared", "lost_per_layer", "lost_per_head")
        append_row(
            "layers",
            {
                "model": Path(arguments.model_path).name,
                "kv_budget": arguments.kv_budget,
                "looks": looks,
                "layer": layer,
                **{name: round(value, 4) for name, value in zip(names, means, strict=True)},
            },
        )


def traces(arguments: argparse.Namespace, model: Any) -> list[tuple[int, list[int]]]:
    """Prompt length and all tokens of each trace: from a file, or greedy from the model."""
    if arguments.traces:
        records = [line.record for line in read_lines("traces", arguments.traces)]
        pairs = [(r["prompt_ids"], r["output_ids"]) for r in records[: arguments.problems]]
        return [(len(prompt), prompt + output) for prompt, output in pairs]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_path)
    prompts = prompts_of(BUNDLED / "heldout.jsonl", "hard", arguments.problems)
    model.set_attn_implementation("sdpa")
    greedy = list(greedy_traces(model, tokenizer, prompts))
    model.set_attn_implementation("remembering")
    return greedy


def greedy_traces(
    model: Any, tokenizer: Any, prompts: Sequence[str]
) -> Iterator[tuple[int, list[int]]]:
    """Prompt length and all tokens of each prompt's greedy trace."""
    for prompt in track(prompts, "greedy traces"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            **{"add_generation_prompt": True, "return_dict": False},
        )
        with torch.no_grad():
            trace = model.generate(torch.tensor([ids]), max_new_tokens=2000, do_sample=False)
        yield len(ids), trace[0].tolist()


if __name__ == "__main__":
    main()
