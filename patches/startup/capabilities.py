"""The capability matrix: the features of SGLang 0.5.23 that eviction works with.

A row's ``check`` looks at the resolved runtime (pool class, allocator, layers), because SGLang
resolves, defaults and overrides flags. Rows marked "per request" are refused at each request; those
marked "not run" should work, by reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch

from sgl_skipkv.kernels.on_device import uses_triton
from sgl_skipkv.patches.engine.pd_roles import is_decode_server
from sgl_skipkv.patches.engine.steered_models import STEERED_TYPES
from sgl_skipkv.patches.engine.vocabulary import missing_vocabulary
from sgl_skipkv.patches.startup.attention_kinds import (
    counting_attention,
    full_attention,
    hybrid_window,
    logit_cap,
)
from sgl_skipkv.patches.startup.flags import config_of
from sgl_skipkv.patches.startup.pool_kinds import (
    PAGE_SIZES,
    allocator,
    kv_pool,
    latents,
    page_size,
    prefix_tree,
    quantised_kv,
    uniform_layers,
)

Check = Callable[[Any], str | None]
BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "trtllm_mha")


@dataclass(frozen=True)
class Capability:
    """One row: a feature of the server, whether eviction works with it, and why."""

    name: str
    supported: Literal["yes", "not run", "per request", "no"]
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


def generates_images(hf_config: Any) -> bool:
    return bool(hf_config.model_type == "glm_image")


def _generated_images(scheduler: Any) -> str | None:
    hf_config = scheduler.model_config.hf_config
    named = f"generated images (model_type={hf_config.model_type})"
    return named if generates_images(hf_config) else None


def _mrope_on_policy(scheduler: Any) -> str | None:
    from sglang.srt.runtime_context import get_exec

    on_policy = get_exec().deterministic.rl_on_policy_target is not None
    both = on_policy and scheduler.model_config.model_is_mrope
    return "mrope with --rl-on-policy-target" if both else None


def _results_behind_next_plan(scheduler: Any) -> str | None:
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    late = envs.SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP.get() and get_parallel().attn_dp_enabled
    return "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP with DP attention" if late else None


def _not_enabled(scheduler: Any) -> str | None:
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


def _tokenizer_workers(scheduler: Any) -> str | None:
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


def _second_level_of_decode(scheduler: Any) -> str | None:
    return (
        "HiCache on a decode server"
        if is_decode_server() and scheduler.enable_hierarchical_cache
        else None
    )


_OFF = (False, None, 0, "none", "null")
_REUSED = "the next turn reuses the row as a token prefix"
_STORED = "rows are stored by logical length"
_CAPTURED = "captures are kept by slot, and a restored or copied row has slots without"
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
    ("PD multiplexing", "decode steps run inside a prefill", "disagg.enable_pdmux"),
    ("FlexKV", _STORED, "memory.enable_flexkv"),
    ("unified cache linker", _STORED, "memory.enable_unified_cache_external_linker"),
    (
        "other radix backends",
        "only the default cache is known to respect insert limits",
        "memory.radix_cache_backend",
    ),
    ("streaming sessions", _REUSED, "serving.enable_streaming_session"),
    (
        "watermarks",
        "the text before a token is looked up by its row entry",
        "exec.features.enable_watermark",
    ),
    ("captures of experts", _CAPTURED, "exec.features.enable_return_routed_experts"),
    ("captures of an indexer", _CAPTURED, "exec.features.enable_return_indexer_topk"),
    ("kv canary", "it expects token i in row entry i", "observability.kv_canary"),
    (
        "local control broadcast",
        "with DP attention ranks would learn of new weights at different steps",
        "parallel.enable_dp_attention_local_control_broadcast",
    ),
    (
        "expert parallel with all-to-all",
        "untested: a step's tokens lie on several ranks",
        "exec.moe.moe_a2a_backend",
    ),
    ("expert rebalancing", "untested: weights move while requests run", "exec.moe.enable_eplb"),
    ("elastic expert parallel", "ranks come and go", "exec.moe.elastic_ep_backend"),
    (
        "layernorm sequence parallel",
        "the hidden states of a prefill lie on several ranks",
        "parallel.enable_layernorm_sp",
    ),
)
#: name, why, path: settings that must be 1
_COUNTS: Rows = (
    ("pipeline parallel", "scores need the layers of every stage", "parallel.pp_size"),
    ("context parallel", "a request's keys lie on several ranks", "parallel.attn_cp_size"),
    ("decode context parallel", "a request's keys lie on several ranks", "parallel.dcp_size"),
)
#: name, why, attribute of the scheduler
_SWITCHES: Rows = (
    ("hybrid / mamba", "state is tied to the number of tokens", "is_hybrid_ssm"),
    ("LMCache", _STORED, "enable_lmcache"),
    ("hisparse", "slots go through another mapping", "enable_hisparse"),
    ("unified memory", "slots are virtual and can move", "enable_unified_memory"),
    ("session radix cache", _REUSED, "enable_session_radix_cache"),
    ("diffusion LLM", "blocks are rewritten in place", "dllm_config"),
    (
        "routers by modality",
        "the modality of a token is looked up by its row entry",
        "model_config.requires_mm_token_modalities",
    ),
    (
        "n-gram embeddings",
        "the tokens before a token are looked up by its row entry",
        "model_config.use_ngram_embedding",
    ),
    (
        "engram layers",
        "the tokens before a token are looked up by its row entry",
        "model_config.use_engram",
    ),
    ("encoder-decoder", "rows begin with encoder tokens", "model_config.is_encoder_decoder"),
    ("Rust server", "requests bypass SGLang's Python tokenizer manager", "rust_server"),
)
#: name, why, check
_OTHERS: tuple[tuple[str, str, Check], ...] = (
    (
        "dense layers of one rank",
        "between layers a step's tokens lie on several ranks",
        SharedGroupSetting("parallel.moe_dense_tp_size", (None,), "dense layers of one rank"),
    ),
    ("ROCm", "untested: unavailable", _rocm),
    (
        "consecutive prefills without overlap",
        "with DP attention a request may end between the plan and the launch of its last step",
        _results_behind_next_plan,
    ),
    (
        "hybrid sliding window",
        "its pool frees by logical length; --disable-hybrid-swa-memory helps",
        hybrid_window,
    ),
    ("chunked attention", "chunks and temperatures count row entries", counting_attention),
    ("full attention", "a window layer does not see what may be evicted", full_attention),
    ("capped attention logits", "scores have no cap", logit_cap),
    ("generated images", "their positions are planned for a whole row", _generated_images),
    (
        "mrope with --rl-on-policy-target",
        "SGLang then places images as if they were text",
        _mrope_on_policy,
    ),
    ("layers of different shapes", "one ring holds all queries", uniform_layers),
    (
        "speculative decoding",
        "lengths are only known on the device",
        lambda s: None if s.spec_algorithm.is_none() else "speculative decoding",
    ),
    (
        "role switches",
        "a prefill server has no buffers for recording",
        Setting("disagg.enable_pd_role_switch", _OFF, "role switches of PD disaggregation"),
    ),
    (
        "KV offload of a decode server",
        _STORED,
        Setting(
            "disagg.disaggregation_decode_enable_offload_kvcache",
            _OFF,
            "KV offload of a decode server",
        ),
    ),
    (
        "prompts received in host memory",
        "untested",
        Setting(
            "disagg.disaggregation_decode_host_receive_threshold",
            (1,),
            "prompts received in host memory",
        ),
    ),
    ("HiCache on a decode server", "untested", _second_level_of_decode),
    (
        "embedding models",
        "nothing is generated",
        lambda s: None if s.is_generation else "not a generation model",
    ),
)

CAPABILITIES: tuple[Capability, ...] = (
    Capability(
        "radix cache",
        "yes",
        "prompts stay in the tree; compacted rows are never inserted",
        prefix_tree,
    ),
    Capability("HiCache", "yes", "it copies nodes of the radix tree; histories are some"),
    Capability("overlap scheduler", "yes", "only token ids are futures; all lengths are known"),
    Capability("chunked prefill", "yes", "nothing is evicted before the first decode step"),
    Capability("mixed chunks", "yes", "what decodes in a prefill is recorded as in a decode step"),
    Capability("attention backend", "yes", f"{', '.join(BACKENDS)} read the page table", _backend),
    Capability(
        "page size",
        "yes",
        f"{', '.join(map(str, PAGE_SIZES))}; above 1 a compaction moves KV",
        page_size,
    ),
    Capability(
        "allocator", "yes", "TokenToKVPoolAllocator and PagedTokenToKVPoolAllocator", allocator
    ),
    Capability("KV pool", "yes", "MHATokenToKVPool, MLATokenToKVPool only", kv_pool),
    Capability("MLA", "yes", "latents by absorbed queries; no float8", latents),
    Capability("sliding window", "yes", "the last tokens are kept, as many as a window holds"),
    Capability(
        "images, videos, audio",
        "yes",
        "part of the prompt; a row that has evicted computes text only",
    ),
    Capability("quantised KV", "yes", "fp8_e4m3, fp8_e5m2, by their layer's scale", quantised_kv),
    Capability("GPU", "yes", "kernels are compiled if eviction is enabled at start", _not_enabled),
    Capability("CUDA graphs", "yes", "they record if eviction is enabled at start"),
    Capability(
        "tensor parallel", "yes", "ranks combine their scores if eviction is enabled at start"
    ),
    Capability(
        "--skip-tokenizer-init",
        "yes",
        "sentence ends come from a tokenizer that the plugin loads itself",
        missing_vocabulary,
    ),
    Capability("expert parallel", "yes", "every rank has the whole attention of its heads"),
    Capability("DP attention", "yes", "each attention group has its own pool and trace file"),
    Capability("PD disaggregation", "yes", "the decode server evicts; the prompt must be kept"),
    Capability("steering", "yes", f"{STEERED_TYPES}; checked when a vector is loaded"),
    Capability("data parallel", "yes", "each replica has its own pool, settings and trace file"),
    Capability(
        "several tokenizer workers",
        "yes",
        "each is told the schedulers' state; needs SGLang 0.5.23",
        _tokenizer_workers,
    ),
    Capability("n > 1 samples", "yes", "each sample has its own budget and its own row"),
    Capability("grammars, stop strings, penalties", "yes", "they see tokens, not the KV cache"),
    Capability("LoRA", "not run", "keys are scored as cached; it does not start on a CPU"),
    Capability("quantised weights", "not run", "what is recorded has the type of the KV cache"),
    Capability("head sizes", "yes", "16, 32, ... 256 by Triton kernels on a GPU, others in torch"),
    Capability("beam search", "per request", "beams share rows; 400 together with kv_budget"),
    Capability("sessions", "per request", f"{_REUSED}; 400 together with kv_budget"),
    Capability(
        "triattention, expected",
        "per request",
        "400 with MLA, and where a rotary embedding's turn does not follow from the position",
    ),
    Capability(
        "kv_reuse",
        "per request",
        "400 without a radix cache, with PD disaggregation, --kv-events-config and "
        "--hicache-storage-backend",
    ),
    *(Capability(name, "no", why, Setting(path, _OFF, name)) for name, why, path in _SETTINGS),
    *(Capability(name, "no", why, Setting(path, (1,), name)) for name, why, path in _COUNTS),
    *(Capability(name, "no", why, Switch(attribute, name)) for name, why, attribute in _SWITCHES),
    *(Capability(name, "no", why, check) for name, why, check in _OTHERS),
    Capability("sparse attention", "no", "which tokens are attended to depends on row entries"),
    # What layers do not tell: ``attention_check`` compares their output in the first prefill.
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
        "disagg.disaggregation_mode",
        _OFF,
        "kv_reuse with PD disaggregation, where the prefill server does not have the kept KV",
    ),
    Setting(
        "observability.kv_events_config",
        (None, ""),
        "kv_reuse with KV events, which would publish private keys as token ids",
    ),
    Setting(
        "memory.hicache_storage_backend",
        (None,),
        "kv_reuse with a HiCache storage, which would take private keys for token ids",
    ),
)


def missing_for_reuse(scheduler: Any) -> list[str]:
    """Every reason why a scheduler that can evict cannot serve requests with ``kv_reuse``."""
    return [reason for check in _WITHOUT_REUSE if (reason := check(scheduler)) is not None]


def platform_name() -> str:
    """SGLang's platform class and device name."""
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__name__} ({current_platform.device_name})"
