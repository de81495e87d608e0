"""Where tests and long runs happen: on any machine, with no operator's settings."""

from __future__ import annotations

import os


def isolate() -> None:
    """Choose our CPU platform for this process and all that it starts. Before anything imports
    ``sglang``, which reads these once."""
    os.environ["SGLANG_PLATFORM"] = "skipkv_cpu"
    for name in ("SGL_SKIPKV_CONFIG", "SGLANG_SKIPKV_CONFIG"):
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
