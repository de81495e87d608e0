"""An SGLang platform for machines without an accelerator: ``SGLANG_PLATFORM=skipkv_cpu``.

SGLang's own CPU engine needs AMX and a kernel library that links against the CUDA driver. An
out-of-tree platform needs neither: attention runs on the ``torch_native`` backend and every fused
operator takes its plain-torch path, so the real server, radix cache and overlap scheduler run on
any Linux machine. It is meant for trying things out, tests and demos, not for speed.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

from sgl_skipkv.config import CPU_PLATFORM


def activate() -> str | None:
    """Entry point (``sglang.srt.platforms``): name the platform class, only where it was chosen.

    Without ``SGLANG_PLATFORM`` SGLang activates every installed platform, and this package must not
    take a GPU machine away from CUDA just by being installed.
    """
    if os.environ.get("SGLANG_PLATFORM") != CPU_PLATFORM:
        return None
    # SGLang spawns its processes: the scheduler and the detokenizer inherit this. Small batches on
    # a few cores lose a factor of ten to OpenMP hand-offs; a user's own setting wins.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return f"{__name__}.SkipKVCpuPlatform"


class SkipKVCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # untyped bases
    """CPU tensors, torch-native attention, no graphs, no Triton."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        # A name: SGLang looks for a ":" in it where no --device was given.
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def init_backend(self) -> None:
        # These ask which platform is active, so they can be imported only once one is.
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sgl_skipkv.cpu.attention import GroupedTorchAttnBackend

        # Under the name that SGLang's own checks know.
        register_attention_backend("torch_native")(GroupedTorchAttnBackend)
        # The environment variable is read when OpenMP loads; a worker that had torch loaded before
        # this module was asked would otherwise keep all cores.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
