"""Paged keys of made-up requests, and a count of what an interpreted kernel loads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton_tools import data_pointers, far_tensor

from sgl_skipkv.kernels.paged_keys import PagedKeys


@dataclass
class PagedWorld:
    """What a scoring kernel is told about a batch of requests.

    Attributes:
        layers: the K buffer of each layer, [slots, Hkv, d]; NaN in slots that no request uses.
        of_request: per request [L, n, Hkv, d], the same keys in logical order; of float8 ones what
            they stand for, in float32.
        k_scales: float32 [L], as in ``PagedKeys``.
    """

    layers: list[Tensor]
    of_request: list[Tensor]
    req_to_token: Tensor
    rows: Tensor
    k_scales: Tensor | None = None

    @property
    def row_tokens(self) -> list[int]:
        return [keys.shape[1] for keys in self.of_request]

    @property
    def paged(self) -> PagedKeys:
        offsets = torch.tensor([0, *accumulate(self.row_tokens)], device=self.rows.device)
        pointers = data_pointers(self.layers)
        table, rows, tokens = self.req_to_token, self.rows, self.row_tokens
        return PagedKeys(self.layers[0], pointers, table, rows, tokens, offsets, self.k_scales)

    def alone(self, request: int) -> PagedWorld:
        """The same buffers and page table, and only one of the requests."""
        own = slice(request, request + 1)
        of_request, rows = self.of_request[own], self.rows[own]
        return PagedWorld(self.layers, of_request, self.req_to_token, rows, self.k_scales)


def paged(
    of_request: Sequence[Tensor],
    seed: int = 0,
    spare_slots: int = 9,
    k_scales: Sequence[float] | None = None,
) -> PagedWorld:
    """Requests in random rows of a page table, their tokens in random slots.

    Slot 0 belongs to nobody; entries past a row's end name it, as an engine's padding does.

    Args:
        of_request: per request float [L, n, Hkv, d], as they are stored.
        k_scales: of each layer, what a stored number is to be multiplied with.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = [keys.shape[1] for keys in of_request]
    first = of_request[0]
    slots = 1 + torch.randperm(sum(tokens) + spare_slots, generator=draw)
    req_to_token = torch.zeros(len(tokens) + 2, max(tokens) + 3, dtype=torch.int32)
    rows = torch.randperm(len(tokens) + 2, generator=draw)[: len(tokens)]
    nothing = torch.full((len(slots) + 1, *first.shape[2:]), torch.nan).to(first.dtype)
    layers = [nothing.clone() for _ in range(first.shape[0])]
    for keys, row, own in zip(of_request, rows, slots[: sum(tokens)].split(tokens), strict=True):
        req_to_token[row, : len(own)] = own.int()
        for layer, values in zip(layers, keys, strict=True):
            stored(layer)[own] = stored(values.cpu())
    device, scales = first.device, None
    wide = [keys.float() if keys.itemsize == 1 else keys for keys in of_request]
    if k_scales is not None:
        scales = torch.tensor(k_scales, device=device)
        wide = [keys * scales[:, None, None, None] for keys in wide]
    return PagedWorld(
        [layer.to(device) for layer in layers],
        wide,
        req_to_token.to(device),
        rows.to(device),
        scales,
    )


def far_away(world: PagedWorld) -> PagedWorld:
    """The same requests, in slots and page-table rows whose offsets no 32-bit integer holds."""
    device, (slots, kv_heads, d) = world.rows.device, world.layers[0].shape
    if device.type != "cpu":
        pytest.skip("would take tens of GB of the GPU")
    first, layers = 2**31 // (kv_heads * d), []
    for layer in world.layers:
        layers.append(far_tensor((first + slots, kv_heads, d), torch.float32, device))
        layers[-1][first:] = layer
    table = far_tensor((2**22 + 9, 600), torch.int32, device)
    for row, n in zip(world.rows.tolist(), world.row_tokens, strict=True):
        table[2**22 + row, :n] = world.req_to_token[row, :n] + first
    return PagedWorld(layers, world.of_request, table, world.rows + 2**22)


def nobody(world: PagedWorld) -> PagedKeys:
    """A batch of no request in the same buffers."""
    none = world.rows[:0]
    return dataclasses.replace(world.paged, rows=none, row_tokens=[], offsets=none.new_zeros(1))


def stored(keys: Tensor) -> Tensor:
    """The same memory, of a type that torch can index: float8 as SGLang keeps it, in bytes."""
    return keys.view(torch.uint8) if keys.itemsize == 1 else keys


@contextmanager
def counted_loads(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """How often an interpreted kernel loads each element, whatever pointer it comes by.

    Yields:
        int64, of each tensor's shape; complete when the block ends. The tensors are contiguous.
    """
    if tensors[0].device.type != "cpu":
        pytest.skip("a GPU does not say what it loads")
    counts = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
    load = interpreter.InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = np.broadcast_to(pointers.data, np.shape(mask.data))[mask.data].astype(np.int64)
        for tensor, count in zip(tensors, counts, strict=True):
            element = (loaded - tensor.data_ptr()) // tensor.element_size()
            element = element[(element >= 0) & (element < tensor.numel())]
            count += torch.from_numpy(np.bincount(element, minlength=tensor.numel()))
        return load(self, pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counting)
        yield [count.view(tensor.shape) for tensor, count in zip(tensors, counts, strict=True)]


def counted_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched from here on."""
    names: list[str] = []
    for kind in (InterpretedFunction, JITFunction):

        def run(self: Any, *args: Any, launch: Any = kind.run, **options: Any) -> Any:
            names.append(self.fn.__name__)
            return launch(self, *args, **options)

        monkeypatch.setattr(kind, "run", run)
    return names


def clustered(
    tokens: Sequence[int],
    thresholds: Sequence[float],
    *,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    noise: float = 0.5,
    seed: int = 0,
) -> list[Tensor]:
    """Per request [L, n, Hkv, d]: keys in clusters, every seventh in none.

    No cosine is so near the threshold that rounding could decide on which side of it two keys are.
    """
    draw = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    while len(made) < len(tokens):
        n, threshold = tokens[len(made)], thresholds[len(made)]
        of = torch.randint(5, (n,), generator=draw)
        centres = torch.randn(layers, 5, kv_heads, head_dim, generator=draw)[:, of]
        centres *= (torch.arange(n) % 7 > 0)[:, None, None]
        keys = centres + noise * torch.randn(layers, n, kv_heads, head_dim, generator=draw)
        keys = keys.to(dtype)
        others = ~torch.eye(n, dtype=torch.bool)
        made += [keys] * bool(((cosines(keys) - threshold)[..., others].abs() > 1e-5).all())
    return made


def cosines(keys: Tensor) -> Tensor:
    """float64 [L, Hkv, n, n], the diagonal 0. keys: [L, n, Hkv, d]."""
    unit = keys.double().transpose(1, 2)
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    cosine: Tensor = unit @ unit.transpose(2, 3)
    cosine.diagonal(dim1=2, dim2=3).zero_()
    return cosine


def last_similar_truth(keys: Tensor, threshold: float) -> Tensor:
    """int32 [L, Hkv, n], from the whole matrix."""
    columns = torch.arange(keys.shape[1], device=keys.device)
    similar = torch.where(cosines(keys) > threshold, columns, -1)
    return similar.amax(-1).int() if len(columns) else similar.flatten(2).int()


@contextmanager
def counted_products() -> Iterator[list[int]]:
    """Multiplications and additions of every product of an interpreted kernel, one by one."""
    operations: list[int] = []
    dot = interpreter.InterpreterBuilder.create_dot

    def counting(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        operations.append(2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1])
        return dot(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", counting)
        yield operations


class Allocations(TorchDispatchMode):
    """While open, counts the bytes that torch allocates without filling them from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in {"empty", "new_empty", "empty_like", "zeros"}:
            self.total_bytes += made.nbytes
        return made


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch fills what it allocates with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
