"""Which errors end one request, and which stop the worker."""

from __future__ import annotations

import pytest
import torch

from sgl_skipkv.error_boundary import attempt, is_fatal
from sgl_skipkv.eviction.ledger import LedgerError

DRIVER = "Triton Error [CUDA]: "


class OwnError(RuntimeError):
    """Not the driver's: that raises plain RuntimeErrors."""


@pytest.mark.parametrize(
    "error",
    [
        LedgerError("a slot twice"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError(DRIVER + "an illegal memory access was encountered"),
        RuntimeError(DRIVER + "device-side assert triggered"),
        RuntimeError("Triton Error [HIP]: unspecified launch failure"),
    ],
    ids=str,
)
def test_a_fault_of_the_device_or_the_memory_is_not_caught(error: Exception) -> None:
    def work() -> None:
        raise error

    assert is_fatal(error)
    with pytest.raises(type(error)) as caught:
        attempt("a request", work)
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(DRIVER + "out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCompile with ..."),  # pinned memory
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("a shape does not fit"),
        RuntimeError("after " + DRIVER + "an illegal memory access was encountered"),
        OwnError(DRIVER + "an illegal memory access was encountered"),
        ValueError("a mistake of ours"),
    ],
    ids=repr,
)
def test_any_other_error_ends_the_request(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        raise error

    assert not is_fatal(error)
    result, message = attempt("a request", work)
    assert result is None and message is not None and type(error).__name__ in message
    assert caplog.records[0].exc_info is not None


def test_work_that_succeeds() -> None:
    assert attempt("a request", lambda: 5) == (5, None)
