"""Rows of the capability matrix about settings and the platform: why eviction cannot work with
them, or None. ``Setting`` and ``Switch`` are such checks of one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from sgl_skipkv.kernels.on_device import uses_triton
from sgl_skipkv.patches.engine.pd_roles import is_decode_server
from sgl_skipkv.patches.startup.flags import config_of

Check = Callable[[Any], str | None]
BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "trtllm_mha")


def backend(scheduler: Any) -> str | None:
    runner = scheduler.tp_worker.model_runner
    used = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
    other = sorted(str(name) for name in used if name not in BACKENDS)
    if not other:
        return None
    return f"attention backend {', '.join(other)} (supported: {', '.join(BACKENDS)})"


def rocm(scheduler: Any) -> str | None:
    version = torch.version.hip
    return None if version is None else f"ROCm {version}: untested"


def generates_images(hf_config: Any) -> bool:
    return bool(hf_config.model_type == "glm_image")


def generated_images(scheduler: Any) -> str | None:
    hf_config = scheduler.model_config.hf_config
    named = f"generated images (model_type={hf_config.model_type})"
    return named if generates_images(hf_config) else None


def mrope_on_policy(scheduler: Any) -> str | None:
    from sglang.srt.runtime_context import get_exec

    on_policy = get_exec().deterministic.rl_on_policy_target is not None
    both = on_policy and scheduler.model_config.model_is_mrope
    return "mrope with --rl-on-policy-target" if both else None


def results_behind_next_plan(scheduler: Any) -> str | None:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    late = envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.get() and get_parallel().attn_dp_enabled
    return "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP with DP attention" if late else None


def not_enabled(scheduler: Any) -> str | None:
    """Kernels, graphs and the memory of several ranks are made at start, or not at all."""
    from sglang.srt.runtime_context import get_parallel

    if config_of(scheduler.server_args).enabled:
        return None
    runner, size = scheduler.tp_worker.model_runner, get_parallel().tp_size
    captured = runner.decode_cuda_graph_runner is not None
    captured |= runner.prefill_cuda_graph_runner not in (None, runner.eager_runner)
    has = {
        "a GPU": uses_triton(torch.device(runner.device)),
        "CUDA graphs": captured,
        f"tensor parallel (tp_size={size})": size > 1,
    }
    needed_for = " and ".join(name for name in has if has[name])
    if not needed_for:
        return None
    return (
        f"eviction was not enabled at start, which is needed for {needed_for} (any sgl_skipkv flag "
        "enables it, such as --kv-policy distinct, and for an Engine SGL_SKIPKV_CONFIG in its "
        "environment)"
    )


def tokenizer_workers(scheduler: Any) -> str | None:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_serving

    workers = get_serving().tokenizer_worker_num
    if workers == 1 or hasattr(envs, "SGLANG_HTTP_SERVER_APP_PATH"):
        return None
    return (
        f"several tokenizer workers (tokenizer_worker_num={workers}), which load no plugin before "
        "SGLang 0.5.23"
    )


#: setting -> the tested versions of SGLang that do not have it yet, nor what it enables
_WITHOUT = {"exec.kernel.enable_nvidia_megakernel": ("0.5.22",)}


@dataclass(frozen=True)
class Setting:
    """A check on one resolved setting: its path in SGLang's runtime context, and its off values."""

    path: str
    off: tuple[object, ...]
    reason: str

    def __call__(self, scheduler: Any) -> str | None:
        import sglang
        from sglang.srt import runtime_context

        if sglang.__version__ in _WITHOUT.get(self.path, ()):
            return None
        bag, _, path = self.path.partition(".")
        value = attrgetter(path)(getattr(runtime_context, f"get_{bag}")())
        name = path.rpartition(".")[2]
        return None if value in self.off else f"{self.reason} ({name}={value})"


class SharedGroupSetting(Setting):
    """A check on a setting that is refused where ranks share an attention group, or all of them."""

    def __call__(self, scheduler: Any) -> str | None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        is_alone = parallel.attn_dp_enabled and parallel.attn_tp_size == 1
        return None if is_alone else super().__call__(scheduler)


@dataclass(frozen=True)
class Switch:
    """A check on one attribute of the scheduler that must be false or None."""

    attribute: str
    reason: str

    def __call__(self, scheduler: Any) -> str | None:
        is_on = attrgetter(self.attribute)(scheduler)
        return f"{self.reason} ({self.attribute})" if is_on else None


def hicache_of_decode(scheduler: Any) -> str | None:
    return (
        "HiCache on a decode server"
        if is_decode_server() and scheduler.enable_hierarchical_cache
        else None
    )
