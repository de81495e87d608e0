"""A runtime on the CPU whose tensors go through the Triton kernels, in Triton's interpreter.

On a GPU ``uses_triton`` is true by itself; here it is said, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor
from triton_tools import KERNELS as FOLDER
from triton_tools import interpreted

from sgl_skipkv.eviction import kv_move, page_table, select
from sgl_skipkv.kernels import on_device
from sgl_skipkv.recording import recorder, sentence_table
from sgl_skipkv.steering import steerer

#: every file that has a kernel
KERNELS = tuple(
    import_module(f"sgl_skipkv.kernels.{path.stem}")
    for path in sorted(FOLDER.glob("*.py"))
    if "@triton.jit" in path.read_text()
)
USERS = (kv_move, page_table, recorder, select, sentence_table, steerer, on_device)


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
