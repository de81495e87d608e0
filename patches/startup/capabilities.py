"""The capability matrix: the features of SGLang 0.5.23 that eviction works with.

A row's ``check`` looks at the resolved runtime (pool class, allocator, layers), because SGLang
resolves, defaults and overrides flags. Rows marked "per request" are refused at each request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch

from sgl_skipkv.kernels.on_device import KEY_NAMES
from sgl_skipkv.patches.engine.families import STEERED_TYPES
from sgl_skipkv.patches.engine.model_side import attention_layers, model_side_of
from sgl_skipkv.patches.startup.flags import config_of

Check = Callable[[Any], str | None]
BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "trtllm_mha")
PAGE_SIZES = (1, 16, 32, 64)


@dataclass(frozen=True)
class Capability:
    """One row: a feature of the server, whether eviction works with it, and why."""

    name: str
    supported: Literal["yes", "no", "per request"]
    why: str
    check: Check | None = None


def _backend(scheduler: Any) -> str | None:
    runner = scheduler.tp_worker.model_runner
    used = {runner.prefill_attention_backend_str, runner.decode_attention_backend_str}
    other = sorted(str(name) for name in used if name not in BACKENDS)
    if not other:
        return None
    return f"attention backend {', '.join(other)} (supported: {', '.join(BACKENDS)})"


def _rocm(scheduler: Any) -> str | None:
    version = torch.version.hip
    return None if version is None else f"ROCm {version}: untested"


def _page_size(scheduler: Any) -> str | None:
    if scheduler.page_size in PAGE_SIZES:
        return None
    return f"page size {scheduler.page_size} (supported: {', '.join(map(str, PAGE_SIZES))})"


def _allocator(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    allocator = scheduler.token_to_kv_pool_allocator
    expected = TokenToKVPoolAllocator if scheduler.page_size == 1 else PagedTokenToKVPoolAllocator
    if type(allocator) is not expected:
        return f"allocator {type(allocator).__name__} (supported: {expected.__name__})"
    if allocator.page_size != scheduler.page_size:
        return f"pages of {allocator.page_size} in memory and of {scheduler.page_size} in the tree"
    return None


def _pool(scheduler: Any) -> str | None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if type(pool) is not MHATokenToKVPool:
        return f"KV pool {type(pool).__name__} (supported: MHATokenToKVPool)"
    return None if pool.kv_cache_layout == "nhd" else f"KV layout {pool.kv_cache_layout}"


def _quantised_kv(scheduler: Any) -> str | None:
    if _pool(scheduler) is not None:
        return None  # the row of ``_pool`` reports it; other pools have other attributes
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    if pool.dtype in KEY_NAMES and not pool.is_quantized_kv_cache:
        return None
    return f"KV cache dtype {pool.dtype}: block-scaled values"


def _sliding_window(scheduler: Any) -> str | None:
    if scheduler.is_hybrid_swa:
        return "hybrid sliding-window attention"
    runner = scheduler.tp_worker.model_runner
    if runner.attention_chunk_size is not None:
        return "chunked attention: its chunks count row entries"
    for layer in attention_layers(runner.model):
        if layer.sliding_window_size > 0:
            return "sliding-window layers: their window counts row entries"
        if (layer.xai_temperature_len or 0) > 0:
            return "attention whose temperature counts row entries"
        if layer.is_cross_attention:
            return "cross-attention layers"
    return None


def _uniform_layers(scheduler: Any) -> str | None:
    if _pool(scheduler) is not None:
        return None
    runner = scheduler.tp_worker.model_runner
    layers = attention_layers(runner.model)
    shapes = {(m.tp_q_head_num, m.tp_k_head_num, m.head_dim, m.scaling) for m in layers}
    cached_layers = runner.token_to_kv_pool.layer_num
    if len(layers) == cached_layers and len(shapes) == 1:
        return None
    return f"{len(layers)} attention layers of {len(shapes)} shapes over {cached_layers} cached"


def _graphs(scheduler: Any) -> str | None:
    runner = scheduler.tp_worker.model_runner
    eager = (None, runner.eager_runner)
    captured = runner.decode_cuda_graph_runner is not None
    captured |= runner.prefill_cuda_graph_runner not in eager
    if not captured or model_side_of(runner) is not None:
        return None
    return (
        "CUDA graphs were captured without recording, because eviction was not enabled at start "
        "(any sgl_skipkv flag enables it, such as --kv-policy skipkv; or capture no graphs: "
        "--cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled)"
    )


def _tensor_parallel(scheduler: Any) -> str | None:
    from sglang.srt.runtime_context import get_parallel

    size = get_parallel().tp_size
    if size == 1 or config_of(scheduler.server_args).enabled:
        return None
    return (
        f"tensor parallel (tp_size={size}), whose memory is taken at start, where eviction was not "
        "enabled (any sgl_skipkv flag enables it, such as --kv-policy skipkv)"
    )


@dataclass(frozen=True)
class Setting:
    """A check on one resolved setting: its path in SGLang's runtime context, and its off values."""

    path: str
    off: tuple[object, ...]
    reason: str

    def __call__(self, scheduler: Any) -> str | None:
        from sglang.srt import runtime_context

        bag, _, path = self.path.partition(".")
        value = attrgetter(path)(getattr(runtime_context, f"get_{bag}")())
        name = path.rpartition(".")[2]
        return None if value in self.off else f"{self.reason} ({name}={value})"


@dataclass(frozen=True)
class Switch:
    """A check on one attribute of the scheduler that must be false or None."""

    attribute: str
    reason: str

    def __call__(self, scheduler: Any) -> str | None:
        is_on = attrgetter(self.attribute)(scheduler)
        return f"{self.reason} ({self.attribute})" if is_on else None


_OFF = (False, None, 0, "none", "null")
_REUSED = "the next turn reuses the row as a token prefix"
_STORED = "rows are stored by logical length"
Rows = tuple[tuple[str, str, str], ...]

#: name, why, path: settings that must be off
_SETTINGS: Rows = (
    ("torch.compile", "it would trace the recording", "exec.graph.enable_torch_compile"),
    (
        "megakernel",
        "a decode step bypasses SGLang's attention layers",
        "exec.kernel.enable_nvidia_megakernel",
    ),
    (
        "two-batch overlap",
        "a batch is split after positions are set",
        "exec.overlap.enable_two_batch_overlap",
    ),
    ("PD disaggregation", "rows are copied by logical length", "disagg.disaggregation_mode"),
    ("PD multiplexing", "decode steps run inside a prefill", "disagg.enable_pdmux"),
    ("FlexKV", _STORED, "memory.enable_flexkv"),
    ("unified cache linker", _STORED, "memory.enable_unified_cache_external_linker"),
    (
        "other radix backends",
        "only the default cache is known to respect insert limits",
        "memory.radix_cache_backend",
    ),
    ("streaming sessions", _REUSED, "serving.enable_streaming_session"),
    ("kv canary", "it expects token i in row entry i", "observability.kv_canary"),
    ("DP attention", "decode batches become extend batches", "parallel.attn_dp_enabled"),
)
#: name, why, path: settings that must be 1
_COUNTS: Rows = (
    ("pipeline parallel", "scores need the layers of every stage", "parallel.pp_size"),
    ("expert parallel", "untested: on a CPU SGLang itself fails", "parallel.ep_size"),
    ("context parallel", "a request's keys lie on several ranks", "parallel.attn_cp_size"),
    (
        "several tokenizer workers",
        "workers do not receive the schedulers' report",
        "serving.tokenizer_worker_num",
    ),
)
#: name, why, attribute of the scheduler
_SWITCHES: Rows = (
    ("hybrid / mamba", "state is tied to the number of tokens", "is_hybrid_ssm"),
    ("mixed chunk", "positions of decode rows come from row lengths", "is_mixed_chunk"),
    ("HiCache", "rows are written through by logical length", "enable_hierarchical_cache"),
    ("LMCache", _STORED, "enable_lmcache"),
    ("hisparse", "slots go through another mapping", "enable_hisparse"),
    ("unified memory", "slots are virtual and can move", "enable_unified_memory"),
    ("session radix cache", _REUSED, "enable_session_radix_cache"),
    ("diffusion LLM", "blocks are rewritten in place", "dllm_config"),
    ("multimodal rotary positions", "positions have three axes", "model_config.model_is_mrope"),
    ("encoder-decoder", "rows begin with encoder tokens", "model_config.is_encoder_decoder"),
    ("Rust server", "requests bypass SGLang's Python tokenizer manager", "rust_server"),
)
#: name, why, check
_OTHERS: tuple[tuple[str, str, Check], ...] = (
    ("ROCm", "untested: unavailable", _rocm),
    ("MLA", "one latent vector per token; no keys per head to score", _pool),
    ("sliding window", "the window counts row entries", _sliding_window),
    ("layers of different shapes", "one ring holds all queries", _uniform_layers),
    (
        "speculative decoding",
        "lengths are only known on the device",
        lambda s: None if s.spec_algorithm.is_none() else "speculative decoding",
    ),
    (
        "embedding models",
        "nothing is generated",
        lambda s: None if s.is_generation else "not a generation model",
    ),
    (
        "no tokenizer",
        "sentence delimiters are compiled from it",
        lambda s: "--skip-tokenizer-init" if s.tokenizer is None else None,
    ),
)

CAPABILITIES: tuple[Capability, ...] = (
    Capability("radix cache", "yes", "prompts stay in the tree; compacted rows are never inserted"),
    Capability("overlap scheduler", "yes", "only token ids are futures; all lengths are known"),
    Capability("chunked prefill", "yes", "nothing is evicted before the first decode step"),
    Capability("attention backend", "yes", f"{', '.join(BACKENDS)} read the page table", _backend),
    Capability(
        "page size",
        "yes",
        f"{', '.join(map(str, PAGE_SIZES))}; above 1 a compaction moves KV",
        _page_size,
    ),
    Capability(
        "allocator", "yes", "TokenToKVPoolAllocator and PagedTokenToKVPoolAllocator", _allocator
    ),
    Capability("quantised KV", "yes", "fp8_e4m3, fp8_e5m2, by their layer's scale", _quantised_kv),
    Capability("CUDA graphs", "yes", "they record if eviction is enabled at start", _graphs),
    Capability(
        "tensor parallel",
        "yes",
        "ranks combine their scores if eviction is enabled at start",
        _tensor_parallel,
    ),
    Capability("steering", "yes", f"{STEERED_TYPES}; checked when a vector is loaded"),
    Capability("data parallel", "yes", "each replica has its own pool, settings and trace file"),
    Capability("n > 1 samples", "yes", "each sample has its own budget and its own row"),
    Capability("grammars, stop strings, penalties", "yes", "they see tokens, not the KV cache"),
    Capability("LoRA", "yes", "keys are scored as cached"),
    Capability("head sizes", "yes", "16, 32, ... 256 by Triton kernels on a GPU, others in torch"),
    Capability("beam search", "per request", "beams share rows; 400 together with kv_budget"),
    Capability("sessions", "per request", f"{_REUSED}; 400 together with kv_budget"),
    Capability(
        "triattention, expected",
        "per request",
        "400 where a rotary embedding's turn does not follow from the position",
    ),
    Capability("kv_reuse", "per request", "400 without a radix cache and with --kv-events-config"),
    *(Capability(name, "no", why, Setting(path, _OFF, name)) for name, why, path in _SETTINGS),
    *(Capability(name, "no", why, Setting(path, (1,), name)) for name, why, path in _COUNTS),
    *(Capability(name, "no", why, Switch(attribute, name)) for name, why, attribute in _SWITCHES),
    *(Capability(name, "no", why, check) for name, why, check in _OTHERS),
    # What layers do not tell: ``attention_check`` compares their output in the first prefill.
    Capability("attention sinks", "no", "scores do not count what a sink takes"),
    Capability("rotation inside the attention", "no", "recorded queries are not the keys' own"),
)


def missing_capabilities(scheduler: Any, *, settings_only: bool = False) -> list[str]:
    """Every reason why this scheduler cannot evict; ``settings_only``: as far as is known before
    pools and graphs exist."""
    checks = [row.check for row in CAPABILITIES if row.check is not None]
    if settings_only:
        checks = [check for check in checks if isinstance(check, Setting)]
    return [reason for check in checks if (reason := check(scheduler)) is not None]


#: beside these no request may have kv_reuse
_WITHOUT_REUSE: tuple[Check, ...] = (
    Switch("disable_radix_cache", "kv_reuse without the radix cache, which keeps the KV"),
    Setting(
        "observability.kv_events_config",
        (None, ""),
        "kv_reuse with KV events, which would publish private keys as token ids",
    ),
)


def missing_for_reuse(scheduler: Any) -> list[str]:
    """Every reason why a scheduler that can evict cannot serve requests with ``kv_reuse``."""
    return [reason for check in _WITHOUT_REUSE if (reason := check(scheduler)) is not None]


def platform_name() -> str:
    """SGLang's platform class and device name."""
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__name__} ({current_platform.device_name})"
