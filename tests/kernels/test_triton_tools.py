"""The harness of the kernel tests: what it changes in this process, and that it all goes back."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction
from triton_tools import assert_as_close, forbid_launches, interpreted


@triton.jit
def _sum_of_squares(x):
    return tl.sum(x * x, axis=0) + tl.zeros((1,), tl.float32).sum(0)


@triton.jit
def _square(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), _sum_of_squares(values) + tl.max(values, 0))


def launch() -> float:
    x, out = torch.tensor([1.0, 2.0, 3.0]), torch.full((2,), float("nan"))
    _square[(2,)](x, out, 3, BLOCK=4)
    assert out[0] == out[1]
    return out[0].item()


def compile_here() -> None:
    types = {"x": "*fp16", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(_square, types, {"BLOCK": 64})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={})


def test_interpreted_again_and_compiled_in_between() -> None:
    """Helpers of the kernel's own and of Triton; nothing of it stays, not even after an error."""
    here = sys.modules[__name__]
    before = {module: dict(vars(module)) for module in (here, tl, tl.core, tl.standard, tl.tensor)}
    for _ in range(2):
        with interpreted(here):
            assert launch() == 14 + 3
            assert "TRITON_INTERPRET" not in os.environ
        assert isinstance(_square, JITFunction)
        compile_here()
    with pytest.raises(InterpreterError), interpreted(here):
        _square[(1,)](3, 4, "no number", BLOCK=4)
    assert {module: dict(vars(module)) for module in before} == before
    with pytest.raises((RuntimeError, ValueError)):
        launch()  # there is no GPU, or it cannot read these tensors


def test_what_is_too_far_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    assert_as_close(truth.float(), truth.float(), truth)
    for wrong in (1e-6, float("nan")):
        with pytest.raises(AssertionError):
            assert_as_close(truth.float() + wrong, truth.float(), truth)
    forbid_launches(monkeypatch)
    with interpreted(sys.modules[__name__]), pytest.raises(AssertionError, match="launched"):
        launch()
