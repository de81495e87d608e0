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

#: what stops the worker wherever it happens
FATAL = (LedgerError, torch.AcceleratorError)


def attempt(what: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The work's result, or None and what went wrong.

    Args:
        what: whose work it is, for the log.

    Raises:
        LedgerError, torch.AcceleratorError: as they came.
    """
    try:
        return work(), None
    except FATAL:
        raise
    except Exception as error:
        logger.exception(what)
        return None, f"an error of the plugin, {type(error).__name__}; the server's log has it"
