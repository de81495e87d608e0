"""How often a model solves the held-out problems of every family and size. No server, no budget.

    python -m bench.reasoner.check_families                      # examples/families, all 3,000
    python -m bench.reasoner.check_families --model-path OUT --sizes short --problems 20

A problem has one right trace. Greedy decoding writes it exactly if, at each of its positions, the
most likely token is the trace's, so one forward pass replaces decoding. Where it deviates, the
trace is decoded, since its answer may be right nevertheless.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.reasoner.export import load_model
from bench.reasoner.families.base import SIZES, Size, Task
from bench.reasoner.families.registry import FAMILIES, HELDOUT, heldout_task
from bench.reasoner.model import Block, Reasoner, rope_table
from bench.reasoner.vocabulary import TURN_END, prompt_text, token_id
from sgl_skipkv.cli.progress import progress

FOLDER = Path(__file__).parents[2] / "examples" / "families"
BATCH_TOKENS = 12_000
MOST_MORE_TOKENS = 200
"""How much longer than the right trace a decoded one may become."""
ANSWER = re.compile(r"</think>\nAnswer: (\d+)")


def encode(tokenizer: Tokenizer, task: Task) -> tuple[list[int], int]:
    """The ids of prompt and trace, with the end of the turn, and where the trace starts."""
    prompt = tokenizer.encode(prompt_text(task.prompt)).ids
    trace = tokenizer.encode(task.solution).ids
    return [*prompt, *trace, token_id(tokenizer, TURN_END)], len(prompt)


@torch.inference_mode()
def choices(model: Reasoner, ids: list[int], visible: Tensor | None = None) -> Tensor:
    """The most likely token after each position, int64 [T]; ``visible`` is bool [T, T]."""
    cos, sin = rope_table(model.shape, len(ids), torch.device("cpu"))
    x = model.embed(torch.tensor([ids]))
    for block in model.blocks:
        assert isinstance(block, Block)
        q, k, v = block.project(x, cos, sin)
        k, v = _repeat(block, k), _repeat(block, v)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None
        )
        x = block.finish(x, attended)
    return F.linear(model.norm_out(x), model.embed.weight)[0].argmax(-1)


def _repeat(block: Block, x: Tensor) -> Tensor:
    """Keys or values [B, Hkv, T, d] as one of each per query head."""
    return x.repeat_interleave(block.shape.query_heads // block.shape.kv_heads, dim=1)


@torch.inference_mode()
def wrong_tokens(model: Reasoner, rows: Sequence[tuple[list[int], int]]) -> list[int]:
    """For each row how many tokens of its trace are not the most likely ones."""
    longest = max(len(ids) for ids, _ in rows)
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, (ids, _) in enumerate(rows):
        padded[row, : len(ids)] = torch.tensor(ids)
    differs = model(padded[:, :-1]).argmax(-1) != padded[:, 1:]
    return [
        int(differs[row, start - 1 : len(ids) - 1].sum()) for row, (ids, start) in enumerate(rows)
    ]


@torch.inference_mode()
def decode(model: Reasoner, prompt: list[int], most: int, end: int) -> list[int]:
    """Greedy decoding of one prompt, with a KV cache; what was written."""
    length = len(prompt) + most
    cos, sin = rope_table(model.shape, length, torch.device("cpu"))
    size = (1, model.shape.kv_heads, length, model.shape.head_dim)
    caches = [(torch.zeros(size), torch.zeros(size)) for _ in model.blocks]
    written: list[int] = []
    new, start = prompt, 0
    while len(written) < most:
        stop = start + len(new)
        x = model.embed(torch.tensor([new]))
        for block, (keys, values) in zip(model.blocks, caches, strict=True):
            assert isinstance(block, Block)
            q, k, v = block.project(x, cos[start:stop], sin[start:stop])
            keys[:, :, start:stop], values[:, :, start:stop] = k, v
            k, v = _repeat(block, keys[:, :, :stop]), _repeat(block, values[:, :, :stop])
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=len(new) > 1)
            x = block.finish(x, attended)
        best = int(F.linear(model.norm_out(x[0, -1]), model.embed.weight).argmax())
        written.append(best)
        if best == end:
            break
        new, start = [best], stop
    return written


def answers_right(model: Reasoner, tokenizer: Tokenizer, task: Task) -> bool:
    """Whether greedy decoding ends with the right answer."""
    ids, start = encode(tokenizer, task)
    most = len(ids) - start + MOST_MORE_TOKENS
    text = tokenizer.decode(decode(model, ids[:start], most, ids[-1]), skip_special_tokens=False)
    found = ANSWER.search(text)
    return found is not None and int(found[1]) == task.answer


def batches(tokenizer: Tokenizer, tasks: Sequence[Task]) -> Iterator[list[tuple[list[int], int]]]:
    """Encoded problems in batches of about ``BATCH_TOKENS``."""
    rows = [encode(tokenizer, task) for task in tasks]
    size = max(1, BATCH_TOKENS // max(len(ids) for ids, _ in rows))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def main() -> None:
    """Print the share of right traces and of right answers, by family and size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model-path", type=Path, default=FOLDER)
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--problems", type=int, default=HELDOUT, help="of each family and size")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--traces-only", action="store_true", help="decode nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model_path)
    tokenizer = Tokenizer.from_file(str(arguments.model_path / "tokenizer.json"))
    print(f"{'family':<14}{'size':<8}{'problems':>9}{'traces right':>14}{'answers right':>15}")
    for family in arguments.families:
        for size in arguments.sizes:
            print(_line(model, tokenizer, family, size, arguments), flush=True)


def _line(
    model: Reasoner, tokenizer: Tokenizer, family: str, size: Size, arguments: argparse.Namespace
) -> str:
    tasks = [heldout_task(family, size, index) for index in range(arguments.problems)]
    with progress(transient=True) as bar:
        together = bar.track(batches(tokenizer, tasks), description=f"{family} {size}")
        wrong = [count for rows in together for count in wrong_tokens(model, rows)]
    traces = sum(not count for count in wrong)
    answers = "-"
    if not arguments.traces_only:
        deviating = [task for task, count in zip(tasks, wrong, strict=True) if count]
        right = traces + sum(answers_right(model, tokenizer, task) for task in deviating)
        answers = f"{right / len(tasks):.3f}"
    return f"{family:<14}{size:<8}{len(tasks):>9}{traces / len(tasks):>14.3f}{answers:>15}"


if __name__ == "__main__":
    main()
