"""What the tests' servers are made of: a ``Spec``, and flags that several have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
CHAINS_OF_4 = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
CHAINS_OF_3 = (
    *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "3"),
)
STANDALONE = ("--speculative-algorithm", "STANDALONE", *CHAINS_OF_4)
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
        draft: kind of ``tiny_drafts``, for speculative decoding; None: it has none.
    """

    files: tuple[str, ...]
    model: str | Path
    arguments: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    steering_layer: int | None = None
    prefill: tuple[str, ...] | None = None
    adapters: tuple[str, ...] = ()
    draft: str | None = None


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
