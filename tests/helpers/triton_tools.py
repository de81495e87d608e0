"""Triton kernels in tests: interpreted on the CPU, real where there is a GPU, compiled offline.

``TRITON_INTERPRET`` decides when ``triton.jit`` decorates, for the whole process and everything it
starts, so it is of no use beside SGLang and its servers. ``interpreted`` swaps the finished
functions instead, for as long as a test needs it, and sets no variable.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.experimental.gluon  # noqa: F401  a launch imports it, and it wants plain helpers
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from sgl_skipkv.kernels.on_device import TRITON_NAMES

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8S = [torch.float8_e4m3fn, torch.float8_e5m2]  # of keys only
_TYPE_NAMES = {
    **TRITON_NAMES,
    **{torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1"},
}
_MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has the name from 3.13 on
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# What ``interpreted`` and the interpreter itself change. The interpreter undoes its changes after a
# launch, except those for helpers that a kernel requests, and a later compilation in this process
# would trip over what is left.
_CHANGED = (
    *(tl, tl.core, tl.math, tl.standard, tl.random),
    *(tl.tensor, tl.dtype, tl.core.tensor_descriptor_base),
)


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """While open, launches of these modules' kernels run in Triton's interpreter, on CPU tensors.

    A module whose kernels call helpers of another kernel module is named together with that.
    Triton's own helpers (``tl.sum`` and the like) are jitted functions too and are swapped with
    them. The interpreter ignores ``num_warps`` and ``num_stages`` and runs programs one by one.
    """
    namespaces = (*_CHANGED, *modules)
    before = [dict(vars(namespace)) for namespace in namespaces]
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    # One interpreted function per function: the interpreter knows the usual reductions by identity.
    interpret = functools.cache(InterpretedFunction)
    try:
        InterpreterBuilder.cast_impl = _rounding_cast(cast)
        InterpreterBuilder.create_dot = _widening_dot(dot)
        for namespace in namespaces:
            for name, value in list(vars(namespace).items()):
                if isinstance(value, JITFunction):
                    one = interpret(value.fn)
                    setattr(namespace, name, _method(one) if namespace is tl.tensor else one)
        yield
    finally:
        InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
        InterpretedFunction.rewritten_fn.clear()  # they need the names that go now
        for namespace, names in zip(namespaces, before, strict=True):
            for name, value in list(vars(namespace).items()):
                if name not in names:
                    delattr(namespace, name)
                elif names[name] is not value:
                    setattr(namespace, name, names[name])


def _rounding_cast(cast: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """float32 to bfloat16 rounded to the nearest, as GPUs do it; the interpreter truncates."""

    def cast_impl(self: InterpreterBuilder, source: TensorHandle, kind: tl.dtype) -> TensorHandle:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return cast(self, source, kind)
        rounded = torch.from_numpy(source.data.copy()).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    return cast_impl


def _widening_dot(dot: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The interpreter keeps bfloat16 as its bits and would multiply those; multiply values."""

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any
    ) -> TensorHandle:
        if a.dtype == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return dot(self, a, b, *rest)

    return create_dot


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """``x.sum()`` and the like: what Python binds to ``x``."""
    return lambda *arguments, **names: function(*arguments, **names)


def device_fixture(*modules: ModuleType) -> Any:
    """A fixture that gives each test a device on which these modules' kernels can be launched.

    The CPU in any case, with the kernels interpreted; a CUDA GPU, with the kernels as they are,
    where there is one. In a test file: ``device = device_fixture(ring_write)``.
    """

    @pytest.fixture(params=DEVICES)
    def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
        if request.param == "cuda":
            yield torch.device("cuda")
            return
        with interpreted(*modules):
            yield torch.device("cpu")

    return device


def far_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that may be larger than this machine's memory: only pages that are written exist.

    For offsets beyond 2**31 elements. On the CPU the tensor lies in an anonymous mapping that the
    system backs page by page, and an interpreted launch does not copy it. On a GPU it is what it
    says.
    """
    elements = torch.Size(shape).numel()
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def data_pointers(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [len(tensors)], their addresses, on their device; the caller keeps the tensors."""
    return torch.tensor([t.data_ptr() for t in tensors], device=tensors[0].device)


def triton_type(value: Any) -> str:
    """How a signature of Triton's calls an argument of a launch, such as ``*bf16`` or ``i32``."""
    if isinstance(value, Tensor):
        return f"*{_TYPE_NAMES[value.dtype]}"
    if isinstance(value, int) and not isinstance(value, bool):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else str(value)


def variant(
    function: JITFunction, arguments: Sequence[Any], options: dict[str, Any]
) -> tuple[Any, ...]:
    """What Triton compiles a launch for: types, constants, and of numbers and addresses whether
    they are 1 or multiples of 16, unless the kernel says that they are not to be told apart."""
    names = [one.name for one in function.params]
    given = {**options, **dict(zip(names, arguments, strict=False))}
    found: list[Any] = []
    for one in function.params:
        value = given.pop(one.name)
        if isinstance(value, Tensor):
            apart = not (one.do_not_specialize or one.do_not_specialize_on_alignment)
            found.append((triton_type(value), apart and value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and not one.is_constexpr:
            apart = not one.do_not_specialize
            aligned = apart and not one.do_not_specialize_on_alignment and value % 16 == 0
            found.append((triton_type(value), apart and value == 1, aligned))
        else:
            found.append(str(value) if one.is_constexpr else triton_type(value))
    given.pop("grid"), given.pop("warmup", None)
    return (function.fn.__name__, *found, *sorted(given.items()))


#: of float32: how exact the reference is depends on the machine's matmuls, sometimes by chance
TWO_ROUNDINGS = 2.0**-22


def assert_as_close(found: Tensor, reference: Tensor, truth: Tensor) -> None:
    """``found`` is at most twice as far from the fp64 truth as the float32 reference is, and two
    roundings of the largest magnitude of the truth."""
    assert found.shape == reference.shape == truth.shape
    assert found.isfinite().all()
    scale = truth.abs().max().item() if truth.numel() else 0.0

    def error(values: Tensor) -> float:
        return (values.double() - truth).abs().max().item() if truth.numel() else 0.0

    allowed = 2 * error(reference) + TWO_ROUNDINGS * scale
    assert error(found) <= allowed, f"error {error(found):.3g}, allowed {allowed:.3g}"


def forbid_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a launch is an error, as it is on a real GPU for an empty grid."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a kernel was launched")

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", refuse)


@functools.cache
def compile_report() -> tuple[dict[str, Any], ...]:
    """``bench/kernels/compile.py --json``: one entry per kernel variant, for an H100.

    In a process of its own, and once per session. The others are in bench/rows/compile.csv.
    """
    command = [sys.executable, "-m", "bench.kernels.compile", "--json", "--architectures", "90"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(line) for line in done.stdout.splitlines())
