"""Bytes of KV that a kernel loads and stores, counted where Triton's interpreter does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


@contextmanager
def counted_bytes(buffers: Sequence[Tensor]) -> Iterator[Counter[str]]:
    """While open: ``read`` and ``written`` bytes of these buffers, by launches on the CPU."""
    counted = Counter[str]()
    spans = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in buffers]
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(kind: str, pointers: Any, mask: Any) -> None:
        at = np.asarray(pointers.data)[np.asarray(mask.data)]
        inside = sum(int(((at >= start) & (at < stop)).sum()) for start, stop in spans)
        counted[kind] += inside * pointers.get_element_ty().primitive_bitwidth // 8

    def counting(kind: str, original: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def call(self: Any, pointers: Any, *rest: Any) -> Any:
            count(kind, pointers, rest[mask_at])
            return original(self, pointers, *rest)

        return call

    try:
        InterpreterBuilder.create_masked_load = counting("read", load, 0)
        InterpreterBuilder.create_masked_store = counting("written", store, 1)
        yield counted
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
