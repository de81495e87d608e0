"""Whether a CUDA graph is being captured. A captured pass must include all that replays do."""

from __future__ import annotations


def is_capturing() -> bool:
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())
