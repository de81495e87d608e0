"""Every server that the tests use, and which files share it.

Files that share one are for the same worker, where several share the tests.
"""

from __future__ import annotations

import rank_plants
from model_specs import MODEL_SPECS
from server_parts import (
    CHAINS_OF_3,
    CHAINS_OF_4,
    CHECKED,
    CHUNKS_OF_64,
    CROWD_POOL_TOKENS,
    DEFAULTS_BY_FLAG,
    HICACHE,
    ONE_BATCH,
    PAGES_OF_16,
    PAGES_OF_32,
    REASONER,
    UNSUPPORTED,
    WANDERER,
    WITHOUT_OVERLAP,
    WITHOUT_REUSE,
    Spec,
    retracting,
    retracts,
)
from tiny_models import DRAFT_MODELS

SPECS: dict[str, Spec] = {
    **MODEL_SPECS,
    # Plugin and vector loaded, nothing by default, overlap on, strict checks on: the session's
    # server.
    "main": Spec(
        (
            *("bad_input", "capacity", "hostile_bodies", "inert", "isolation", "life", "oracle"),
            *("other_apis", "privacy", "entry_points", "oracle_reuse", "metadata"),
            *("smoke", "metrics"),
        ),
        "qwen2",
        (*CHUNKS_OF_64, *ONE_BATCH, "--enable-metrics"),
        steering_layer=1,
    ),
    # The bundled model.
    "reasoner": Spec(
        ("accuracy", "commands", "conversations", "reasoner", "replicas", "serving", "tuning"),
        REASONER,
        ("--max-total-tokens", "40960", *ONE_BATCH),
    ),
    # As most people start one, without a flag of this package: buffers come with the first request.
    "no flags": Spec(("states",), "qwen2", options={"trace": False}),
    # Token ids in and out, as frameworks for reinforcement learning start one.
    "no tokenizer": Spec(
        ("states",),
        "qwen2",
        ("--skip-tokenizer-init", "--kv-budget", "48", "--skipkv-explorer"),
        {"kv_params": {"interval": 16}},
    ),
    # Two replicas with a default budget. They may share the one core of a small machine.
    "replicas": Spec(
        ("replicas",),
        REASONER,
        (
            *("--dp-size", "2", "--enable-metrics", "--skipkv-explorer"),
            *("--kv-budget", "64", "--kv-policy", "streaming", "--kv-interval", "8"),
        ),
    ),
    # The model with optional checks, and its own vector.
    "wanderer": Spec(
        ("commands", "reasoner"),
        WANDERER,
        (
            *("--max-total-tokens", "40960", *ONE_BATCH),
            *("--steering-vector", str(WANDERER / "steering.safetensors")),
        ),
    ),
    # As `skipkv steering extract` starts it. It serves budgets and no kv_reuse: nobody asked.
    "extracting": Spec(
        ("extract", "states"),
        REASONER,
        (*WITHOUT_REUSE, *CHUNKS_OF_64),
        {"steering_capture": "captured", "delimiters": "math"},
        {"trace": False},
    ),
    # As main, and SGLang never loads the plugin.
    "plain": Spec(("inert",), "qwen2", (*CHUNKS_OF_64, *ONE_BATCH), options={"plugin": False}),
    # Pages of 16: what it keeps is what main keeps.
    "qwen2, no overlap": Spec(
        ("oracle", "oracle_reuse", "oracle_steering"),
        "qwen2",
        (*CHUNKS_OF_64, *WITHOUT_OVERLAP, *PAGES_OF_16),
        steering_layer=2,
    ),
    "llama": Spec(
        ("oracle", "oracle_reuse", "oracle_steering"), "llama", CHUNKS_OF_64, steering_layer=0
    ),
    # Every default by flag; requests that bring their own keys must not notice.
    "qwen3, no overlap": Spec(
        ("oracle", "oracle_reuse", "oracle_steering"),
        "qwen3",
        (*CHUNKS_OF_64, *WITHOUT_OVERLAP, *DEFAULTS_BY_FLAG, *PAGES_OF_32),
        {"poison_evicted": True},
        steering_layer=1,
    ),
    # Two attention groups of two ranks, the last one of each with faults that requests ask for, and
    # a retraction now and then.
    "groups of two ranks": Spec(
        ("dp_attention",),
        "for_four_ranks",
        ("--tp-size", "4", "--attn-dp-size", "2", *ONE_BATCH, *PAGES_OF_16),
        {**CHECKED, "check_agreement": True},
        {"env": {**rank_plants.environment("faults"), **retracts(30)}},
        steering_layer=1,
    ),
    "recomputing": retracting(200, retraction_backup_bytes=0),  # nothing is backed up
    "restoring": retracting(3, more=PAGES_OF_16),
    # Two ranks, the last one with faults that requests ask for, and a retraction now and then.
    "ranks": Spec(
        ("tensor_parallel",),
        "llama",
        ("--tp-size", "2", *ONE_BATCH, *PAGES_OF_16),
        {**CHECKED, "check_agreement": True},
        {"env": {**rank_plants.environment("faults"), **retracts(30)}},
        steering_layer=1,
    ),
    # Decode steps in the prefills of others, retracted now and then.
    "mixed chunks": retracting(
        5, files=("mixed_chunks",), chunk=64, more=("--enable-mixed-chunk", *ONE_BATCH)
    ),
    "mixed chunks, no overlap": retracting(
        5,
        files=("mixed_chunks",),
        model="qwen2",
        chunk=64,
        more=("--enable-mixed-chunk", *ONE_BATCH, *WITHOUT_OVERLAP, *PAGES_OF_16),
    ),
    # A second level of the radix cache, and a first one that has room for few conversations.
    "hicache": Spec(
        ("hicache",),
        "qwen2",
        (*HICACHE, *PAGES_OF_16, *CHUNKS_OF_64, *ONE_BATCH, "--enable-cache-report"),
        CHECKED,
    ),
    # The same of latents on two ranks, written when the first level evicts, retracted now and then.
    "hicache on two ranks": Spec(
        ("hicache",),
        "deepseek_v3",
        (
            *(*HICACHE, "--hicache-write-policy", "write_back", "--tp-size", "2"),
            *(*WITHOUT_OVERLAP, *CHUNKS_OF_64, *ONE_BATCH, "--enable-cache-report"),
        ),
        {**CHECKED, "check_agreement": True},
        {"env": retracts(50)},
    ),
    # A third level.
    "hicache with a storage": Spec(
        ("hicache",),
        "llama",
        (
            *(*HICACHE, "--hicache-storage-backend", "file"),
            *("--enable-cache-report", *PAGES_OF_16),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *(*CHUNKS_OF_64, *ONE_BATCH),
        ),
        CHECKED,
        {"env": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "storage"}},
    ),
    # A decode server in pages, retracted now and then, and a prefill server that sends in chunks.
    "disaggregated": Spec(
        ("disaggregation",),
        "qwen2",
        (*PAGES_OF_16, *ONE_BATCH, "--enable-metrics"),
        CHECKED,
        {"env": retracts(7)},
        steering_layer=1,
        prefill=(*PAGES_OF_16, *CHUNKS_OF_64),
    ),
    # Two ranks behind one, prompts in the decode server's radix cache, and a pool that is too
    # small.
    "disaggregated, two ranks": Spec(
        ("disaggregation",),
        "llama",
        (
            *("--tp-size", "2", "--max-total-tokens", "1024", *ONE_BATCH, *WITHOUT_OVERLAP),
            *("--disaggregation-decode-enable-radix-cache", "--num-reserved-decode-tokens", "16"),
        ),
        {**CHECKED, "check_agreement": True},
        steering_layer=1,
        prefill=(),
    ),
    # Nothing is backed up, by us or by SGLang.
    "disaggregated, no backups": Spec(
        ("disaggregation",),
        "llama",
        (
            *("--disaggregation-decode-retraction-backup", "none", "--enable-metrics"),
            *ONE_BATCH,
        ),
        {**CHECKED, "retraction_backup_bytes": 0, "max_tracked_requests": 4},
        {"env": retracts(60)},
        prefill=(),
    ),
    # Two attention groups behind one rank, latents in pages, retracted now and then.
    "disaggregated, two groups": Spec(
        ("disaggregation",),
        "deepseek_v3",
        ("--tp-size", "2", "--attn-dp-size", "2", *PAGES_OF_16, *ONE_BATCH),
        CHECKED,
        {"env": retracts(9)},
        prefill=PAGES_OF_16,
    ),
    # Both draft, prompts in the decode server's radix cache, retracted now and then.
    "disaggregated, drafts": Spec(
        ("disaggregation",),
        "llama",
        (
            *(*PAGES_OF_16, *ONE_BATCH, "--speculative-algorithm", "EAGLE", *CHAINS_OF_4),
            "--disaggregation-decode-enable-radix-cache",
        ),
        CHECKED,
        {"env": retracts(7)},
        prefill=(*PAGES_OF_16, "--speculative-algorithm", "EAGLE", *CHAINS_OF_4),
        draft="eagle",
    ),
    # The same in two attention groups, of latents.
    "disaggregated, two groups, drafts": Spec(
        ("disaggregation",),
        "deepseek_v3",
        (
            *("--tp-size", "2", "--attn-dp-size", "2", *PAGES_OF_16, *ONE_BATCH),
            *("--speculative-algorithm", "EAGLE", *CHAINS_OF_3),
        ),
        CHECKED,
        {"env": retracts(9), "shared_env": DRAFT_MODELS},
        prefill=(*PAGES_OF_16, "--speculative-algorithm", "EAGLE", *CHAINS_OF_3),
        draft="nextn",
    ),
    "crowded": retracting(10, pool_tokens=CROWD_POOL_TOKENS, chunk=64, poison_evicted=True),
    # The same unsupported configuration: nobody asked, and the operator asked.
    "unavailable": Spec(
        ("states",), "qwen2", (*UNSUPPORTED, "--enable-metrics"), options={"trace": False}
    ),
    "refused": Spec(
        ("states",), "qwen2", (*UNSUPPORTED, "--enable-streaming-session", "--kv-budget", "64")
    ),
    # Random weights at start, as a trainer that brings its own later starts a server.
    "weights later": Spec(("states",), "qwen2", ("--load-format", "dummy")),
    # Two tokenizer workers behind a router, with a default budget. A worker that imports for longer
    # than the limit is ended and started again.
    "tokenizer workers": Spec(
        ("states",),
        "qwen2",
        (
            *("--tokenizer-worker-num", "2", "--enable-metrics", "--skipkv-explorer"),
            *("--kv-budget", "48", "--kv-policy", "streaming", "--kv-interval", "8"),
        ),
        options={"env": {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}},
    ),
    # No kv_reuse, and the operator asked for it.
    "reuse refused": Spec(
        ("states",),
        "qwen2",
        (*WITHOUT_REUSE, "--kv-reuse", "keep"),
        {"kv_params": {"drop_thoughts": True}},
    ),
}


def sharing(file: str) -> frozenset[str]:
    """All files that share a server with this one, perhaps by way of a third; itself included."""
    found = {file}
    while more := {f for s in SPECS.values() if found & {*s.files} for f in s.files} - found:
        found |= more
    return frozenset(found)
