"""The capability matrix: the features of SGLang 0.5.23 that eviction works with.

A row's ``check`` looks at the resolved runtime (pool class, allocator, layers), because SGLang
resolves, defaults and overrides flags. Rows marked "per request" are refused at each request; those
marked "not run" should work, by reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sgl_skipkv.patches.engine.tested_models import STEERED_TYPES
from sgl_skipkv.patches.engine.vocabulary import missing_vocabulary
from sgl_skipkv.patches.startup.attention_kinds import (
    counting_attention,
    full_attention,
    logit_cap,
)
from sgl_skipkv.patches.startup.draft_kinds import SPECULATION, reuse_of_pairs, speculation
from sgl_skipkv.patches.startup.pool_kinds import (
    PAGE_SIZES,
    allocator,
    kv_pool,
    latents,
    linear_states,
    page_size,
    prefix_tree,
    quantised_kv,
    uniform_layers,
    window_pool,
)
from sgl_skipkv.patches.startup.setting_kinds import (
    BACKENDS,
    Check,
    Setting,
    SharedGroupSetting,
    Switch,
    backend,
    generated_images,
    hicache_of_decode,
    mrope_on_policy,
    not_enabled,
    results_behind_next_plan,
    rocm,
    tokenizer_workers,
)


@dataclass(frozen=True)
class Capability:
    """One row: a feature of the server, whether eviction works with it, and why."""

    name: str
    supported: Literal["yes", "not run", "per request", "no"]
    why: str
    check: Check | None = None


#: layers with a state instead of KV
STATES = "linear attention, Mamba, short convolutions"
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
    ("ROCm", "untested: unavailable", rocm),
    (
        "consecutive prefills without overlap",
        "with DP attention a request may end between the plan and the launch of its last step",
        results_behind_next_plan,
    ),
    ("chunked attention", "chunks and temperatures count row entries", counting_attention),
    ("full attention", "a window layer does not see what may be evicted", full_attention),
    ("capped attention logits", "scores have no cap", logit_cap),
    ("generated images", "their positions are planned for a whole row", generated_images),
    (
        "mrope with --rl-on-policy-target",
        "SGLang then places images as if they were text",
        mrope_on_policy,
    ),
    ("layers of different shapes", "one ring holds all queries", uniform_layers),
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
    ("HiCache on a decode server", "untested", hicache_of_decode),
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
    Capability("overlap scheduler", "yes", "lengths are known, or those of finished steps are"),
    Capability("chunked prefill", "yes", "nothing is evicted before the first decode step"),
    Capability("mixed chunks", "yes", "what decodes in a prefill is recorded as in a decode step"),
    Capability("attention backend", "yes", f"{', '.join(BACKENDS)} read the page table", backend),
    Capability(
        "page size",
        "yes",
        f"{', '.join(map(str, PAGE_SIZES))}; above 1 a compaction moves KV",
        page_size,
    ),
    Capability(
        "allocator",
        "yes",
        "TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator",
        allocator,
    ),
    Capability("KV pool", "yes", "MHATokenToKVPool, MLATokenToKVPool only", kv_pool),
    Capability(
        "window layers in a pool of their own",
        "yes",
        "not with HiCache, PD disaggregation or a quantised cache",
        window_pool,
    ),
    Capability(
        STATES,
        "yes",
        "attention layers evict, states stay; no backups, no kv_reuse; not with MLA, PD "
        "disaggregation, HiCache, mixed chunks or a quantised cache",
        linear_states,
    ),
    Capability(
        SPECULATION,
        "yes",
        "EAGLE, EAGLE3 (MTP) and STANDALONE, as chains; no steering",
        speculation,
    ),
    Capability("MLA", "yes", "latents by absorbed queries; no float8", latents),
    Capability("sliding window", "yes", "the last tokens are kept, as many as a window holds"),
    Capability(
        "images, videos, audio",
        "yes",
        "part of the prompt; a row that has evicted computes text only",
    ),
    Capability("quantised KV", "yes", "fp8_e4m3, fp8_e5m2, by their layer's scale", quantised_kv),
    Capability("GPU", "yes", "kernels are compiled if eviction is enabled at start", not_enabled),
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
        tokenizer_workers,
    ),
    Capability("n > 1 samples", "yes", "each sample has its own budget and its own row"),
    Capability("grammars, stop strings, penalties", "yes", "they see tokens, not the KV cache"),
    Capability("LoRA", "yes", "a history is its adapter's; the model is measured without one"),
    Capability("quantised weights", "not run", "except int8: what is recorded has the KV's type"),
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
        "400 without a radix cache, with PD disaggregation, EAGLE in pages of several tokens, "
        "--kv-events-config and --hicache-storage-backend; budget where window layers have a pool "
        "of their own",
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
    Switch("is_hybrid_ssm", "kv_reuse with layers that have a state instead of KV: it is not kept"),
    reuse_of_pairs,
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


def no_device() -> str | None:
    """What to do where SGLang finds no accelerator and was given no platform for one; else None."""
    from sglang.srt.platforms import current_platform

    if current_platform.device_name != "unknown":
        return None
    return (
        "SGLang finds no accelerator here, so no server starts. To run it on a CPU set "
        "SGLANG_PLATFORM=skipkv_cpu and give the server --device cpu"
    )


def platform_name() -> str:
    """SGLang's platform class and device name."""
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__name__} ({current_platform.device_name})"
