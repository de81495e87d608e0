"""Every server that the tests use, and which files share it.

A start costs half a minute of a core. So a server is started once, by the first test that asks; and
files that share one are for the same worker, where several share the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rank_plants
import torch
from oracle import Addition, steering_factors
from servers import Server
from tiny_models import ARGUMENTS, ENVIRONMENT, LINE_END_IDS, PIECES, WITH_VISION
from vector_files import origin

from sgl_skipkv.steering.vector import SteeringVector

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
# Steering vectors of the random models: see ``tiny_vector``.
STEERING_GAMMA = 0.1
STEERING_KEYWORDS = ("a", "b")
STEERING_PRESET = "any-newline"
# Neither radix cache nor events that stay within the process: no kv_reuse.
KV_EVENTS = '{"publisher": "zmq", "endpoint": "inproc://events"}'
WITHOUT_REUSE = ("--disable-radix-cache", "--kv-events-config", KV_EVENTS)
# Generated tokens of a thinking request are not cached by SGLang.
STRIPPED = ("--strip-thinking-cache", "--reasoning-parser", "deepseek-r1")
ONE_BATCH = ("--max-running-requests", "64")
RETRACT_POOL_TOKENS, CROWD_POOL_TOKENS = 4096, 1024
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
    """

    files: tuple[str, ...]
    model: str | Path
    arguments: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    steering_layer: int | None = None


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


def flags_of(
    folder: Path, config: Mapping[str, Any] | None, steering_layer: int | None = None
) -> list[str]:
    """Flags that name the files written here: of these settings, and of a ``tiny_vector``."""
    flags = []
    if config is not None:
        settings = folder / "skipkv.json"
        settings.write_text(json.dumps(config))
        flags += ["--skipkv-config", str(settings)]
    if steering_layer is not None:
        tiny_vector(steering_layer).save(folder / "vector.safetensors")
        flags += ["--steering-vector", str(folder / "vector.safetensors")]
        flags += ["--steering-gamma", str(STEERING_GAMMA)]
    return flags


def tiny_vector(layer: int) -> SteeringVector:
    """A vector for the random models, large enough to change what they say."""
    keywords = ",".join(STEERING_KEYWORDS)
    whence = origin(hidden_size=64, layer=layer, keywords=keywords, delimiters=STEERING_PRESET)
    draw = torch.Generator().manual_seed(layer)
    return SteeringVector(5 * torch.randn(64, generator=draw), whence)


def addition(
    name: str, call: Mapping[str, Any], output_ids: Sequence[int], **how: bool
) -> Addition | None:
    """What the definition adds to a call of this server; None for one that is not steered."""
    layer, alpha_0 = SPECS[name].steering_layer, call.get("steering", False)
    if alpha_0 is False:
        return None
    assert layer is not None
    return addition_of(layer, output_ids, alpha_0, **how)


def addition_of(layer: int, output_ids: Sequence[int], alpha_0: float, **how: bool) -> Addition:
    """What the definition adds to the output of this layer, with its ``tiny_vector``."""
    keywords = {PIECES.index(word) for word in STEERING_KEYWORDS}
    factors = steering_factors(output_ids, alpha_0, STEERING_GAMMA, LINE_END_IDS, keywords, **how)
    return Addition(layer, tiny_vector(layer).values, factors)


class Fleet:
    """Servers by name, each started once.

    Args:
        model_folder: family -> folder.
        folder: name -> new folder of a server.
    """

    def __init__(self, model_folder: Callable[[str], Path], folder: Callable[[str], Path]) -> None:
        self._model_folder, self._folder = model_folder, folder
        self._started: dict[str, Server] = {}

    def started(self, name: str) -> Server:
        """The server, perhaps not ready yet."""
        if name not in self._started:
            spec = SPECS[name]
            folder = self._folder(name.replace(", ", "-").replace(" ", "-"))
            arguments = flags_of(folder, spec.config, spec.steering_layer)
            model = spec.model if isinstance(spec.model, Path) else self._model_folder(spec.model)
            self._started[name] = Server(
                model, folder, [*spec.arguments, *arguments], **spec.options
            )
        return self._started[name]

    def ready(self, name: str) -> Server:
        return self.started(name).wait_ready(400)

    def all_ready(self, *names: str) -> dict[str, Server]:
        """The servers by name, started side by side."""
        for name in names:
            self.started(name)
        return {name: self.ready(name) for name in names}

    def lent(self, name: str) -> Iterator[Server]:
        """What a fixture yields from: the server, ready; when its tests end, clean and stopped."""
        for servers in self.all_lent(name, stop=True):
            yield servers[name]

    def all_lent(self, *names: str, stop: bool) -> Iterator[dict[str, Server]]:
        """The same of several; ``stop`` where no later test uses them."""
        servers = self.all_ready(*names)
        yield servers
        for server in servers.values():
            server.assert_clean()
        if stop:
            self.stop(*names)

    def stop(self, *names: str) -> None:
        """End servers that no later test uses."""
        for name in names:
            self._started[name].stop()

    def stop_all(self) -> None:
        self.stop(*self._started)
