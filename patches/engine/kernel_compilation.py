"""The kernels of a server that was not configured for eviction: compiled while it serves.

One that was configured compiles them before it is ready. For any other that would delay a start
that has nothing to do with us, so a thread does it, on a stream and in memory of its own. Requests
without a budget do not notice; one with a budget would wait for a minute, and everybody with it, so
it is refused until the thread is done.
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


class KernelsUnavailable(Exception):
    """A request needs kernels that this server does not have (yet). Becomes HTTP 503."""


class KernelCompilation:
    """Of one scheduler process; nothing is refused unless it was started."""

    def __init__(self) -> None:
        self._refusal: str | None = None

    def start(self, compile_kernels: Callable[[], None]) -> None:
        """Compile in a thread."""
        self._refusal = (
            "this server is compiling kernels, because it was not configured for eviction at its "
            "start; retry in a moment (with any sgl_skipkv flag, such as --kv-policy skipkv, a "
            "server compiles before it is ready)"
        )
        logger.info("sgl_skipkv: compiling kernels; until that is done kv_budget requests get 503")
        Thread(
            target=self._run, args=(compile_kernels,), name="skipkv-compile", daemon=True
        ).start()

    def check(self) -> None:
        """Refuse a request while there are no kernels.

        Raises:
            KernelsUnavailable: with the reason.
        """
        if self._refusal is not None:
            raise KernelsUnavailable(self._refusal)

    def _run(self, compile_kernels: Callable[[], None]) -> None:
        started = time.perf_counter()
        # What is fatal leaves the thread with a traceback; the scheduler meets the same device.
        error: str | None = "a fault of the device; the server's log has it"
        try:
            _, error = attempt("sgl_skipkv: compiling kernels", compile_kernels)
        finally:
            failure = f"this server's kernels were not compiled: {error}"
            self._refusal = None if error is None else failure
        if error is None:
            logger.info("sgl_skipkv: kernels compiled in %.1f s", time.perf_counter() - started)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What this thread launches runs beside the scheduler's streams, and is done at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()
