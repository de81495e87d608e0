"""The capability matrix: what eviction works with, checked on what the scheduler really built.

Each row is a fact about SGLang 0.5.23 and this package. A row with a ``check`` looks at the
resolved runtime (pool class, allocator, layers), not at flags alone: flags are resolved, defaulted
and overridden on the way. Rows marked per request are refused call by call instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sgl_skipkv.kernels.compile_case import KEY_NAMES
from sgl_skipkv.patches.engine.model_side import model_side_of

Check = Callable[[Any], str | None]
BACKENDS = ("torch_native", "triton", "flashinfer", "fa3")


@dataclass(frozen=True)
class Capability:
    """One row: a feature of the server, whether a budget works beside it, and why."""

    name: str
    supported: Literal["yes", "no", "per request"]
    why: str
    check: Check | None = None


def _backend(scheduler: Any) -> str | None:
    runner = scheduler.tp_worker.model_runner
    found = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
    other = sorted(str(name) for name in found if name not in BACKENDS)
    if not other:
        return None
    return f"attention backend {', '.join(other)} (supported: {', '.join(BACKENDS)})"


def _rocm(scheduler: Any) -> str | None:
    version = torch.version.hip
    return None if version is None else f"ROCm {version}: untested"


def _page_size(scheduler: Any) -> str | None:
    if scheduler.page_size == 1:
        return None
    return f"page size {scheduler.page_size}: slots of a shared page cannot be freed one by one"


def _allocator(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    found = type(scheduler.token_to_kv_pool_allocator)
    return None if found is TokenToKVPoolAllocator else f"allocator {found.__name__}"


def _pool(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:
        return f"KV pool {type(pool).__name__} (supported: MHATokenToKVPool)"
    return None if pool.kv_cache_layout == "nhd" else f"KV layout {pool.kv_cache_layout}"


def _quantised_kv(scheduler: Any) -> str | None:
    if _pool(scheduler) is not None:
        return None  # another row says so, and other pools have other attributes
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if pool.dtype in KEY_NAMES and not pool.is_quantized_kv_cache:
        return None
    return f"KV cache dtype {pool.dtype}: numbers in blocks with scales of their own"


def _sliding_window(scheduler: Any) -> str | None:
    from sglang.srt.layers.radix_attention import RadixAttention

    if scheduler.is_hybrid_swa:
        return "hybrid sliding-window attention"
    runner = scheduler.tp_worker.model_runner
    if runner.attention_chunk_size is not None:
        return "attention in chunks: they count row entries"
    for module in runner.model.modules():
        if isinstance(module, RadixAttention):
            if module.sliding_window_size > 0:
                return "sliding-window layers: their window counts row entries"
            if (module.xai_temperature_len or 0) > 0:
                return "attention whose temperature counts row entries"
            if module.is_cross_attention:
                return "cross-attention layers"
    return None


def _uniform_layers(scheduler: Any) -> str | None:
    from sglang.srt.layers.radix_attention import RadixAttention

    if _pool(scheduler) is not None:
        return None
    runner = scheduler.tp_worker.model_runner
    layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
    shapes = {(m.tp_q_head_num, m.tp_k_head_num, m.head_dim, m.scaling) for m in layers}
    found = len(layers), runner.token_to_kv_pool.layer_num, len(shapes)
    if found[0] == found[1] and found[2] == 1:
        return None
    return f"{found[0]} attention layers of {found[2]} shapes over {found[1]} cached layers"


def _graphs(scheduler: Any) -> str | None:
    runner = scheduler.tp_worker.model_runner
    eager = (None, runner.eager_runner)
    captured = runner.decode_cuda_graph_runner is not None
    captured |= runner.prefill_cuda_graph_runner not in eager
    if not captured or model_side_of(runner) is not None:
        return None
    return (
        "CUDA graphs were captured without recording, because nothing was asked for at the start "
        "(any sgl_skipkv flag asks, such as --kv-policy skipkv; or capture none: "
        "--cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled)"
    )


@dataclass(frozen=True)
class Setting:
    """A check on one resolved setting, named as SGLang's runtime context names it."""

    path: str
    off: tuple[object, ...]
    reason: str

    def __call__(self, scheduler: Any) -> str | None:
        from sglang.srt import runtime_context

        bag, *names = self.path.split(".")
        value = getattr(runtime_context, f"get_{bag}")()
        for name in names:
            value = getattr(value, name)
        return None if value in self.off else f"{self.reason} ({names[-1]}={value})"


def _on(attribute: str, reason: str) -> Check:
    """A check on one truth value of the scheduler."""

    def check(scheduler: Any) -> str | None:
        return reason if getattr(scheduler, attribute) else None

    return check


_OFF: tuple[object, ...] = (False, None, 0)

CAPABILITIES: tuple[Capability, ...] = (
    Capability("radix cache", "yes", "prompts stay in the tree; compacted rows are never filed"),
    Capability("overlap scheduler", "yes", "only token ids are futures; lengths are known"),
    Capability("chunked prefill", "yes", "nothing is evicted before the first decode step"),
    Capability("attention backend", "yes", f"{', '.join(BACKENDS)} read the page table", _backend),
    Capability("ROCm", "no", "untested: unavailable", _rocm),
    Capability("page size > 1", "no", "a page is freed whole, with its live tokens", _page_size),
    Capability("allocator", "yes", "TokenToKVPoolAllocator only", _allocator),
    Capability("MLA", "no", "one latent per token; no keys per head to score", _pool),
    Capability(
        "quantised KV", "yes", "fp8_e4m3 and fp8_e5m2, by their layer's scale", _quantised_kv
    ),
    Capability("sliding window", "no", "the window counts row entries", _sliding_window),
    Capability("layers of different shapes", "no", "one ring holds all queries", _uniform_layers),
    Capability(
        "hybrid / mamba",
        "no",
        "state is tied to the number of tokens",
        _on("is_hybrid_ssm", "hybrid state-space layers"),
    ),
    Capability(
        "CUDA graphs",
        "yes",
        "recording and steering are captured where the server was asked at its start",
        _graphs,
    ),
    Capability(
        "torch.compile",
        "no",
        "it would trace through the recording",
        Setting("exec.graph.enable_torch_compile", _OFF, "torch.compile"),
    ),
    Capability(
        "megakernel",
        "no",
        "a step does not pass SGLang's attention layers",
        Setting("exec.kernel.enable_nvidia_megakernel", _OFF, "--enable-nvidia-megakernel"),
    ),
    Capability(
        "speculative decoding",
        "no",
        "lengths come back from the device",
        lambda s: None if s.spec_algorithm.is_none() else "speculative decoding",
    ),
    Capability(
        "mixed chunk",
        "no",
        "decode rows get positions from row lengths",
        _on("is_mixed_chunk", "mixed chunked prefill (--enable-mixed-chunk)"),
    ),
    Capability(
        "tensor parallel",
        "no",
        "scores of the ranks are not reduced, in this version",
        Setting("parallel.tp_size", (1,), "tensor parallelism"),
    ),
    Capability(
        "pipeline parallel",
        "no",
        "scores would need every stage",
        Setting("parallel.pp_size", (1,), "pipeline parallelism"),
    ),
    Capability(
        "data parallel",
        "no",
        "the controller drops the schedulers' report",
        Setting("parallel.dp_size", (1,), "data parallelism"),
    ),
    Capability(
        "DP attention",
        "no",
        "decode batches are turned into extend batches",
        _on("attn_dp_enabled", "DP attention"),
    ),
    Capability(
        "context parallel",
        "no",
        "keys of one request lie on several ranks",
        Setting("parallel.attn_cp_size", (1,), "context parallelism"),
    ),
    Capability(
        "two-batch overlap",
        "no",
        "a batch is split after positions are set",
        Setting("exec.overlap.enable_two_batch_overlap", _OFF, "two-batch overlap"),
    ),
    Capability(
        "PD disaggregation",
        "no",
        "rows are copied by logical length",
        Setting("disagg.disaggregation_mode", ("null",), "PD disaggregation"),
    ),
    Capability(
        "PD multiplexing",
        "no",
        "a prefill is split, and steps run between its parts",
        Setting("disagg.enable_pdmux", _OFF, "PD multiplexing"),
    ),
    Capability(
        "HiCache",
        "no",
        "rows are written through by logical length",
        _on("enable_hierarchical_cache", "HiCache (--enable-hierarchical-cache)"),
    ),
    Capability(
        "LMCache",
        "no",
        "rows are stored by logical length",
        _on("enable_lmcache", "LMCache (--enable-lmcache)"),
    ),
    Capability(
        "FlexKV",
        "no",
        "rows are stored by logical length",
        Setting("memory.enable_flexkv", _OFF, "FlexKV"),
    ),
    Capability(
        "unified cache linker",
        "no",
        "rows are stored by logical length",
        Setting(
            "memory.enable_unified_cache_external_linker",
            _OFF,
            "--enable-unified-cache-external-linker",
        ),
    ),
    Capability(
        "other radix backends",
        "no",
        "only SGLang's default cache is known to respect row limits",
        Setting("memory.radix_cache_backend", (None,), "--radix-cache-backend"),
    ),
    Capability(
        "hisparse",
        "no",
        "slots go through a mapping of its own",
        _on("enable_hisparse", "hisparse (--enable-hisparse)"),
    ),
    Capability(
        "unified memory",
        "no",
        "slots are virtual and move",
        _on("enable_unified_memory", "unified memory (--enable-unified-memory)"),
    ),
    Capability(
        "streaming sessions",
        "no",
        "the next turn reuses the row as a token prefix",
        Setting("serving.enable_streaming_session", _OFF, "streaming sessions"),
    ),
    Capability(
        "session radix cache",
        "no",
        "the next turn reuses the row as a token prefix",
        _on("enable_session_radix_cache", "session radix cache"),
    ),
    Capability(
        "strip thinking cache",
        "no",
        "it counts owned KV by tokens",
        Setting("serving.strip_thinking_cache", _OFF, "--strip-thinking-cache"),
    ),
    Capability(
        "kv canary",
        "no",
        "it expects token i in row entry i",
        Setting("observability.kv_canary", ("none", None), "kv canary"),
    ),
    Capability(
        "diffusion LLM",
        "no",
        "blocks are rewritten in place",
        lambda s: None if s.dllm_config is None else "diffusion LLM",
    ),
    Capability(
        "multimodal rotary positions",
        "no",
        "positions have three axes",
        lambda s: "mrope model" if s.model_config.model_is_mrope else None,
    ),
    Capability(
        "encoder-decoder",
        "no",
        "rows begin with encoder tokens",
        lambda s: "encoder-decoder model" if s.model_config.is_encoder_decoder else None,
    ),
    Capability(
        "embedding models",
        "no",
        "nothing is generated",
        lambda s: None if s.is_generation else "not a generation model",
    ),
    Capability(
        "no tokenizer",
        "no",
        "sentence delimiters are compiled from it",
        lambda s: "--skip-tokenizer-init" if s.tokenizer is None else None,
    ),
    Capability(
        "several tokenizer workers",
        "no",
        "they do not hear the schedulers' report",
        Setting("serving.tokenizer_worker_num", (1,), "--tokenizer-worker-num"),
    ),
    Capability(
        "Rust server",
        "no",
        "requests do not pass SGLang's Python tokenizer manager",
        lambda s: "the Rust server" if s.rust_server is not None else None,
    ),
    Capability("beam search", "per request", "members share rows; 400 together with kv_budget"),
    Capability(
        "sessions",
        "per request",
        "with session_params the next turn reuses the row; 400 together with kv_budget",
    ),
    Capability("steering", "yes", "Llama, Qwen2 and Qwen3 types; checked when a vector is loaded"),
    Capability("n > 1 samples", "yes", "each sample has its own budget and its own row"),
    Capability("grammars, stop strings, penalties", "yes", "they see tokens, not the KV cache"),
    Capability("LoRA", "yes", "keys are scored as cached"),
    Capability("head sizes", "yes", "16, 32, ... 256 by Triton kernels on a GPU, others in torch"),
)


def missing_capabilities(scheduler: Any, *, settings_only: bool = False) -> list[str]:
    """Every reason why this scheduler cannot evict.

    Args:
        settings_only: look at settings alone; pools and graphs need not exist yet.
    """
    reasons: list[str] = []
    for capability in CAPABILITIES:
        check = capability.check
        if check is None or (settings_only and not isinstance(check, Setting)):
            continue
        reason = check(scheduler)
        if reason is not None:
            reasons.append(reason)
    return reasons


def platform_name() -> str:
    """SGLang's platform object and its device, in words."""
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__name__} ({current_platform.device_name})"
