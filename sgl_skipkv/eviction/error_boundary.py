"""The one place where an error of ours is caught: while nothing has changed yet.

An exception that leaves a hook ends the scheduler, and with it every request of every tenant. Until
a row is rewritten, a mistake of ours concerns one request: that one ends with 500, and the log has
the traceback. From there on nothing is caught, because what is half done must not be served;
neither is what proves that memory is wrong already, or that the device is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from sgl_skipkv.eviction.page_table import LedgerError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: how Triton's driver begins the message of a device's error; it has no class of its own
_DRIVER_ERRORS = ("Triton Error [CUDA]: ", "Triton Error [HIP]: ")


def is_fatal(error: Exception) -> bool:
    """Whether an error stops the worker wherever it happens.

    Whoever found no memory, for a pinned tensor or a kernel, left the device as it was.
    """
    message = str(error).partition("\n")[0]
    of_driver = type(error) is RuntimeError and message.startswith(_DRIVER_ERRORS)
    of_device = of_driver or isinstance(error, torch.AcceleratorError)
    return isinstance(error, LedgerError) or (of_device and not message.endswith("out of memory"))


def attempt(what: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The work's result, or None and what went wrong.

    Args:
        what: whose work it is, for the log.

    Raises:
        Exception: as it came, if ``is_fatal``.
    """
    try:
        return work(), None
    except Exception as error:
        if is_fatal(error):
            raise
        logger.exception(what)
        return None, f"an error of the plugin, {type(error).__name__}; the server's log has it"
