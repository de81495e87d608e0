"""Every kernel a thousand times on the same inputs: to the bit the same.

Programs of a launch run in any order, and some hand data to one another through global memory. A
read that comes too early shows as a difference between two launches, sooner or later. Two copies
of every input go through the same launches side by side, because some kernels change theirs.
``REPEATS`` sets another number, as for ``compute-sanitizer``, under which a launch takes long.
"""

from __future__ import annotations

import os

import pytest
import torch
from kernels_on_cpu import KERNELS
from torch import Tensor
from triton_tools import device_fixture

from bench.kernels.__main__ import CASES
from bench.kernels.cases import Cache, Case
from bench.kernels.floors import SHAPES

device = device_fixture(*KERNELS)


def case_of(name: str, where: torch.device) -> Case:
    torch.manual_seed(0)
    on_gpu = where.type == "cuda" and "REPEATS" not in os.environ
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    # Keys that repeat each other end searches early, some sooner than others.
    return CASES[name](Cache(SHAPES["small" if on_gpu else "tiny"], dtype, where, clustered=True))


def bits(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """NaN is equal to NaN of the same bits."""
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


@pytest.mark.parametrize("name", CASES)
def test_every_launch_writes_the_same_bits(name: str, device: torch.device) -> None:
    repeats = int(os.environ.get("REPEATS", 1000 if device.type == "cuda" else 1))
    one, other = case_of(name, device), case_of(name, device)
    for number in range(repeats):
        for mine, theirs in zip(one.launches, other.launches, strict=True):
            for a, b in zip(bits(mine()), bits(theirs()), strict=True):
                assert torch.equal(a, b), f"launch {number}"
