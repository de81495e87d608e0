"""The error boundary: the only place where an error of the plugin is caught.

An exception that leaves a hook ends the scheduler, and with it every running request. Before a row
is rewritten, an error of the plugin affects one request: it ends with 500, and the log has the
traceback. After that nothing is caught, because a half-written row must not be served. Errors that
show corrupted memory, a failed device or ranks that cannot act as one are never caught.

What another package's policy raises while it is imported is caught in ``policy/installed.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: how messages of device errors from Triton's driver begin; they have no exception class
_DRIVER_ERRORS = ("Triton Error [CUDA]: ", "Triton Error [HIP]: ")


class FatalError(Exception):
    """Base of errors that must end the scheduler process."""


def is_fatal(error: Exception) -> bool:
    """Whether an error must end the scheduler process.

    Running out of memory, for a pinned tensor or a kernel, is not fatal: the device is unchanged.
    """
    message = str(error).partition("\n")[0]
    of_driver = type(error) is RuntimeError and message.startswith(_DRIVER_ERRORS)
    of_device = of_driver or isinstance(error, torch.AcceleratorError)
    return isinstance(error, FatalError) or (of_device and not message.endswith("out of memory"))


def attempt(what: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """(The result of ``work``, None), or (None, an error message).

    Args:
        what: the request or task, for the log.

    Raises:
        Exception: the error itself, if ``is_fatal``.
    """
    try:
        return work(), None
    except Exception as error:
        if is_fatal(error):
            raise
        logger.exception(what)
        return None, f"an error of the plugin, {type(error).__name__}; see the server's log"
