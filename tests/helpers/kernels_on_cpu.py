"""A runtime on the CPU whose tensors go through the Triton kernels, in Triton's interpreter.

On a GPU ``uses_triton`` is true by itself; here it is said, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor
from triton_tools import interpreted

import sgl_skipkv.kernels.key_redundancy as key_redundancy
import sgl_skipkv.kernels.ring_write as ring_write
import sgl_skipkv.kernels.row_compaction as row_compaction
import sgl_skipkv.kernels.selection as selection
import sgl_skipkv.kernels.sentence_redundancy as sentence_redundancy
import sgl_skipkv.kernels.sentence_scores as sentence_scores
import sgl_skipkv.kernels.sentence_step as sentence_step
import sgl_skipkv.kernels.spared_columns as spared_columns
import sgl_skipkv.kernels.steering_add as steering_add
import sgl_skipkv.kernels.step_attention as step_attention
import sgl_skipkv.kernels.window_attention as window_attention
from sgl_skipkv.eviction import page_table, select
from sgl_skipkv.kernels import on_device
from sgl_skipkv.recording import recorder, sentence_table
from sgl_skipkv.steering import steerer

KERNELS = (key_redundancy, ring_write, row_compaction, sentence_redundancy)
KERNELS += (sentence_step, spared_columns, steering_add, step_attention)
KERNELS += (selection, sentence_scores, window_attention)
USERS = (page_table, recorder, select, sentence_table, steerer, on_device)


@contextmanager
def on_triton() -> Iterator[None]:
    """While open, every launch of the runtime is one of the interpreter."""
    with pytest.MonkeyPatch.context() as patch, interpreted(*KERNELS):
        for module in USERS:
            patch.setattr(module, "uses_triton", lambda device: True)
        yield


@contextmanager
def as_one_each(seen: Callable[[str, Callable[[], None]], None]) -> Iterator[None]:
    """While open, a dispatch mode sees nothing of what the interpreter does to run a kernel.

    Args:
        seen: called at every launch, with the kernel's name and what launches it once more.
    """
    original = GridExecutor.__call__

    def launch(executor: Any, *arguments: Any, **options: Any) -> None:
        def again() -> None:
            with _disable_current_modes():
                original(executor, *arguments, **options)

        again()
        seen(executor.fn.__name__, again)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        yield
