"""How long work takes on a device, and the measured ceilings that say how long it must take.

On a GPU Triton's ``do_bench`` times it with events and cold caches: replays of one CUDA graph where
the work may be captured, launch by launch otherwise. On a CPU the host's clock does.
"""

from __future__ import annotations

import contextlib
import subprocess
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

import numpy as np
import torch
from triton.testing import do_bench

Run = Callable[[], object]
#: bytes copied and rows of the square matrices multiplied, to measure a device
SIZES = {"cuda": (4 << 30, 8192), "cpu": (128 << 20, 1024)}


class Times(NamedTuple):
    """Microseconds of one run: median, 10th and 90th percentile; and how they were taken."""

    p50: float
    p10: float
    p90: float
    repeats: int
    how: str


class Floor(NamedTuple):
    """Microseconds below which a device cannot do it; ``memory`` or ``compute``, what keeps it."""

    us: float
    binds: str


@dataclass(frozen=True)
class Ceilings:
    """What a device was seen to reach.

    Attributes:
        bytes_per_s: of a large copy, bytes read and written.
        operations_per_s: of a large matrix product, multiplications and additions, by dtype;
            float32 without TF32.
        launch_us: of work with next to nothing to do, timed like the rest.
    """

    bytes_per_s: float
    operations_per_s: Mapping[torch.dtype, float]
    launch_us: float

    def floor(self, moved_bytes: int, operations: int, arithmetic: torch.dtype) -> Floor:
        """The larger of the two times.

        Args:
            moved_bytes: that have to be read or written once.
            operations: multiplications and additions.
            arithmetic: dtype of the operands.
        """
        memory = 1e6 * moved_bytes / self.bytes_per_s
        compute = 1e6 * operations / self.operations_per_s[arithmetic]
        return Floor(memory, "memory") if memory >= compute else Floor(compute, "compute")


def times_of(values_us: Sequence[float], how: str) -> Times:
    """Percentiles."""
    p50, p10, p90 = np.percentile(values_us, (50, 10, 90)).tolist()
    return Times(p50, p10, p90, len(values_us), how)


def clock(runs: Sequence[Run], device: torch.device, repeats: int, *, graph_safe: bool) -> Times:
    """Time of one of the runs, which do the same on buffers of their own.

    Args:
        repeats: of all runs together, on a CPU; on a GPU as many as a tenth of a second holds.
        graph_safe: they may be captured in a CUDA graph.
    """

    def together() -> None:
        for run in runs:
            run()

    together()  # compiles, loads, allocates
    if device.type == "cuda":
        how = "graph replays" if graph_safe else "events"
        timed = captured(together, device) if graph_safe else together
        seconds = [1e-3 * ms for ms in do_bench(timed, return_mode="all")]
    else:
        how, seconds = "host clock", timeit.repeat(together, number=1, repeat=repeats)
    return times_of([1e6 * value / len(runs) for value in seconds], how)


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The run as a CUDA graph to replay; itself where there is no GPU."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()  # what libraries do on their first use may not be captured
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def versions(device: torch.device) -> dict[str, str]:
    """What a row says beside ``record.provenance``: the compiler and the driver."""
    driver = ""
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(FileNotFoundError):  # a container without the driver's tools
            shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            driver = shown.splitlines()[0]
    return {"triton": metadata.version("triton"), "driver": driver}


def measured_ceilings(
    device: torch.device, dtypes: Sequence[torch.dtype], repeats: int
) -> Ceilings:
    """Copy and multiply random numbers."""
    rates = {dtype: _matrix_rate(device, dtype, repeats) for dtype in dict.fromkeys(dtypes)}
    number = torch.ones(1, device=device)
    tiny = clock([lambda: number.mul_(1.0)] * 32, device, repeats, graph_safe=True)
    return Ceilings(_copy_rate(device, repeats), rates, tiny.p50)


def _copy_rate(device: torch.device, repeats: int) -> float:
    copied_bytes, _ = SIZES[device.type]
    source = torch.randn(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    taken = clock([lambda: target.copy_(source)], device, repeats, graph_safe=False)
    return 1e6 * 2 * copied_bytes / taken.p50


def _matrix_rate(device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    _, rows = SIZES[device.type]
    a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    taken = clock([lambda: torch.mm(a, b, out=product)], device, repeats, graph_safe=False)
    return 1e6 * 2 * rows**3 / taken.p50
