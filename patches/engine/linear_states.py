"""Layers with a state instead of KV: linear attention, Mamba, short convolutions (SGLang's hybrid
models).

A state has taken in every token and loses none: a compaction evicts from the attention layers only,
and the other layers notice nothing. Attention layers have a pool of their own, which the page table
names, and a request has one slot for its states beside its row.

The radix tree keeps a copy of the states where a prompt ends, or where a multiple of some length
lies, because a prefix without them is of no use. It counts in row entries where that is. So states
of a row that has lost tokens, or that go on behind what may be inserted, are not given to it.

A retracted request is recomputed: with the overlap scheduler the step that runs has already put a
token into its states whose result is dropped, and a state cannot go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sgl_skipkv.patches.engine.binding import state_of

#: of a runtime whose requests have states
WITHOUT_BACKUPS: Final = {"retraction_backup_bytes": 0, "kv_reuse_bytes": 0}
NO_BACKUPS: Final = "because a state cannot go back to the last token that was kept"


def has_linear_states(req_to_token_pool: Any) -> bool:
    """Whether requests have states beside their rows."""
    return hasattr(req_to_token_pool, "mamba_pool")


def forget_match(req: Any, req_to_token_pool: Any) -> None:
    """A request that has matched a prefix and is passed over gives back the slot for its states, as
    SGLang does for one that is not admitted: what it would copy there may be gone when it runs."""
    if req.kv.holds_mamba and not req.kv.holds_kv:
        req_to_token_pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        req.kv.mamba_pool_idx = req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False


def forget_copy(
    original: Callable[..., None], processor: Any, req: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND ``SchedulerBatchResultProcessor._mamba_prefix_cache_update``: SGLang notes the length
    at which a decode step has copied the states. A compacted row is shorter than its text, which
    SGLang takes for an error; nothing of it is inserted."""
    state = state_of(req)
    if state is None or not state.kv.evicted_tokens:
        original(processor, req, *args, **kwargs)
