"""Decoding with a full cache and with budgets, each at the largest batch that fits the memory.

    python -m bench.decode                        # a 7B model's shapes on a GPU, tiny ones on a CPU
    python -m bench.decode --policy rkv --kv-budgets 1024 --lengths 16384

Random weights and random keys: what is measured is time. A decode step is one CUDA graph with
FlashInfer's (else SGLang's) paged attention; between steps the plugin's own runtime compacts the
requests that are due, after everything else has finished, so nothing of it is hidden behind a step.
A row holds tokens per second over a whole generation of that length, from a few measurements of one
interval each at the middles of equal parts of it. One row per length and budget in
bench/rows/decode.csv.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from bench.decode.attention import BACKENDS, DecodeAttention, backend_for, entries
from bench.decode.compactor import Compactor, RequestShape, largest_batch
from bench.decode.model import SIZES, DecodeModel, KVPool
from bench.lib.device_clock import captured, synchronize, versions
from bench.lib.record import append_row
from sgl_skipkv.cli.progress import track
from sgl_skipkv.kernels.on_device import device_tensor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
POLICIES = ("distinct", "skipkv", "skipkv+", "rkv", "snapkv")
#: device -> model, lengths, budgets, prompt, interval
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"size": "r1-qwen-7b", "dtype": "bfloat16", "prompt_tokens": 128, "interval": 128},
        **{"lengths": [2048, 4096, 8192, 16384], "kv_budgets": [512, 1024, 2048, 4096]},
    },
    "cpu": {
        **{"size": "tiny", "dtype": "float32", "prompt_tokens": 8, "interval": 16},
        **{"lengths": [64, 128], "kv_budgets": [24], "memory_gib": 2**-10},
    },
}


class Measurement(NamedTuple):
    """One interval of steps."""

    step_s: list[float]
    compaction_s: float
    compactions: int
    row_tokens: float


class PagedLoop:
    """A batch of requests: page table, free slots, and the step that is replayed."""

    def __init__(
        self, model: DecodeModel, backend: type[DecodeAttention], shape: RequestShape, batch: int
    ) -> None:
        device, slots = model.device, batch * shape.peak_tokens
        self.model, self.shape, self.device = model, shape, device
        self.pool = KVPool(model.size, slots, model.dtype, device)
        self.req_to_token = torch.zeros(batch, shape.peak_tokens, dtype=torch.int32, device=device)
        self.attention = backend(self.req_to_token, model.size.heads, model.dtype, slots)
        self.compactor = None
        if shape.kv_budget is not None:
            self.compactor = Compactor(model, shape, batch, self.pool, self.req_to_token)
        self.rows = torch.arange(batch, device=device)
        self.token_ids, self.positions, self.new_slots, self.sampled = (
            torch.zeros_like(self.rows) for _ in range(4)
        )
        self._fill([shape.prompt_tokens] * batch)
        self.attention.plan(self.row_tokens)
        self.replay = captured(self._step, device)

    def measure_interval(self, generated: int) -> Measurement:
        """Decode for one interval, from where every request has generated this many tokens."""
        shape, batch, compactor = self.shape, len(self.rows), self.compactor
        owned = [generated] * batch if compactor is None else compactor.open(generated)
        self._fill([shape.prompt_tokens + own for own in owned])
        before = statistics.mean(self.row_tokens)
        new_ids = torch.randint(self.model.size.vocabulary, (shape.interval, batch))
        due = [] if compactor is None else compactor.observe(self.row_tokens, [])
        step_s, compaction_s, compactions = [], 0.0, 0
        for ids, host_ids in zip(new_ids.to(self.device), new_ids.tolist(), strict=True):
            synchronize(self.device)
            start = time.perf_counter()
            if compactor is not None and due:
                self._give_back(compactor.compact(due, self.row_tokens))
                synchronize(self.device)
                compactions += len(due)
                compaction_s += time.perf_counter() - start
                start = time.perf_counter()
            self._prepare(ids)
            self.replay()
            if compactor is not None:  # the host's part, while the device works
                due = compactor.observe(self.row_tokens, host_ids)
            self.sampled.tolist()  # a scheduler needs them too
            step_s.append(time.perf_counter() - start)
        if compactor is not None:
            compactor.close(self.row_tokens)
        return Measurement(step_s, compaction_s, compactions, before)

    def _step(self) -> None:
        recorder = None if self.compactor is None else self.compactor.recorder
        at = (self.token_ids, self.positions, self.new_slots)
        sampled = self.model.step(*at, self.pool, self.attention, recorder, self.rows)
        self.sampled.copy_(sampled)
        self.positions.add_(1)

    def _fill(self, row_tokens: list[int]) -> None:
        """Rows of these lengths, of slots in random order; whatever they hold is their KV."""
        order = torch.randperm(self.pool.k[0].shape[0] - 1, device=self.device) + 1
        used = sum(row_tokens)
        self.req_to_token.zero_()
        self.req_to_token[entries(row_tokens, self.device)] = order[:used].int()
        self._free, self._free_slots = order.roll(-used), len(order) - used
        self.row_tokens = row_tokens
        self.positions.copy_(device_tensor(row_tokens, self.device))

    def _prepare(self, token_ids: torch.Tensor) -> None:
        """A new token per row: its slot, and where the attention finds the others."""
        self._free_slots -= len(self.rows)
        slots = self._free[self._free_slots : self._free_slots + len(self.rows)]
        columns = device_tensor(self.row_tokens, self.device)
        self.req_to_token[self.rows, columns] = slots.int()
        self.new_slots.copy_(slots)
        self.token_ids.copy_(token_ids)
        self.row_tokens = [tokens + 1 for tokens in self.row_tokens]
        self.attention.plan(self.row_tokens)

    def _give_back(self, slots: torch.Tensor) -> None:
        self._free[self._free_slots : self._free_slots + len(slots)] = slots
        self._free_slots += len(slots)


def measure(
    model: DecodeModel,
    backend: type[DecodeAttention],
    shape: RequestShape,
    batch: int,
    measurements: int,
) -> dict[str, Any]:
    """The row of one length and budget."""
    loop = PagedLoop(model, backend, shape, batch)
    last = shape.generated_tokens - shape.interval
    middles = [
        shape.generated_tokens * (2 * i + 1) // (2 * measurements) for i in range(measurements)
    ]
    if model.device.type == "cuda":
        for _ in range(2):  # torch loads its kernels when they are called first
            loop.measure_interval(min(middles[-1], last))
    intervals = [loop.measure_interval(min(middle, last)) for middle in middles]
    step_s = [value for measurement in intervals for value in measurement.step_s]
    compaction_s = sum(measurement.compaction_s for measurement in intervals)
    total_s = sum(step_s) + compaction_s
    return {
        **asdict(shape),
        "kv_budget": "" if shape.kv_budget is None else shape.kv_budget,
        "policy": "" if shape.kv_budget is None else shape.policy,
        "batch": batch,
        "kv_gib": round(
            batch * shape.peak_tokens * model.size.kv_bytes_per_token(model.dtype) / 2**30, 3
        ),
        "measurements": measurements,
        "steps": len(step_s),
        "row_tokens": round(
            statistics.mean(measurement.row_tokens for measurement in intervals), 1
        ),
        "step_ms_p50": round(1e3 * statistics.median(step_s), 3),
        "tokens_per_s": round(batch * len(step_s) / total_s, 1),
        "compactions": sum(measurement.compactions for measurement in intervals),
        "compaction_ms": round(1e3 * compaction_s, 2),
        "compaction_share": round(compaction_s / total_s, 4),
    }


def free_bytes(device: torch.device, arguments: argparse.Namespace) -> int:
    """Memory for KV and records: what was said, or what is free and not reserved."""
    gc.collect()
    if arguments.memory_gib is not None:
        return int(arguments.memory_gib * 2**30)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0] - arguments.reserve_gib * 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=DEFAULTS, default=on_gpu)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--attention", choices=BACKENDS, help="default: what is installed")
    parser.add_argument("--policy", choices=POLICIES, default="rkv")
    parser.add_argument("--kv-budgets", type=int, nargs="*")
    parser.add_argument("--lengths", type=int, nargs="*", help="generated tokens of a request")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--interval", type=int)
    parser.add_argument("--measurements", type=int, default=4)
    parser.add_argument("--batch", type=int, help="requests at once; default: as many as fit")
    parser.add_argument("--memory-gib", type=float, help="for KV and records; default: all free")
    parser.add_argument("--reserve-gib", type=float, default=8.0, help="of it, for everything else")
    device_name = parser.parse_known_args()[0].device
    parser.set_defaults(**DEFAULTS[device_name])
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    backend = backend_for(device, arguments.attention)
    if backend is None:
        parser.error("attention: expected flashinfer or sglang to be installed, got neither")
    torch.manual_seed(0)
    model = DecodeModel(SIZES[arguments.size], dtype, device)
    common = (arguments.prompt_tokens, arguments.interval, arguments.policy)
    cells = [
        RequestShape(kv_budget, length, *common)
        for length in sorted(arguments.lengths, reverse=True)  # the longest say most
        for kv_budget in (None, *arguments.kv_budgets)
        if kv_budget is None or kv_budget < length
    ]
    for shape in track(cells, "decode"):
        batch = largest_batch(free_bytes(device, arguments), shape, model.size, dtype)
        batch = min(batch, arguments.batch or batch)
        row = measure(model, backend, shape, batch, arguments.measurements)
        setting = {
            "size": arguments.size,
            "dtype": arguments.dtype,
            "attention": backend.described(),
        }
        how = {"step": "CUDA graph" if device.type == "cuda" else "eager"}
        append_row("decode", {**setting, **how, **row, **versions(device)})
        print(
            {name: row[name] for name in ("kv_budget", "generated_tokens", "batch", "tokens_per_s")}
        )


if __name__ == "__main__":
    main()
