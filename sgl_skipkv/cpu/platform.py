"""An SGLang platform for machines without an accelerator: ``SGLANG_PLATFORM=skipkv_cpu``.

SGLang's own CPU engine needs AMX and a kernel library that links against the CUDA driver. An
out-of-tree platform needs neither: attention runs on the ``torch_native`` backend and every fused
operator in plain torch, so the real server, radix cache and overlap scheduler run on any Linux
machine. It is meant for tests and demos and is slow.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity


class SkipKVCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # untyped bases
    """CPU tensors, torch-native attention, no graphs, no Triton."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # SGLang gives each process a NUMA node of its own, and most machines have one. It only
        # splits this by "|": with our number of threads, no process is bound to a core.
        processes = server_args.tp_size * server_args.pp_size * server_args.dp_size
        if processes > 1:
            cores = range(os.cpu_count() or 1)
            bound = (str(cores[i % len(cores)]) for i in range(processes))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bound))
        # HiCache's other ways to copy are kernels of a GPU.
        server_args.hicache_io_backend, server_args.hicache_mem_layout = "direct", "layer_first"
        server_args.lora_backend = "torch_native"  # the others are kernels of a GPU
        # A decode server with DP attention exchanges logits by an operator of NCCL.
        if server_args.enable_tp_lm_head_all_to_all is None:
            server_args.enable_tp_lm_head_all_to_all = False
        # A prefill server sends what the radix tree has behind a CUDA event; here with the rest.
        os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")

        keep_overlap_scheduler()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        # Without an index: SGLang looks for a ":" in it if --device is not given.
        return "cpu"

    # ``/start_profile`` asks every platform of its own for an activity beside "CPU", by a name that
    # torch has; this one has no such device.
    def get_torch_profiler_activity_str(self) -> str:
        return "PrivateUse1"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("EAGLE", "EAGLE3", "STANDALONE")

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True  # where the model's own kernels run

    def init_backend(self) -> None:
        # These imports need an active platform.
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.model_executor import forward_batch_info
        from sglang.srt.models.deepseek_common.attention_backend_handler import (
            AttentionBackendRegistry,
            AttnForwardMethod,
        )

        from sgl_skipkv.cpu.attention import GroupedTorchAttnBackend
        from sgl_skipkv.cpu.speculation import serve_speculation

        # Under a name that SGLang's checks know.
        register_attention_backend("torch_native")(GroupedTorchAttnBackend)
        # Attention over latents in every pass: SGLang's other form needs kernels of a GPU.
        method = AttnForwardMethod.MLA
        AttentionBackendRegistry.register("torch_native", lambda layer, batch: method)
        # DP attention copies, pads and gathers without a GPU where SGLang's own CPU engine runs.
        dp_attention.memcpy_func = dp_attention.memcpy_cpu
        forward_batch_info._is_cpu = parallel_state._is_cpu = True
        serve_hicache()
        serve_disaggregation()
        serve_lora()
        serve_speculation()
        # OpenMP reads the variable when it is loaded; a process that loaded torch before
        # ``activate`` would keep all cores.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def keep_overlap_scheduler() -> None:
    """SGLang's own CPU engine has no overlap scheduler for speculative decoding; this one has."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None


def serve_hicache() -> None:
    """HiCache pins its host memory and copies through CUDA; here it does neither."""
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    base.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, pinned: None)
    mha.transfer_kv_direct = mla.transfer_kv_direct = _copy_pages


def serve_disaggregation() -> None:
    """A prefill server passes page numbers on through pinned memory; here without."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def serve_lora() -> None:
    """LoRA pins what it copies to a GPU, which asks for its driver; here nothing is pinned."""
    from sglang.srt.lora.lora_manager import LoRAManager as Manager

    loading = "__init__", "load_lora_adapter", "load_lora_adapter_from_tensors"
    for name in (*loading, "prepare_lora_batch"):
        setattr(Manager, name, _without_pinning(getattr(Manager, name)))


def _without_pinning(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def unpinned(*args: Any, **kwargs: Any) -> Any:
        with _Unpinned():
            return method(*args, **kwargs)

    return unpinned


class _Unpinned(TorchFunctionMode):
    """Tensors that are to be pinned are not."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        others = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*args, **others)


def _copy_pages(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """HiCache's copy between its two levels, of whole pages.

    src_layers, dst_layers: [slots, Hkv, d] each; src_indices, dst_indices: [T], slots.
    """
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
