"""Compiles the kernels while the server serves, if eviction is not enabled at start.

With eviction enabled the server compiles them before it is ready. Otherwise a thread compiles them,
on a separate stream and with separate buffers, so that startup is not delayed. Until it is done,
requests with a budget get 503: the first would otherwise stop the scheduler for about a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

import torch

from sgl_skipkv.eviction.error_boundary import attempt

logger = logging.getLogger(__name__)


class KernelCompilation:
    """The compilation of one scheduler process.

    Attributes:
        refusal: why requests that need kernels get 503; None: they are not refused.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None

    def start(self, compile_kernels: Callable[[], None]) -> None:
        """Compile in a thread."""
        self.refusal = (
            "this server is compiling kernels, because eviction was not enabled at start; retry in "
            "a moment (with any sgl_skipkv flag, such as --kv-policy distinct, a server compiles "
            "before it is ready)"
        )
        logger.info("sgl_skipkv: compiling kernels; until then kv_budget requests get 503")
        Thread(
            target=self._run, args=(compile_kernels,), name="skipkv-compile", daemon=True
        ).start()

    def _run(self, compile_kernels: Callable[[], None]) -> None:
        started = time.perf_counter()
        # A fatal error ends the thread with a traceback; the scheduler will run into it as well.
        error: str | None = "a device error, see the server's log"
        try:
            _, error = attempt("sgl_skipkv: compiling kernels", compile_kernels)
        finally:
            failure = f"this server's kernels were not compiled: {error}"
            self.refusal = None if error is None else failure
        if error is None:
            logger.info("sgl_skipkv: kernels compiled in %.1f s", time.perf_counter() - started)


def with_index(device: torch.device) -> torch.device:
    """The GPU of this thread with its number, which another thread needs: it begins with GPU 0."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def separate_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's launches on a separate stream, and wait for them at the end.

    Args:
        device: with its number.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()
