"""Every server that the tests use, and which files share it.

Files that share one are for the same worker, where several share the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rank_plants
from tiny_models import ARGUMENTS, ENVIRONMENT, STATES_COPIED, TWO_POOLS, WITH_VISION

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
WANDERER = REASONER.parent / "wanderer"
# No test has seen compactions in pages of 8.
UNSUPPORTED = ("--page-size", "8")
PAGES_OF_16, PAGES_OF_32 = ("--page-size", "16"), ("--page-size", "32")
HICACHE = (
    *("--max-total-tokens", "2048", "--enable-hierarchical-cache"),
    *("--hicache-ratio", "16"),
)
CHUNKS_OF_64 = ("--chunked-prefill-size", "64")
WITHOUT_OVERLAP = ("--disable-overlap-schedule",)
DEFAULTS_BY_FLAG = (
    *("--kv-budget", "96", "--kv-policy", "rkv", "--kv-interval", "32"),
    *("--kv-budget-max", "512"),
)
# Neither radix cache nor events that stay within the process: no kv_reuse.
KV_EVENTS = '{"publisher": "zmq", "endpoint": "inproc://events"}'
WITHOUT_REUSE = ("--disable-radix-cache", "--kv-events-config", KV_EVENTS)
# Generated tokens of a thinking request are not cached by SGLang.
STRIPPED = ("--strip-thinking-cache", "--reasoning-parser", "deepseek-r1")
ONE_BATCH = ("--max-running-requests", "64")
RETRACT_POOL_TOKENS, CROWD_POOL_TOKENS = 4096, 1024
SMALL_POOL = ("--max-total-tokens", "2048")
CHECKED: Mapping[str, Any] = {"check_ledger": True, "poison_evicted": True, "kv_interval": 16}


@dataclass(frozen=True)
class Spec:
    """One server.

    Attributes:
        files: stems of the test files that use it, without their ``test_``.
        model: family of ``tiny_models``, or a folder.
        config: written to a file that ``--skipkv-config`` names.
        options: of ``Server``.
        steering_layer: of a random vector that the server loads; requests ask for it or do without.
        prefill: arguments of the prefill server of this decode server (PD disaggregation), which
            has its settings and vector, too; None: it is neither.
        adapters: names of LoRA adapters that it loads.
    """

    files: tuple[str, ...]
    model: str | Path
    arguments: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    steering_layer: int | None = None
    prefill: tuple[str, ...] | None = None
    adapters: tuple[str, ...] = ()


def retracts(every: int) -> dict[str, str]:
    """SGLang's own test switch: retract a request every so many steps, the pool full or not."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(every)}


def retracting(
    every: int,
    files: tuple[str, ...] = ("retraction",),
    model: str = "llama",
    more: tuple[str, ...] = (),
    steering_layer: int | None = 1,
    pool_tokens: int = RETRACT_POOL_TOKENS,
    chunk: int = 256,
    **config: Any,
) -> Spec:
    """A small pool in which requests are retracted every so many steps."""
    pool = ("--max-total-tokens", str(pool_tokens), "--chunked-prefill-size", str(chunk))
    settings = {**CHECKED, **config}
    return Spec(files, model, (*pool, *more), settings, {"env": retracts(every)}, steering_layer)


SPECS: dict[str, Spec] = {
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
    "recomputing": retracting(200, retraction_backup_bytes=0),  # nothing is backed up
    "restoring": retracting(3, more=PAGES_OF_16),
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
        {"env": {**retracts(50), "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "storage"}},
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
