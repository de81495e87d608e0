"""How much KV a request needs: what its next prefill takes, what it may still grow by, and what a
backup of it would take in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_skipkv.patches.engine.binding import state_of
from sgl_skipkv.request.pages import page_ceil
from sgl_skipkv.request.state import RequestState


def must_stay(reqs: Sequence[Any]) -> list[Any]:
    """Running requests that, if retracted, could be neither restored nor recomputed.

    Of the others any number may be retracted at once, in any order. So the host memory that one
    needs which cannot be recomputed is counted behind what all others would take.

    Args:
        reqs: whoever may be retracted, the first ones first.
    """
    taken_bytes, needing = 0, []
    for req in reqs:
        state = state_of(req)
        if state is None:
            continue
        if state.runtime.can_recompute(state, len(req.output_ids)):
            taken_bytes += backup_bytes(req, state) or 0
        else:
            needing.append((req, state))
    staying = []
    for req, state in needing:
        needed = backup_bytes(req, state)
        if needed is None or not state.runtime.host_memory.fits(taken_bytes + needed):
            staying.append(req)
        else:
            taken_bytes += needed
    return staying


def backup_bytes(req: Any, state: RequestState) -> int | None:
    """Host memory for the backup of a running request; None: it can have none."""
    if req.positional_embed_overrides is not None and state.keeps_prompt_private:
        return None  # SGLang places them by row entries, and this row may lack some of its prompt
    row_tokens: int = req.kv.kv_committed_len
    needed: int | None = state.runtime.backup_bytes(state, row_tokens, len(req.output_ids))
    return needed


def fits_alone(state: RequestState, req: Any) -> bool:
    """Whether a request without a backup can be admitted when no other request holds KV."""
    needed = prefill_tokens(req) - state.kv.evicted_tokens + future_tokens(state, req)
    if (continued := state.reuse.continued) is not None:  # beside the history, until it is copied
        pages = page_ceil(continued.row_tokens, state.runtime.page_tokens)
        needed += pages - continued.shared_tokens
    fits: bool = state.runtime.fits_pool(needed - 1)  # it counts one future token itself
    return fits


def prefill_tokens(req: Any) -> int:
    """Logical tokens of a request without a row: its prompt, and those generated before a
    retraction."""
    tokens: int = len(req.origin_input_ids) + req.skipkv.unsent_tokens + len(req.output_ids)
    return tokens


def tokens_left(req: Any) -> int:
    return max(int(req.sampling_params.max_new_tokens) - len(req.output_ids), 0)


def restored_tokens(state: RequestState, req: Any) -> int:
    """KV tokens restored from the backup: its row without the prompt tokens in the radix tree."""
    return (
        0 if state.offloaded.backup is None else state.offloaded.backup.row_tokens - req.prefix_len
    )


def copied_tokens(state: RequestState, matched: int) -> int:
    """KV tokens copied from the history that the request continues, if the tree has so many."""
    continued = state.reuse.continued
    if continued is None or state.offloaded.backup is not None or matched > continued.row_tokens:
        return 0
    return continued.row_tokens - continued.shared_tokens


def growth_tokens(state: RequestState, req: Any) -> int:
    """KV tokens that a request with a row may still need: of pages that it does not have."""
    row_tokens: int = req.kv.kv_committed_len
    peak_tokens = row_tokens + future_tokens_of(state, row_tokens, req)
    page_tokens = state.runtime.page_tokens
    held_tokens = page_ceil(req.kv.kv_allocated_len, page_tokens)
    return max(page_ceil(peak_tokens, page_tokens) - held_tokens, 0)


def future_tokens(state: RequestState, req: Any) -> int:
    """KV tokens that a request may need after its next prefill."""
    backup = state.offloaded.backup
    prefilled_tokens = prefill_tokens(req) - state.kv.evicted_tokens
    row_tokens = prefilled_tokens if backup is None else backup.row_tokens + 1
    if tokens_left(req) <= 1:  # it ends with its prefill
        return int(state.future_tokens(row_tokens, tokens_left(req)))
    return future_tokens_of(state, row_tokens, req)


def future_tokens_of(state: RequestState, row_tokens: int, req: Any) -> int:
    """KV tokens that a request may need behind a row of this length."""
    behind: int = state.runtime.reserved_tokens
    return state.future_tokens(row_tokens, tokens_left(req)) + behind
