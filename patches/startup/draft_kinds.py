"""The row of the capability matrix about speculative decoding: why eviction cannot work with it."""

from __future__ import annotations

from typing import Any

from sgl_skipkv.patches.engine.linear_states import has_linear_states
from sgl_skipkv.patches.engine.pd_roles import is_decode_server, is_prefill_server
from sgl_skipkv.patches.engine.speculation import boundary_tokens, is_speculative
from sgl_skipkv.patches.engine.window_pool import has_window_pool

SPECULATION = "speculative decoding"
_DRAFT_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")


def speculation(scheduler: Any) -> str | None:
    """Drafts of another kind than chains of one model, and what was not made to work with them."""
    if not is_speculative(scheduler):
        return None
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_exec, get_spec
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

    settings, worker = get_spec(), scheduler.draft_worker
    is_known, pool = type(worker) in (EAGLEWorkerV2, StandaloneWorkerV2), ""
    if is_known:
        pool = type(worker.draft_worker.draft_runner.token_to_kv_pool).__name__
    beside = {
        f"{settings.speculative_algorithm} as {type(worker).__name__}": not is_known,
        f"a draft model with {pool}": is_known and pool not in _DRAFT_POOLS,
        "drafts that are trees (--speculative-eagle-topk 1: chains)": (
            settings.speculative_eagle_topk != 1
        ),
        "--speculative-adaptive": settings.speculative_adaptive,
        "window layers in a pool of their own (--disable-hybrid-swa-memory)": has_window_pool(
            scheduler.token_to_kv_pool_allocator
        ),
        "layers with a state instead of KV": has_linear_states(scheduler.req_to_token_pool),
        "images": scheduler.model_config.is_multimodal,
        "positions on three axes": scheduler.model_config.model_is_mrope,
        "--enable-deterministic-inference": get_exec().deterministic.enable_deterministic_inference,
        "PD disaggregation, where SGLang drafts with EAGLE only": (
            (is_prefill_server() or is_decode_server()) and not scheduler.spec_algorithm.is_eagle()
        ),
        "--enable-mixed-chunk": scheduler.is_mixed_chunk,
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get(),
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION": (
            envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get()
        ),
    }
    found = " and ".join(name for name, is_there in beside.items() if is_there)
    return f"{SPECULATION}, with {found}" if found else None


def reuse_of_pairs(scheduler: Any) -> str | None:
    """A tree whose keys name the next token, too, has no key for the last entry of a history, whose
    page then is not whole."""
    if not boundary_tokens(scheduler) or scheduler.page_size == 1:
        return None
    return f"kv_reuse with EAGLE in pages of {scheduler.page_size} tokens (--page-size 1)"
