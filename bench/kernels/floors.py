"""What every kernel has to move and to compute at one shape, and the time that takes at least.

    python -m bench.kernels.floors --copy-tb-per-s 3.0 --bf16-tflop-per-s 798 --fp32-tflop-per-s 67

Nothing is run: bytes and operations are counted here, as the kernels' docstrings give them; the
rates are the command line's. One row per kernel in bench/rows/kernel_floors.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from bench.lib.device_clock import Ceilings
from bench.lib.record import append_row


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
        """Requests at a delimiter."""
        return -(-self.requests // 16)

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.layers * self.kv_heads


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
        moved_bytes: to read or write once, by what they are.
        operations: multiplications and additions.
        arithmetic: dtype of their operands.
    """

    tokens: int
    moved_bytes: Mapping[str, int]
    operations: int = 0
    arithmetic: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        return sum(self.moved_bytes.values())


def window_attention(shape: Shape, dtype: torch.dtype) -> Work:
    """Each key before the window, and each query of the window, once."""
    candidates = shape.requests * (shape.tokens - shape.window)
    queries = shape.requests * shape.window * shape.layers * shape.query_heads
    moved = {
        "keys": shape.heads * candidates * shape.head_dim * dtype.itemsize,
        "queries": queries * shape.head_dim * dtype.itemsize,
        "slots": 4 * candidates,
        "means of heads, written and read": 8 * shape.heads * candidates,
        "output": 4 * candidates,
    }
    products = shape.layers * shape.query_heads * shape.window * candidates
    return Work(shape.tokens, moved, 2 * products * shape.head_dim, dtype)


def step_attention(shape: Shape, dtype: torch.dtype) -> Work:
    """Each key once, and the last ``window`` steps' attention to every token that they saw."""
    tokens, steps = shape.requests * shape.tokens, shape.requests * shape.window
    queries = steps * shape.layers * shape.query_heads * shape.head_dim
    moved = {
        "keys": shape.heads * tokens * shape.head_dim * dtype.itemsize,
        "queries": queries * dtype.itemsize,
        "slots": 4 * tokens,
        "output": 4 * shape.window * tokens,
    }
    seen = steps * shape.tokens - shape.requests * shape.window * (shape.window - 1) // 2
    products = shape.layers * shape.query_heads * seen
    return Work(shape.tokens, moved, 2 * products * shape.head_dim, dtype)


def key_redundancy(shape: Shape, dtype: torch.dtype) -> Work:
    """Each key once, and all pairs, if no walk ends early."""
    row_tokens = shape.tokens + shape.interval
    tokens = shape.requests * row_tokens
    moved = {
        "keys": shape.heads * tokens * shape.head_dim * dtype.itemsize,
        "slots and output": 8 * tokens,
    }
    products = shape.requests * shape.heads * row_tokens**2
    return Work(row_tokens, moved, 2 * products * shape.head_dim, dtype)


def distinct_values(shape: Shape, dtype: torch.dtype) -> Work:
    """Each value once, and half of all pairs in half of the layers."""
    row_tokens = shape.tokens + shape.interval
    tokens = shape.requests * row_tokens
    moved = {
        "values": shape.heads * tokens * shape.head_dim * dtype.itemsize,
        "slots and output": 12 * tokens,
    }
    pairs = shape.requests * row_tokens * (row_tokens - 1) // 2
    heads = shape.layers // 2 * shape.kv_heads
    return Work(row_tokens, moved, 2 * pairs * heads * shape.head_dim, dtype)


def sentence_redundancy(shape: Shape, dtype: torch.dtype) -> Work:
    """Each vector once, and all pairs."""
    vectors = shape.requests * shape.sentences
    moved = {
        "vectors": vectors * shape.hidden_size * dtype.itemsize,
        "redundancy": 8 * vectors,
        "tracks": 16 * shape.requests,
    }
    return Work(0, moved, vectors * (shape.sentences - 1) * shape.hidden_size, dtype)


def sentence_scores(shape: Shape, dtype: torch.dtype) -> Work:
    """Importance, redundancy, position and score of each token; each sentence once."""
    tokens = shape.requests * (shape.tokens + shape.interval)
    moved = {"tokens": 20 * tokens, "sentences": 20 * shape.requests * shape.sentences}
    return Work(shape.tokens + shape.interval, moved)


def selection(shape: Shape, dtype: torch.dtype) -> Work:
    """Each score and each selected index once."""
    tokens = shape.requests * (shape.tokens + shape.interval)
    return Work(
        shape.tokens + shape.interval, {"tokens": 12 * tokens, "bounds": 41 * shape.requests}
    )


def row_compaction(shape: Shape, dtype: torch.dtype) -> Work:
    """Each entry of the page table once."""
    kept, evicted = shape.requests * shape.tokens, shape.requests * shape.interval
    moved = {
        "selections and rows": 16 * (kept + evicted),
        "positions": 16 * kept,
        "freed": 8 * evicted,
        "offsets": 40 * shape.requests,
    }
    return Work(shape.tokens + shape.interval, moved)


def kv_move(shape: Shape, dtype: torch.dtype) -> Work:
    """Pages of several tokens: keys and values that stay are read and written, with their entries
    and slots. None is certain to stay where it is."""
    kept = shape.requests * shape.tokens
    numbers = 2 * shape.heads * shape.head_dim
    moved = {
        "keys and values, read and written": 2 * kept * numbers * dtype.itemsize,
        "entries and slots": 16 * kept,
        "rows and offsets": 24 * shape.requests,
    }
    return Work(shape.tokens + shape.interval, moved)


def ring_write(shape: Shape, dtype: torch.dtype) -> Work:
    """One layer of a step: every query read and written."""
    numbers = shape.requests * shape.query_heads * shape.head_dim
    return Work(0, {"queries": 2 * numbers * dtype.itemsize, "indices": 16 * shape.requests})


def sentence_step(shape: Shape, dtype: torch.dtype) -> Work:
    """One token of every request, sums in float32, and a vector where a sentence closes."""
    hidden = shape.requests * shape.hidden_size
    moved = {
        "hidden": hidden * dtype.itemsize,
        "sums": 8 * hidden,
        # track and token 16, bits and preset 2; read and written: length 8, index 16, flag 2
        "entries": 44 * shape.requests,
        "vectors": shape.closing * shape.hidden_size * dtype.itemsize,
    }
    return Work(0, moved, 2 * hidden + 5 * shape.closing * shape.hidden_size)


def steering_add(shape: Shape, dtype: torch.dtype) -> Work:
    """Every request is steered; the vector is read once and is in a cache from then on."""
    moved = {
        "who is steered": 9 * shape.requests,
        # token 8, class 1, alpha_0 4 and, read and written, the count 8 and two flags 4
        "counts": 25 * shape.requests,
        "residual": 2 * shape.closing * shape.hidden_size * dtype.itemsize,
        "vector": 4 * shape.hidden_size,
    }
    return Work(0, moved, 2 * shape.closing * shape.hidden_size)


FLOORS: tuple[Callable[[Shape, torch.dtype], Work], ...] = (
    *(window_attention, step_attention, key_redundancy, distinct_values, sentence_redundancy),
    *(sentence_scores, selection, row_compaction, kv_move),
    *(ring_write, sentence_step, steering_add),
)


def works(shape: Shape, dtype: torch.dtype) -> dict[str, Work]:
    """Every kernel at a shape, keys and hidden states of this dtype."""
    return {floor.__name__: floor(shape, dtype) for floor in FLOORS}


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
