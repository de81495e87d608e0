"""A GPU's rules about memory, on a machine without one: who may read what, and when.

Tensors of ``GPU`` say that they are on another device and keep their numbers on the CPU. Inside
``stand_in_gpu`` torch's operations on them run as always, and as on a real GPU

- operands on the CPU and on the GPU in one operation are an error,
- a copy to pinned memory that nobody waits for arrives late: until its event the CPU finds
  ``UNSEEN`` there,
- everything that makes the CPU wait is listed.

What it cannot show: times, the order of two streams, kernels of other libraries, and pinned memory
that is written while a copy to the GPU still reads it. A launch of one of our Triton kernels is
interpreted (``kernels_on_cpu.on_triton``).
"""

from __future__ import annotations

import functools
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ops import host_read
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from sgl_skipkv import ranks

ROOT = Path(__file__).resolve().parents[2]
#: every byte of pinned memory whose copy has not arrived: NaN, -1, True
UNSEEN = 0xFF
#: they change the shape or the memory of a tensor in place, which the tensor around it cannot show
_UNSUPPORTED = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swap_tensors"}


_KERNELS = torch.library.Library("aten", "IMPL")


class _Module:
    """What torch asks of ``torch.gpu``. It is not available: nothing picks it by itself."""

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        """It draws nothing."""


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return False

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True


@functools.cache
def gpu() -> torch.device:
    """The device. Torch has room for one that it does not know; the first call takes it, for the
    whole process: then torch would pin no memory for a real GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    backend_registration._setup_privateuseone_for_python_backend("gpu", _Module(), _Hook())
    # of lists that become tensors, which no dispatch mode sees
    _KERNELS.impl("empty_strided", _empty_strided, "PrivateUse1")
    _KERNELS.impl("_copy_from", _copy_from, "PrivateUse1")
    return torch.device("gpu:0")


class GpuTensor(Tensor):
    """Attributes:
    numbers: on the CPU. The same memory for all views of a tensor.
    """

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> GpuTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=gpu(),
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a GPU's tensor outside of stand_in_gpu")

    def __repr__(self, **options: Any) -> str:
        return f"GpuTensor({self.numbers!r})"

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()


def numbers_of(value: Any) -> Any:
    return value.numbers if isinstance(value, GpuTensor) else value


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> GpuTensor:
    return GpuTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, to: GpuTensor, non_blocking: bool = False) -> Tensor:
    _current().wait("a list that becomes a tensor")
    return to.numbers.copy_(source)


def _current() -> StandInGpu:
    (found,) = [one for one in _get_current_dispatch_mode_stack() if isinstance(one, StandInGpu)]
    return found


class StandInGpu(TorchDispatchMode):
    """Attributes:
    waits: what the package made the CPU wait for, and the line that it came from. What a test
        reads is not listed, and nothing arrives by it.
    launched: how many copies to pinned memory there were so far.
    unseen: of those that nobody has waited for, in order: its number from 1, pinned destination,
        and what arrives there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.launched = 0
        self.unseen: deque[tuple[int, Tensor, Tensor]] = deque()
        self._pinned: dict[int, Tensor] = {}  # by storage; keeps it, so that no other gets its id

    def arrive(self, launched: int) -> None:
        """The first copies, as many as were launched then, are there."""
        while self.unseen and self.unseen[0][0] <= launched:
            _, host, numbers = self.unseen.popleft()
            host.copy_(numbers)

    def wait(self, what: str) -> None:
        frame = next(one for one in reversed(traceback.extract_stack()) if _is_ours(one.filename))
        file = Path(frame.filename).relative_to(ROOT)
        if file.parts[0] != "tests":
            self.waits.append((what, f"{file}:{frame.lineno}"))
            with _disable_current_modes():
                self.arrive(self.launched)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        device, pin = kwargs.get("device"), kwargs.pop("pin_memory", False)
        on_gpu = any(isinstance(one, GpuTensor) for one in tensors)
        to_gpu = on_gpu if device is None else torch.device(device).type == gpu().type
        if device is not None and to_gpu:
            kwargs["device"] = torch.device("cpu")
        if name == "is_pinned":
            return self.is_pinned(tensors[0])
        if name == "_pin_memory":
            assert not on_gpu, "memory of a GPU cannot be pinned"
            return self._pin(tensors[0].clone())
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "_to_copy":
            waits = not kwargs.pop("non_blocking", False) or on_gpu
            if on_gpu != to_gpu and (waits or not self.is_pinned(tensors[0])):
                self.wait(f"a copy to the {'GPU' if to_gpu else 'CPU'}")
        elif on_gpu:
            read = host_read(func, args, kwargs)
            if read is not None:
                self.wait(read)
            self._check_devices(name, tensors)
        assert name not in _UNSUPPORTED, f"{name}: not supported by the stand-in"
        if name == "_conj" and on_gpu:  # a bit that the tensor around it has not
            func = torch.ops.aten.conj_physical.default
        found = func(*tree_map(numbers_of, args), **tree_map(numbers_of, kwargs))
        if pin:
            return self._pin(found)
        return self._on_gpu(found, tensors) if to_gpu else found

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        numbers, host = numbers_of(source), source if isinstance(to, GpuTensor) else to
        if isinstance(to, GpuTensor) == isinstance(source, GpuTensor):
            numbers_of(to).copy_(numbers)
        elif not non_blocking or not self.is_pinned(host):
            self.wait(f"a copy to the {'GPU' if host is source else 'CPU'}")
            numbers_of(to).copy_(numbers)
        elif host is source:
            # What arrives there is there for the stream, and not yet for the CPU.
            seen = [destination.clone() for _, destination, _ in self.unseen]
            for _, destination, arriving in self.unseen:
                destination.copy_(arriving)
            numbers_of(to).copy_(numbers)
            for (_, destination, _), before in zip(self.unseen, seen, strict=True):
                destination.copy_(before)
        else:
            arriving = torch.empty_like(to).copy_(numbers)
            _bytes_of(to).fill_(UNSEEN)
            self.launched += 1
            self.unseen.append((self.launched, to, arriving))
        return to

    def _check_devices(self, name: str, tensors: list[Tensor]) -> None:
        """Torch takes single numbers of the CPU along, and indices, for which it waits."""
        indexes = name in ("index", "index_put_", "index_put", "_index_put_impl_")
        first, *others = tensors
        cpu = [one for one in others if not isinstance(one, GpuTensor)]
        if indexes and isinstance(first, GpuTensor):
            integers = [one for one in cpu if not one.is_floating_point()]
            if integers:
                self.wait(f"{name} with indices of the CPU")
            cpu = [one for one in cpu if one.is_floating_point()]
        elif not isinstance(first, GpuTensor):
            cpu.append(first)
        moved = name in ("cat", "stack", "gather", "index_select") or name.startswith("scatter")
        mixed = [one for one in cpu if one.dim() or moved or name.startswith("index_")]
        shapes = [(tuple(one.shape), one.dtype) for one in mixed]
        assert not mixed, f"{name}: operands on the CPU beside those on the GPU: {shapes}"

    def _on_gpu(self, found: Any, given: list[Tensor]) -> Any:
        known = {id(one.numbers): one for one in given if isinstance(one, GpuTensor)}

        def around(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else GpuTensor(value)

        return tree_map(around, found)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    if not path.is_relative_to(ROOT) or path == Path(__file__).resolve():
        return False
    return path.relative_to(ROOT).parts[0] in ("sgl_skipkv", "kernels", "patches", "tests")


@contextmanager
def stand_in_gpu() -> Iterator[StandInGpu]:
    """While open, there is a GPU. Launches of interpreted kernels, and gathers over ranks, take its
    tensors alone."""
    made = StandInGpu()
    launch = GridExecutor.__call__

    class Event:
        """Of a stream that is behind: it has passed once somebody waits, or asks twice."""

        def __init__(self, device: torch.device) -> None:
            self.record()

        def record(self) -> None:
            self._asked, self._launched = False, made.launched

        def synchronize(self) -> None:
            with _disable_current_modes():
                made.arrive(self._launched)

        def query(self) -> bool:
            passed, self._asked = self._asked, True
            if passed:
                self.synchronize()
            return passed

    def launch_on_gpu(executor: Any, *arguments: Any, **options: Any) -> None:
        for one in tree_leaves((arguments, options)):
            name = executor.fn.__name__
            assert not isinstance(one, Tensor) or isinstance(one, GpuTensor), f"{name}: of the CPU"
        with _disable_current_modes():
            launch(executor, *tree_map(numbers_of, arguments), **tree_map(numbers_of, options))

    gather = ranks._all_gather

    def gather_on_gpus(parts: Tensor, part: Tensor, **options: Any) -> None:
        assert isinstance(parts, GpuTensor) and isinstance(part, GpuTensor), "a gather of the CPU"
        with _disable_current_modes():
            gather(parts.numbers, part.numbers, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", Event)
        patch.setattr(ranks, "_all_gather", gather_on_gpus)
        patch.setattr(GridExecutor, "__call__", launch_on_gpu)
        gpu()
        with made:
            yield made
