"""Bugs of layers with a state instead of KV: ``planted_bugs.py`` plants them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Changes = dict[Callable[..., Any], dict[str, tuple[str, str]]]


def state_bugs() -> Changes:
    """Our function -> name of a bug -> a piece of its source, and what stands there instead."""
    from sgl_skipkv.patches.engine import linear_states, release
    from sgl_skipkv.patches.startup import measurements

    return {
        release.keep_states: {
            "the tree takes states that go on behind the prefix": (
                "if limit is not None:",
                "if False:",
            ),
            "the tree takes states of more than a prompt while the request runs": (
                "if is_finished or (stand_for or 0) > limit:",
                "if is_finished:",
            ),
            "the tree takes states of a steered text when its request ends": (
                "if is_finished or (stand_for or 0) > limit:",
                "if not is_finished and (stand_for or 0) > limit:",
            ),
            "the tree takes states of a token more": (
                "(stand_for or 0) > limit",
                "(stand_for or 0) > limit + 1",
            ),
            "the tree takes states of a page more": (
                "(stand_for or 0) > limit",
                "(stand_for or 0) > limit + 16",
            ),
        },
        linear_states.forget_match: {
            "who waits for a track keeps the state that it has matched": (
                "if req.kv.holds_mamba and not req.kv.holds_kv:",
                "if False:",
            ),
            "who waits for a track will copy a state that may be gone by then": (
                "req.kv.mamba_pool_idx = req.kv.mamba_cow_src_index = None",
                "req.kv.mamba_pool_idx = None",
            ),
        },
        linear_states.forget_copy: {
            "SGLang notes the length of a compacted row": (
                "if state is None or not state.kv.evicted_tokens:",
                "if True:",
            ),
        },
        measurements._prefill: {
            "the text that is measured keeps its state": (
                "release_kv_cache(req, tree, checkpoint=False)",
                "tree.free_kv_row(req.kv, [(0, len(ids))]); tree.unlock(req.lock); pages.free(req)",
            ),
        },
        release.insertable_tokens: {
            "a compacted row and its state are inserted into the tree": (
                "and state.kv.evicted_tokens:\n        return 0",
                "and state.kv.evicted_tokens:\n        return None",
            ),
            "a recomputed request hands output and state to the tree": (
                "return shared",
                "return None",
            ),
        },
    }
