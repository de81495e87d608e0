"""Where a tensor's formula runs, what Triton calls its dtype, and how small lists get there.

On a GPU the Triton kernels, anywhere else the plain torch of ``reference``: same formula, same
tables. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

TRITON_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Float dtype -> how Triton's signatures call it."""
KEY_NAMES = {**TRITON_NAMES, torch.float8_e4m3fn: "fp8e4m3", torch.float8_e5m2: "fp8e5m2"}
"""Dtype of cached keys -> what its variants are called. float8 is loaded as bytes."""


def uses_triton(device: torch.device) -> bool:
    """Whether tensors on this device go through the Triton kernels."""
    return device.type == "cuda"


def kernels_read(head_dim: int) -> bool:
    """Whether the scoring kernels read heads of this size: powers of two from 16 to 256."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0


def register_limit(limits: Mapping[int, int], device: torch.device) -> dict[str, int]:
    """Triton's launch option for this device, of limits of a thread's registers by architecture.

    Devices of one generation (sm_80, sm_86, sm_89) share theirs.
    """
    if device.type != "cuda":
        return {}
    major, _ = torch.cuda.get_device_capability(device)
    limit = limits.get(10 * major)
    return {} if limit is None else {"maxnreg": limit}


def device_tensor(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """dtype [len(values)] on the device, without waiting for it."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on the device, without waiting: pinned memory alone allows that."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def device_tensors(parts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """int64 [len(part)] each, by one copy. Every one begins at a multiple of 16 bytes, because
    Triton compiles a kernel for that."""
    padded = [[*part, *[0] * (len(part) % 2)] for part in parts]
    packed = device_tensor([*chain(*padded)], device)
    split = torch.split(packed, [len(part) for part in padded])
    return tuple(piece[: len(part)] for piece, part in zip(split, parts, strict=True))


def started_copy(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy in pinned memory and the event after which it is there; of a CPU tensor itself, and
    None."""
    if tensor.device.type == "cpu":
        return tensor, None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.Event(tensor.device)
    copied.record()
    return host, copied
