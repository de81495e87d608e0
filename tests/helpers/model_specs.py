"""The tests' servers of one model family each, or of one kind of its layers, weights and caches."""

from __future__ import annotations

import rank_plants
from server_parts import (
    CHAINS_OF_3,
    CHAINS_OF_4,
    CHECKED,
    CHUNKS_OF_64,
    HICACHE,
    ONE_BATCH,
    PAGES_OF_16,
    REASONER,
    RETRACT_POOL_TOKENS,
    SMALL_POOL,
    STANDALONE,
    STRIPPED,
    WITHOUT_OVERLAP,
    Spec,
    retracting,
    retracts,
)
from tiny_models import ARGUMENTS, DRAFT_MODELS, ENVIRONMENT, STATES_COPIED, TWO_POOLS, WITH_VISION

MODEL_SPECS: dict[str, Spec] = {
    # Interleaved, partial rotation, and norms on what a layer adds to its residual.
    "glm4": Spec(("oracle_families",), "glm4", ONE_BATCH, CHECKED, steering_layer=1),
    # Experts that two ranks share out, and heads too.
    "experts on two ranks": Spec(
        ("oracle_families",),
        "qwen3_moe",
        ("--tp-size", "2", "--ep-size", "2", *ONE_BATCH),
        {**CHECKED, "check_agreement": True},
        {"env": rank_plants.environment("experts-apart")},
        steering_layer=1,
    ),
    # Layers with windows, in pages, retracted now and then; and requests that forget the windows.
    "gemma3": Spec(
        ("oracle_windows",),
        "gemma3",
        (*ONE_BATCH, *PAGES_OF_16),
        CHECKED,
        {"env": {**rank_plants.environment("unprotected"), **retracts(30)}},
    ),
    # The same with attention sinks.
    "gpt_oss": Spec(
        ("oracle_windows",),
        "gpt_oss",
        (*ONE_BATCH, *PAGES_OF_16, *ARGUMENTS["gpt_oss"]),
        CHECKED,
        {
            "env": {
                **ENVIRONMENT["gpt_oss"],
                **rank_plants.environment("unprotected"),
                **retracts(30),
            }
        },
    ),
    # The windows in a small pool of their own, left at every step, and prompts in chunks.
    "gpt_oss, two pools": Spec(
        ("oracle_windows",),
        "gpt_oss",
        (*ONE_BATCH, *CHUNKS_OF_64, *TWO_POOLS, "--swa-full-tokens-ratio", "0.13"),
        CHECKED,
        {
            "env": {
                **ENVIRONMENT["gpt_oss"],
                **retracts(30),
                "SGLANG_SWA_EVICTION_INTERVAL": "1",
            }
        },
    ),
    # The same in pages.
    "gpt_oss, two pools in pages": Spec(
        ("oracle_windows",),
        "gpt_oss",
        (
            *(*ONE_BATCH, *CHUNKS_OF_64, *PAGES_OF_16, *TWO_POOLS),
            *("--swa-full-tokens-ratio", "0.13"),
        ),
        CHECKED,
        {
            "env": {
                **ENVIRONMENT["gpt_oss"],
                **retracts(30),
                "SGLANG_SWA_EVICTION_INTERVAL": "1",
            }
        },
    ),
    # Layers with a state instead of KV. SGLang keeps states where a prompt ends, and then does not
    # overlap steps.
    "lfm2": Spec(
        ("oracle_states",),
        "lfm2",
        (*SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, *ARGUMENTS["lfm2"]),
        CHECKED,
        {"env": {**ENVIRONMENT["lfm2"], **retracts(20)}},
    ),
    # It keeps those that steps have copied, and overlaps them.
    "lfm2, states copied": Spec(
        ("oracle_states",),
        "lfm2",
        (
            *(*SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, *PAGES_OF_16),
            *(*ARGUMENTS["lfm2"], *STATES_COPIED),
        ),
        {**CHECKED, "max_tracked_requests": 12},
        {"env": {**ENVIRONMENT["lfm2"], **retracts(20)}},
    ),
    # The same on two ranks.
    "lfm2 on two ranks": Spec(
        ("oracle_states",),
        "lfm2",
        (
            *("--tp-size", "2", *SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64),
            *(*PAGES_OF_16, *ARGUMENTS["lfm2"], *STATES_COPIED),
        ),
        {**CHECKED, "check_agreement": True},
        {"env": {**ENVIRONMENT["lfm2"], **retracts(20)}},
    ),
    # Linear attention, whose states are copied by default.
    "qwen3_next": Spec(
        ("oracle_states",),
        "qwen3_next",
        (
            *(*SMALL_POOL, *ONE_BATCH, "--chunked-prefill-size", "128"),
            *(*ARGUMENTS["qwen3_next"], "--mamba-track-interval", "64"),
        ),
        CHECKED,
        {"env": {**ENVIRONMENT["qwen3_next"], **retracts(20)}},
    ),
    # A float8 cache, whose bytes move within their pages.
    "float8": Spec(
        ("float8",),
        "llama",
        (
            *("--max-total-tokens", str(RETRACT_POOL_TOKENS), "--kv-cache-dtype", "fp8_e4m3"),
            *PAGES_OF_16,
        ),
        CHECKED,
    ),
    # MLA in pages, retracted now and then.
    "latents": retracting(
        40,
        files=("oracle_latents",),
        model="deepseek_v3",
        more=("--enable-metrics", *ONE_BATCH, *PAGES_OF_16),
        steering_layer=None,
    ),
    # The same on two ranks: each has all latents, and half of the query heads.
    "latents on two ranks": retracting(
        40,
        files=("oracle_latents",),
        model="deepseek_v3",
        more=("--tp-size", "2", "--enable-metrics", *ONE_BATCH, *PAGES_OF_16),
        steering_layer=None,
        check_agreement=True,
    ),
    # Two attention groups of one rank: each has all latents, and all query heads.
    "latents in two groups": retracting(
        40,
        files=("oracle_latents",),
        model="deepseek_v3",
        more=(
            *("--tp-size", "2", "--attn-dp-size", "2", "--enable-metrics"),
            *(*ONE_BATCH, *PAGES_OF_16),
        ),
        steering_layer=None,
    ),
    # Models that read images, in pages, retracted now and then.
    **{
        family: retracting(
            40, files=("oracle_media",), model=family, more=(*ONE_BATCH, *PAGES_OF_16)
        )
        for family in WITH_VISION
    },
    # Adapters in pages, retracted now and then. A batch has room for two: one of the adapters and
    # the model without one, or both adapters.
    "adapters": Spec(
        ("oracle_adapters",),
        "qwen3",
        ("--max-loras-per-batch", "2", *ONE_BATCH, *PAGES_OF_16),
        CHECKED,
        {"env": retracts(40)},
        steering_layer=1,
        adapters=("a", "b"),
    ),
    # Speculative decoding, with overlap, retracted now and then.
    "drafts": Spec(
        ("oracle_drafts",),
        "qwen3",
        (*SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, *STANDALONE),
        CHECKED,
        {"env": retracts(20)},
        draft="alike",
    ),
    # The same in pages, which move in the draft model's pool, too.
    "drafts in pages": Spec(
        ("oracle_drafts",),
        "qwen3",
        (*SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, *STANDALONE, *PAGES_OF_16),
        CHECKED,
        {"env": retracts(20)},
        draft="alike",
    ),
    # The same, one step after the other.
    "drafts, no overlap": Spec(
        ("oracle_drafts",),
        "qwen3",
        (*SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, *STANDALONE, *WITHOUT_OVERLAP),
        CHECKED,
        {"env": retracts(20)},
        draft="alike",
    ),
    # Two levels of the radix cache, and two models' KV in each.
    "hicache with drafts": Spec(
        ("hicache",),
        "qwen3",
        (*HICACHE, *PAGES_OF_16, *CHUNKS_OF_64, *ONE_BATCH, "--enable-cache-report", *STANDALONE),
        CHECKED,
        draft="alike",
    ),
    # The same where the tree names pairs of tokens, written back, retracted now and then.
    "hicache with eagle": Spec(
        ("hicache",),
        "llama",
        (
            *(*HICACHE, "--hicache-write-policy", "write_back", *CHUNKS_OF_64, *ONE_BATCH),
            *("--enable-cache-report", "--speculative-algorithm", "EAGLE", *CHAINS_OF_4),
        ),
        CHECKED,
        {"env": retracts(50)},
        draft="eagle",
    ),
    # The same with a draft model that is the other itself.
    "hicache, drafts mostly right": Spec(
        ("hicache",),
        REASONER,
        (
            *(*HICACHE, *ONE_BATCH, "--enable-cache-report", *STANDALONE),
            *("--speculative-draft-model-path", str(REASONER)),
        ),
        CHECKED,
    ),
    # A draft model that is the other itself, so nearly every draft is right.
    "drafts, mostly right": Spec(
        ("oracle_drafts",),
        REASONER,
        (*ONE_BATCH, *STANDALONE, "--speculative-draft-model-path", str(REASONER)),
        CHECKED,
    ),
    # The same in pages.
    "drafts, mostly right, in pages": Spec(
        ("oracle_drafts",),
        REASONER,
        (
            *(*ONE_BATCH, *STANDALONE, *PAGES_OF_16),
            *("--speculative-draft-model-path", str(REASONER)),
        ),
        CHECKED,
    ),
    # A draft model that continues the hidden states of the other.
    "eagle": Spec(
        ("oracle_drafts",),
        "llama",
        (*SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, "--speculative-algorithm", "EAGLE", *CHAINS_OF_4),
        CHECKED,
        {"env": retracts(20)},
        draft="eagle",
    ),
    # The same on two ranks, in pages, and recomputed.
    "eagle on two ranks": Spec(
        ("oracle_drafts",),
        "llama",
        (
            *("--tp-size", "2", *SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64, *PAGES_OF_16),
            *("--speculative-algorithm", "EAGLE", *CHAINS_OF_4),
        ),
        {**CHECKED, "check_agreement": True, "retraction_backup_bytes": 0},
        {"env": retracts(20)},
        draft="eagle",
    ),
    # Latents, and DeepSeek's layer for several tokens at once, in two attention groups.
    "latents in two groups of two, with drafts": Spec(
        ("oracle_drafts",),
        "deepseek_v3",
        (
            *("--tp-size", "4", "--attn-dp-size", "2", *SMALL_POOL, *ONE_BATCH, *CHUNKS_OF_64),
            *("--speculative-algorithm", "EAGLE", *CHAINS_OF_3),
        ),
        CHECKED,
        {"env": {**DRAFT_MODELS, **retracts(20)}},
        draft="nextn",
    ),
    # A model whose vocabulary has thinking tokens, and whose parser says when thinking is over.
    "thinking": Spec(
        ("oracle_thoughts",),
        "thinking",
        (*CHUNKS_OF_64, *STRIPPED, *PAGES_OF_16),
        CHECKED,
    ),
    # The same, retracted every few steps.
    "thinking, no overlap": retracting(
        7,
        files=("oracle_thoughts",),
        model="thinking",
        more=(*WITHOUT_OVERLAP, *STRIPPED),
        steering_layer=None,
        pool_tokens=16384,
    ),
}
