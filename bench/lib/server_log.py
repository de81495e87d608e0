"""What SGLang's log says of its batches."""

from __future__ import annotations

import re


def running_requests(log: str) -> list[int]:
    """Requests in each decode batch that was logged."""
    return [int(n) for n in re.findall(r"Decode batch, #running-req: (\d+)", log)]


def retractions(log: str) -> int:
    """Requests retracted, each as often as it was."""
    return sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log))
