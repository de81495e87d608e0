"""Keys as kernels read them: float8 comes out of its bytes exactly."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl
from triton_tools import FLOAT8S, device_fixture

from sgl_skipkv.kernels import paged_keys
from sgl_skipkv.kernels.paged_keys import widened

device = device_fixture(paged_keys, sys.modules[__name__])


@triton.jit
def _widen_kernel(source, out, FLOAT8: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, widened(tl.load(source + i), FLOAT8))


@pytest.mark.parametrize("dtype", FLOAT8S, ids=str)
def test_every_byte_is_what_torch_makes_of_it(dtype: torch.dtype, device: torch.device) -> None:
    """Numbers below the smallest normal one, both zeros, infinities and NaN among them."""
    every = torch.arange(256, dtype=torch.uint8)
    found = torch.empty(256, dtype=torch.float16, device=device)
    _widen_kernel[(1,)](every.to(device), found, paged_keys._EXPONENT_BITS[dtype])
    expected = every.view(dtype).half()
    assert torch.equal(found.cpu().isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(found.cpu()[known].view(torch.int16), expected[known].view(torch.int16))
    for wide in (torch.bfloat16, torch.float32):  # what queries may be
        assert torch.equal(expected[known].to(wide), every.view(dtype)[known].to(wide))
