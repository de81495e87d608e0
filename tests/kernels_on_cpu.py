"""A runtime on the CPU whose tensors go through the Triton kernels, in Triton's interpreter.

On a GPU ``uses_triton`` is true by itself; here it is said, and nothing else differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton_tools import interpreted

import sgl_skipkv.kernels.carried_columns as carried_columns
import sgl_skipkv.kernels.key_redundancy as key_redundancy
import sgl_skipkv.kernels.ring_write as ring_write
import sgl_skipkv.kernels.row_compaction as row_compaction
import sgl_skipkv.kernels.sentence_redundancy as sentence_redundancy
import sgl_skipkv.kernels.sentence_step as sentence_step
import sgl_skipkv.kernels.spared_columns as spared_columns
import sgl_skipkv.kernels.steering_add as steering_add
import sgl_skipkv.kernels.window_attention as window_attention
from sgl_skipkv import page_table, recorder, sentence_table, steering
from sgl_skipkv.kernels import on_device

KERNELS = (carried_columns, key_redundancy, ring_write, row_compaction, sentence_redundancy)
KERNELS += (sentence_step, spared_columns, steering_add, window_attention)
USERS = (page_table, recorder, sentence_table, steering, on_device)


@contextmanager
def on_triton() -> Iterator[None]:
    """While open, every launch of the runtime is one of the interpreter."""
    with pytest.MonkeyPatch.context() as patch, interpreted(*KERNELS):
        for module in USERS:
            patch.setattr(module, "uses_triton", lambda device: True)
        yield
