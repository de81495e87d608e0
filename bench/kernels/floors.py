"""What every kernel has to move and to compute at one shape, and the time that takes at least.

    python -m bench.kernels.floors --copy-tb-per-s 3.0 --bf16-tflop-per-s 798 --fp32-tflop-per-s 67

Nothing is run: bytes and operations come from the kernels' own ``bytes_moved`` and ``operations``,
the rates from the command line. One row per kernel in bench/rows/kernel_floors.csv.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from bench.lib.device_clock import Ceilings
from bench.lib.record import append_row
from sgl_skipkv.kernels import (
    carried_columns,
    key_redundancy,
    ring_write,
    row_compaction,
    sentence_redundancy,
    sentence_step,
    steering_add,
    window_attention,
)


@dataclass(frozen=True)
class Shape:
    """A batch in which every request is due.

    Attributes:
        tokens: cached per request after a compaction; where importance is looked at.
        interval: tokens that come before the next one; redundancy is looked at with them.
        sentences: per request, to compare. Every 16th request stands at a delimiter.
    """

    requests: int
    tokens: int
    interval: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    window: int
    sentences: int

    @property
    def closing(self) -> int:
        return -(-self.requests // 16)


_R1_QWEN_7B = {"layers": 28, "query_heads": 28, "kv_heads": 4, "head_dim": 128, "hidden_size": 3584}
SHAPES = {
    "large": Shape(64, 4096, 128, **_R1_QWEN_7B, window=8, sentences=256),
    "small": Shape(4, 1024, 128, **_R1_QWEN_7B, window=8, sentences=64),
    "cpu": Shape(4, 512, 64, 4, 8, 2, 64, 512, window=8, sentences=32),
    "tiny": Shape(2, 96, 32, 2, 4, 2, 32, 64, window=8, sentences=12),
}


class Work(NamedTuple):
    """One request of one kernel.

    Attributes:
        tokens: cached per request when it is called; 0 where the cache plays no part.
        bytes: to read or write once. operations: multiplications and additions.
        arithmetic: dtype of their operands.
    """

    tokens: int
    bytes: int
    operations: int
    arithmetic: torch.dtype


def works(shape: Shape, dtype: torch.dtype) -> dict[str, Work]:
    """Every kernel at a shape, keys and hidden states of this dtype."""
    full, size = torch.float32, dtype.itemsize
    layers, heads = shape.layers, shape.query_heads
    keys = {"layers": layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    queries = {"layers": layers, "query_heads": heads, "head_dim": shape.head_dim}
    before = [shape.tokens] * shape.requests
    due = [shape.tokens + shape.interval] * shape.requests
    hidden, closing = shape.hidden_size, shape.closing
    moved = {
        "window_attention": window_attention.bytes_moved(
            before, window=shape.window, query_heads=heads, key_bytes=size, **keys
        ),
        "key_redundancy": key_redundancy.bytes_moved(due, key_bytes=size, **keys),
        "key_redundancy_incremental": key_redundancy.bytes_moved(
            due, before, key_bytes=size, **keys
        ),
        "sentence_redundancy": sentence_redundancy.bytes_moved(
            [shape.sentences] * shape.requests, hidden_size=hidden, vector_bytes=size
        ),
        "row_compaction": row_compaction.bytes_moved(
            sum(before), shape.interval * shape.requests, requests=shape.requests
        ),
        "carried_columns": carried_columns.bytes_moved(
            sum(before), requests=shape.requests, layers=layers, kv_heads=shape.kv_heads
        ),
        "ring_write": ring_write.bytes_moved(
            shape.requests,
            query_heads=heads,
            head_dim=shape.head_dim,
            q_bytes=size,
            ring_bytes=size,
        ),
        "sentence_step": sentence_step.bytes_moved(
            *(shape.requests, closing),
            hidden_size=hidden,
            hidden_bytes=size,
            vector_bytes=size,
        ),
        "steering_add": steering_add.bytes_moved(
            shape.requests, shape.requests, closing, hidden_size=hidden, residual_bytes=size
        ),
    }
    operations = {
        "window_attention": window_attention.operations(before, window=shape.window, **queries),
        "key_redundancy": key_redundancy.operations(due, **keys),
        "key_redundancy_incremental": key_redundancy.operations(due, before, **keys),
        "sentence_redundancy": sentence_redundancy.operations(
            [shape.sentences] * shape.requests, hidden_size=hidden
        ),
        # as in the kernels' docstrings
        "sentence_step": (2 * shape.requests + 5 * closing) * hidden,
        "steering_add": 2 * closing * hidden,
    }
    tokens = {"window_attention": shape.tokens}
    scored = ("key_redundancy", "key_redundancy_incremental")
    tokens |= dict.fromkeys(
        (*scored, "row_compaction", "carried_columns"), shape.tokens + shape.interval
    )
    products = (*scored, "window_attention", "sentence_redundancy")
    return {
        name: Work(
            tokens.get(name, 0),
            sum(parts.values()),
            operations.get(name, 0),
            dtype if name in products else full,
        )
        for name, parts in moved.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--copy-tb-per-s", type=float, required=True, help="read and written")
    parser.add_argument("--bf16-tflop-per-s", type=float, required=True)
    parser.add_argument("--fp32-tflop-per-s", type=float, required=True, help="without TF32")
    arguments = parser.parse_args()
    rates = {
        torch.bfloat16: 1e12 * arguments.bf16_tflop_per_s,
        torch.float32: 1e12 * arguments.fp32_tflop_per_s,
    }
    ceilings = Ceilings(1e12 * arguments.copy_tb_per_s, rates, 0.0)
    for name, work in works(SHAPES[arguments.shape], torch.bfloat16).items():
        floor = ceilings.floor(work.bytes, work.operations, work.arithmetic)
        row = {
            "kernel": name,
            **asdict(SHAPES[arguments.shape]),
            "cached_tokens": work.tokens or "",
            "bytes": work.bytes,
            "operations": work.operations,
            "arithmetic": str(work.arithmetic).removeprefix("torch."),
            "memory_us": round(ceilings.floor(work.bytes, 0, work.arithmetic).us, 2),
            "compute_us": round(ceilings.floor(0, work.operations, work.arithmetic).us, 2),
            "binds": floor.binds,
            "copy_tb_per_s": arguments.copy_tb_per_s,
            "tflop_per_s": rates[work.arithmetic] / 1e12,
        }
        append_row("kernel_floors", row)
        print(name, work.bytes, work.operations, f"{floor.us:.2f} us, {floor.binds}")


if __name__ == "__main__":
    main()
