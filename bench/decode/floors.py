"""What a decode loop cannot be faster than: weights, cached keys and values, and compactions.

    python -m bench.decode.floors --copy-tb-per-s 3.0 --bf16-tflop-per-s 798 --memory-gib 55

Nothing is run. A step's products with the weights, its attention, and its share of a compaction
each take at least their bytes over the bandwidth or their operations over the rate, and none of the
three can begin before the one before has ended. One row per length and budget in
bench/rows/decode_floors.csv, in bfloat16, at the largest batch that fits or at ``--batches``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

from bench.decode.__main__ import DEFAULTS
from bench.decode.compactor import RequestShape, largest_batch
from bench.decode.model import SIZES, Size
from bench.kernels.floors import Shape, works
from bench.lib.device_clock import Ceilings
from bench.lib.record import append_row

DTYPE = torch.bfloat16
QUERY_WINDOW = 8
#: kernels of one compaction of ``rkv``
COMPACTION = ("window_attention", "key_redundancy", "row_compaction")


def mean_row_tokens(shape: RequestShape) -> float:
    """Cached tokens of a request, over all of its steps."""
    steps = shape.generated_tokens
    return shape.prompt_tokens + sum(map(shape.budgeted_tokens, range(steps))) / steps


def compactions(shape: RequestShape) -> int:
    """Of one request."""
    if shape.kv_budget is None:
        return 0
    return max(0, shape.generated_tokens - shape.kv_budget) // shape.interval


def floors(size: Size, shape: RequestShape, batch: int, ceilings: Ceilings) -> dict[str, float]:
    """Milliseconds of one step, on average over a generation, by what takes them."""
    heads, cached = size.heads, batch * mean_row_tokens(shape)

    def ms(moved_bytes: float, operations: float) -> float:
        return ceilings.floor(int(moved_bytes), int(operations), DTYPE).us / 1e3

    found = {
        "weights": ms(size.weights * DTYPE.itemsize, 2 * size.weights * batch),
        "attention": ms(
            cached * size.kv_bytes_per_token(DTYPE),
            4 * size.layers * heads.query * heads.dim * cached,
        ),
        "compactions": 0.0,
    }
    if shape.kv_budget is not None:
        due = Shape(
            *(batch, shape.prompt_tokens + shape.kv_budget, shape.interval, size.layers),
            *(heads.query, heads.kv, heads.dim, size.hidden_size),
            window=QUERY_WINDOW,
            sentences=0,
        )
        parts = works(due, DTYPE)
        each = sum(ms(parts[name].bytes, parts[name].operations) for name in COMPACTION)
        found["compactions"] = each * compactions(shape) / shape.generated_tokens
    return found


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One per length and budget, the full cache first in each length."""
    size, found, full = SIZES[arguments.size], [], 0.0
    ceilings = Ceilings(
        1e12 * arguments.copy_tb_per_s, {DTYPE: 1e12 * arguments.bf16_tflop_per_s}, 0.0
    )
    for length, (i, kv_budget) in product(
        arguments.lengths, enumerate((None, *arguments.kv_budgets))
    ):
        shape = RequestShape(
            *(kv_budget, length, arguments.prompt_tokens, arguments.interval, "rkv")
        )
        if kv_budget is not None and kv_budget >= length:
            continue
        batch = (
            arguments.batches[i]
            if arguments.batches
            else largest_batch(int(arguments.memory_gib * 2**30), shape, size, DTYPE)
        )
        step_ms = floors(size, shape, batch, ceilings)
        rate = 1e3 * batch / sum(step_ms.values())
        full = rate if kv_budget is None else full
        found.append(
            {
                "size": arguments.size,
                **asdict(shape),
                "kv_budget": "" if kv_budget is None else kv_budget,
                "batch": batch,
                "row_tokens": round(mean_row_tokens(shape), 1),
                **{f"{name}_ms": round(value, 3) for name, value in step_ms.items()},
                "tokens_per_s": round(rate, 1),
                "over_full_cache": round(rate / full, 3),
                "copy_tb_per_s": arguments.copy_tb_per_s,
                "tflop_per_s": arguments.bf16_tflop_per_s,
            }
        )
    return found


def main() -> None:
    defaults = DEFAULTS["cuda"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copy-tb-per-s", type=float, required=True, help="read and written")
    parser.add_argument("--bf16-tflop-per-s", type=float, required=True)
    parser.add_argument("--size", choices=SIZES, default=defaults["size"])
    parser.add_argument("--kv-budgets", type=int, nargs="*", default=defaults["kv_budgets"])
    parser.add_argument("--lengths", type=int, nargs="*", default=defaults["lengths"])
    parser.add_argument("--prompt-tokens", type=int, default=defaults["prompt_tokens"])
    parser.add_argument("--interval", type=int, default=defaults["interval"])
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--memory-gib", type=float, help="for KV and records")
    batch.add_argument("--batches", type=int, nargs="*", help="of a full cache, and per budget")
    arguments = parser.parse_args()
    if arguments.batches and len(arguments.batches) != 1 + len(arguments.kv_budgets):
        parser.error(
            f"batches: expected {1 + len(arguments.kv_budgets)}, for a full cache and each of "
            f"{arguments.kv_budgets}, got {len(arguments.batches)}"
        )
    for row in rows(arguments):
        append_row("decode_floors", row)
        print({one: row[one] for one in ("generated_tokens", "kv_budget", "batch", "tokens_per_s")})


if __name__ == "__main__":
    main()
