"""SGLang's platform plugin and attention for machines without an accelerator.

Every SGLang that finds this package asks it for a platform, whatever its version. So nothing is
imported here that only tested versions have.
"""

from __future__ import annotations

import os

from sgl_skipkv.config import CPU_PLATFORM


def activate() -> str | None:
    """Entry point (``sglang.srt.platforms``): the platform class, if ``SGLANG_PLATFORM`` names it.

    Without ``SGLANG_PLATFORM`` SGLang activates every installed platform. An installed package must
    not turn a GPU machine into a CPU server.
    """
    if os.environ.get("SGLANG_PLATFORM") != CPU_PLATFORM:
        return None
    # The scheduler and detokenizer processes inherit this. With small batches on a few cores,
    # OpenMP synchronisation costs a factor of ten. A user's setting takes precedence.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from sgl_skipkv.cpu.platform import SkipKVCpuPlatform
    except ImportError as error:
        raise SystemExit(
            f"SGLANG_PLATFORM={CPU_PLATFORM}: not with this SGLang ({error}); docs/versions.md "
            "has the versions that were tested"
        ) from error
    return f"{SkipKVCpuPlatform.__module__}.{SkipKVCpuPlatform.__name__}"
