"""Tensor operations as they pass by: which of them would make the CPU wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: they read a device value, or need one to know the shape of what they return
HOST_READS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
        *("unique_dim", "_unique2", "unique_consecutive", "repeat_interleave.Tensor"),
    }
)

#: makes a tensor of a Python number
NUMBER_COPY = "aten::lift_fresh"


def host_read(func: Any, args: Any, kwargs: Any = None) -> str | None:
    """What about this operation waits for a device, or None."""
    if "output_size" in (kwargs or {}):
        return None  # repeat_interleave, when it is told the length
    name = func._schema.name.removeprefix("aten::")
    if name in HOST_READS or f"{name}.{func._schema.overload_name}" in HOST_READS:
        return name
    if name.startswith("index"):
        masks = [i for i in tree_leaves(args[1:2]) if isinstance(i, Tensor)]
        if any(i.dtype in (torch.bool, torch.uint8) for i in masks):
            return f"{name} with a mask"
    return None


class NoNumberCopy(TorchDispatchMode):
    """Inside, a Python number that becomes a tensor is an error: ``table[row] = number`` copies it
    from pageable memory, for which the CPU waits. ``fill_`` takes it along with its launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        becomes_tensor = func._schema.name == NUMBER_COPY
        assert not becomes_tensor, "a number becomes a tensor: the device is waited for"
        return func(*args, **(kwargs or {}))


class NoHostRead(TorchDispatchMode):
    """Inside, an operation that would wait for a device is an error. Sees torch, not Triton."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = host_read(func, args, kwargs)
        assert read is None, f"{read} waits for the device"
        return func(*args, **(kwargs or {}))
