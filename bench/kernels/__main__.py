"""Every kernel against its floors on this device, plain torch, and one step's decode attention.

    python -m bench.kernels                                    # the shapes that fit the device
    python -m bench.kernels --kernels key_redundancy --shapes small

First the device's copy bandwidth and matrix rates are measured; they make the two floors. On a GPU
the Triton kernels are timed; anywhere else plain torch, which is what runs there, and the column
``implementation`` says so. ``decode_attention_us_p50`` is the attention of one decode step over the
same cached tokens, all layers: FlashInfer's or SGLang's, and empty where a GPU has neither. One row
per kernel and shape in bench/rows/kernels.csv. Slots are in random order, as after evictions.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from functools import cache as once
from typing import Any

import torch

from bench.decode.attention import BACKENDS, DecodeAttention, Heads, backend_for
from bench.kernels.cases import COMPACTION_CASES, Cache
from bench.kernels.floors import SHAPES, Shape, Work, works
from bench.kernels.step_cases import STEP_CASES
from bench.lib.device_clock import Ceilings, Times, clock, measured_ceilings, versions
from bench.lib.record import append_row
from sgl_skipkv.cli.progress import track
from sgl_skipkv.kernels.on_device import uses_triton

CASES = {**COMPACTION_CASES, **STEP_CASES}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Bench:
    """One shape on one device."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        repeats: int,
        attention: type[DecodeAttention] | None,
        *,
        with_reference: bool = True,
    ) -> None:
        self.shape, self.dtype, self.device, self.repeats = shape, dtype, device, repeats
        self.attention, self.with_reference = attention, with_reference
        self.decode_attention = once(self._decode_attention)
        self._references: dict[str, Times] = {}

    def rows(self, names: list[str], ceilings: Ceilings) -> Iterator[dict[str, Any]]:
        """Keys that repeat each other are another case for what looks for them, if Triton does."""
        for clustered in (False, True) if uses_triton(self.device) else (False,):
            cache = Cache(self.shape, self.dtype, self.device, clustered=clustered)
            self.cache = cache
            for name in names:
                if not clustered or name == "key_redundancy":
                    keys = "repeating" if clustered else "random"
                    yield {"kernel": name, "keys": keys, **self._row(name, ceilings)}

    def _row(self, name: str, ceilings: Ceilings) -> dict[str, Any]:
        case, work = CASES[name](self.cache), works(self.shape, self.dtype)[name]
        how = {"device": self.device, "repeats": self.repeats, "graph_safe": case.graph_safe}
        if self.with_reference and name not in self._references:
            self._references[name] = clock(case.references, **how)
        plain = self._references.get(name)  # what plain torch takes does not depend on the keys
        found = clock(case.launches, **how) if uses_triton(self.device) else plain
        assert found is not None
        decode = self.decode_attention(work.tokens) if self.attention and work.tokens else None
        return {
            "implementation": "triton" if uses_triton(self.device) else "torch",
            "per": case.per,
            **dataclasses.asdict(self.shape),
            "cached_tokens": work.tokens or "",
            "dtype": str(self.dtype).removeprefix("torch."),
            "bytes": work.bytes,
            "operations": work.operations,
            "arithmetic": str(work.arithmetic).removeprefix("torch."),
            **against_floors(found, work, ceilings),
            "reference_us_p50": round(plain.p50, 2) if plain else "",
            "reference_over_time": round(plain.p50 / found.p50, 3) if plain else "",
            "decode_attention": self.attention.described() if self.attention and decode else "",
            "decode_attention_us_p50": round(decode, 2) if decode else "",
            "time_over_decode_attention": round(found.p50 / decode, 4) if decode else "",
        }

    def _decode_attention(self, tokens: int) -> float:
        """Microseconds of all layers' attention in a step over this many cached tokens each."""
        assert self.attention is not None
        shape, cache = self.shape, self.cache
        heads = Heads(shape.query_heads, shape.kv_heads, shape.head_dim)
        capacity = cache.req_to_token.numel()
        attention = self.attention(cache.req_to_token, heads, self.dtype, capacity)
        attention.plan([tokens] * shape.requests)
        values = [cache.random(*k.shape) for k in cache.k]
        q = cache.random(shape.requests, shape.query_heads, shape.head_dim)
        runs = [
            lambda k=k, v=v: attention.run(q, k, v) for k, v in zip(cache.k, values, strict=True)
        ]
        return shape.layers * clock(runs, self.device, self.repeats, graph_safe=True).p50


def against_floors(found: Times, work: Work, ceilings: Ceilings) -> dict[str, Any]:
    """The columns of a time and its floors."""
    floor = ceilings.floor(work.bytes, work.operations, work.arithmetic)
    return {
        "copy_gb_per_s": float(f"{ceilings.bytes_per_s / 1e9:.4g}"),
        "tflop_per_s": float(f"{ceilings.operations_per_s[work.arithmetic] / 1e12:.4g}"),
        "launch_us": round(ceilings.launch_us, 2),
        "floor_us": round(floor.us, 3),
        "binds": floor.binds,
        "time_us_p50": round(found.p50, 2),
        "time_us_p10": round(found.p10, 2),
        "time_us_p90": round(found.p90, 2),
        "ratio_to_floor": round(found.p50 / floor.us, 3),
        "timing": found.how,
        "repeats": found.repeats,
    }


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="*", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, help="default: by device")
    parser.add_argument("--dtype", choices=DTYPES, help="default: by device")
    parser.add_argument("--attention", choices=BACKENDS, help="default: what is installed")
    parser.add_argument("--repeats", type=int, default=50, help="of a run, on a CPU")
    parser.add_argument(
        "--without-reference", action="store_true", help="on a GPU: plain torch takes minutes"
    )
    arguments = parser.parse_args()
    device, on_gpu = torch.device(arguments.device), arguments.device == "cuda"
    dtype = DTYPES[arguments.dtype or ("bfloat16" if on_gpu else "float32")]
    attention = backend_for(device, arguments.attention)
    torch.manual_seed(0)
    ceilings = measured_ceilings(device, (dtype, torch.float32), arguments.repeats)
    for name in arguments.shapes or (["large", "small"] if on_gpu else ["cpu"]):
        bench = Bench(
            *(SHAPES[name], dtype, device, arguments.repeats, attention),
            with_reference=not (on_gpu and arguments.without_reference),
        )
        for row in track(bench.rows(arguments.kernels, ceilings), name):
            append_row("kernels", {"shape": name, **row, **versions(device)})
            print({name: row[name] for name in ("kernel", "keys", "time_us_p50", "ratio_to_floor")})


if __name__ == "__main__":
    main()
