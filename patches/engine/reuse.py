"""A request starts from the KV that an earlier one kept (``kv_reuse``).

To SGLang a row that continues a history looks like one whose prefix is cached under other token
ids: the input of the request is the history's key, then the tokens behind the history. SGLang
matches it in the radix tree, locks what it matched and computes the rest. The row is shorter than
the prompt; ``forward.prepare_forward`` sets the logical positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.eviction.compaction import Compaction
from sgl_skipkv.patches.engine.binding import bound_to, state_of
from sgl_skipkv.patches.engine.future_kv import fits_alone
from sgl_skipkv.patches.engine.hicache import wait_for_load
from sgl_skipkv.patches.engine.kv_cache import (
    alloc_slots,
    check_lengths,
    due_of,
    fill_last_page,
    paged_cache,
    release_evicted,
    row_buffers,
    wait_for_forward,
)
from sgl_skipkv.patches.engine.media import would_miss_media
from sgl_skipkv.patches.engine.scheduler import context_tokens
from sgl_skipkv.patches.engine.window_pool import (
    has_window_pool,
    held_tokens,
    window_buffers,
    window_slots,
)
from sgl_skipkv.request.pages import page_floor
from sgl_skipkv.request.parts import Continued
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.reuse.continuation import FinishedRow, first_prompt_of, namespace_of
from sgl_skipkv.reuse.histories import HistoryMatch
from sgl_skipkv.reuse.history import History


def continue_history(
    original: Callable[..., None], req: Any, tree_cache: Any = None, cow_mamba: bool | None = None
) -> None:
    """AROUND ``Req.init_next_round_input``: a request that is about to be scheduled looks for the
    history that its prompt begins with.

    The tree decides whether it still exists: if it has lost a part of a history, the next best is
    tried that does not need this part. Those that do are forgotten. The one that was tried, if the
    conversation counts, still says where that begins, also to the request's samples and branches.
    """
    state = state_of(req)
    begins = tree_cache is not None and not req.kv.holds_kv
    # With overrides ids do not say what was computed: SGLang matches no prefix either.
    begins = begins and req.positional_embed_overrides is None
    if state is not None and state.offloaded.backup is not None:
        begins = False  # it continues where it was
    if state is None or state.settings.kv_reuse is None or not begins:
        original(req, tree_cache, cow_mamba)
        return
    runtime, prompt = state.runtime, req.origin_input_ids
    positions = context_tokens(bound_to(tree_cache.req_to_token_pool).scheduler)
    lost = state.reuse.miss == "evicted"  # in an earlier round
    matches, left = runtime.histories.find(_namespace(state, req), prompt)
    best = first_prompt_of(matches[0], prompt) if matches else None
    state.reuse.first_prompt = best or state.reuse.first_prompt
    # Of earlier turns: the same prompt again has lost nothing.
    lost_prompts = [one.history.own_prompt_tokens for one in matches if not one.history.has_kv]
    gone = max((length for length in lost_prompts if length < len(prompt)), default=0)
    matches = [one for one in matches if one.history.has_kv]
    while True:
        found = matches.pop(0) if matches else None
        own = 0 if found is None else found.history.own_prompt_tokens
        state.reuse.miss = "evicted" if lost or gone > own else "diverged" if left > own else "none"
        reason = None if found is None else _why_not(req, state, found, positions)
        if reason is not None:
            found, state.reuse.miss = None, reason
        _continue(req, state, found, positions)
        if found is not None and not fits_alone(state, req):
            # The pool cannot hold history and copy together: the request would wait for ever.
            found, state.reuse.miss = None, "evicted"
            _continue(req, state, None, positions)
        original(req, tree_cache, cow_mamba)
        if found is None:
            state.reuse.loads = True
            return
        if _has_whole_row(req, state, tree_cache):
            if state.reuse.loads or not req.host_hit_length:
                runtime.histories.use(found.history)
                return
            lost = True  # to this request
            continue
        continued = state.reuse.continued
        if continued is not None and _lacks_windows(req, continued, tree_cache):
            lost = True  # to this request: no window ends there, but the history's own end has one
            continue
        runtime.histories.lose(found.history)
        page_tokens, kept = runtime.page_tokens, []
        named_tokens = held_tokens(req) + page_tokens + runtime.boundary_tokens
        missing = found.history.pages[:named_tokens]
        for match in matches:
            if match.needs(missing, page_tokens):
                runtime.histories.drop(match.history)
            else:
                kept.append(match)
        matches, lost = kept, True


def _why_not(req: Any, state: RequestState, found: HistoryMatch, positions: int) -> str | None:
    """The ``kv_reuse_miss`` of a request that cannot continue the history; None: it can."""
    # Row entries are not prompt positions, by which SGLang picks the log-probabilities.
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids):
        return "logprobs"
    if not _fits_context(req, state, found, positions):
        return "context"
    return "media" if would_miss_media(req, found) else None


def _continue(req: Any, state: RequestState, found: HistoryMatch | None, positions: int) -> None:
    """The request continues the history, or none. positions: that a request may take."""
    unsent_tokens, params = 0 if found is None else found.history.unsent_tokens, req.sampling_params
    if state.reuse.runs_to_context_end:
        params.max_new_tokens = positions - len(req.origin_input_ids) - unsent_tokens
    state.runtime.continue_history(state, found, int(params.max_new_tokens))
    if found is not None and req.logprob_start_len >= 0:
        # The row may be longer than the prompt: dropped thoughts leave what opened them. SGLang
        # would take what is behind the prompt for tokens whose log-probabilities are asked for.
        row_tokens = len(row_ids(req, state))
        req.logprob_start_len = max(req.logprob_start_len, row_tokens)


def _has_whole_row(req: Any, state: RequestState, tree_cache: Any) -> bool:
    """Whether the radix tree has the row that the request continues, on the device or, with
    HiCache, in host memory. SGLang has matched whole pages of it; the request locks the last one as
    well, until it is copied."""
    continued = state.reuse.continued
    assert continued is not None
    row_tokens = continued.row_tokens
    if has_window_pool(tree_cache.token_to_kv_pool_allocator):
        # Of the row's last window a part may be in front of that of its last page's end.
        if req.prefix_len < page_floor(row_tokens, tree_cache.page_size):
            return False
    if req.prefix_len + req.host_hit_length < row_tokens and continued.rest_of_page:
        match = _match(req, continued, tree_cache)
        if match.device_prefix_len + match.host_hit_length >= row_tokens:
            req.prefix_len = min(match.device_prefix_len, row_tokens)
            req.last_node, req.best_match_node = match.last_device_node, match.best_match_node
            req.host_hit_length = row_tokens - req.prefix_len
    return bool(req.prefix_len + req.host_hit_length >= row_tokens)


def _lacks_windows(req: Any, continued: Continued, tree_cache: Any) -> bool:
    """Whether the radix tree has the row, but no whole window of it."""
    if not has_window_pool(tree_cache.token_to_kv_pool_allocator):
        return False
    held_tokens: int = _match(req, continued, tree_cache).full_kv_hit_length
    return held_tokens >= continued.row_tokens


def _match(req: Any, continued: Continued, tree_cache: Any) -> Any:
    """What the radix tree has of the row's pages."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    key = _req_radix_key(tree_cache, req, continued.key + continued.rest_of_page)
    return tree_cache.match_prefix(MatchPrefixParams(key=key))


def _fits_context(req: Any, state: RequestState, found: HistoryMatch, positions: int) -> bool:
    """Whether the model has positions for the prompt, the thoughts that it does not contain, and
    the output: a request without a limit of its own needs half of them."""
    if not found.history.unsent_tokens:
        return True
    prompt_tokens = len(req.origin_input_ids) + found.history.unsent_tokens
    if state.reuse.runs_to_context_end:
        return prompt_tokens <= positions // 2
    return prompt_tokens + int(req.sampling_params.max_new_tokens) <= positions


def fill_with_keys(result: None, req: Any) -> None:
    """AFTER ``Req.refresh_fill_ids``: the row's keys instead of the history's tokens.

    SGLang would append to the keys of a history that the request does not continue any more.
    """
    state = state_of(req)
    if state is None or state.settings.kv_reuse is None:
        return
    if state.reuse.row_key is not None:
        req.full_untruncated_fill_ids = state.reuse.row_key[:]
    else:
        req.full_untruncated_fill_ids = row_ids(req, state)


def row_ids(req: Any, state: RequestState) -> array[int]:
    """What SGLang takes for the request's tokens: the key of its history, and what follows it."""
    tokens: array[int] = req.origin_input_ids + req.output_ids
    continued = state.reuse.continued
    return tokens if continued is None else continued.key + tokens[continued.sent_tokens :]


def copy_history(original: Callable[..., Tensor], batch: Any, req: Any) -> Tensor:
    """Slots of the history's row.

    What the request may write gets a copy in slots of its own, because the tree's may be read by
    other branches: what it may evict from, and a last page that its own tokens go on in. From then
    on it locks in the tree only what is in front of that.
    """
    slots, state = original(batch, req), state_of(req)
    continued = None if state is None else state.reuse.continued
    if state is None or continued is None or req.kv.holds_kv:
        return slots
    if state.offloaded.backup is not None:  # a restored row is its own
        return slots
    if not continued.copies and len(slots) != continued.row_tokens:
        return slots  # the tree has the text behind the history, too
    shared, history = slots[: continued.shared_tokens], slots[continued.shared_tokens :]
    continued.copied_tokens = len(history)
    if not len(history):
        return slots
    copy = alloc_slots(batch.tree_cache, len(history))
    wait_for_forward(batch.req_to_token_pool)  # a running step may still write to these slots
    wait_for_load(batch)
    allocator = batch.token_to_kv_pool_allocator
    for buffer in row_buffers(bound_to(batch.req_to_token_pool).scheduler):
        buffer[copy] = buffer[history]
    for buffer in window_buffers(allocator):
        buffer[window_slots(allocator, copy)] = buffer[window_slots(allocator, history)]
    _lock_shared(batch.tree_cache, req, state, continued.shared_tokens)
    return torch.cat([shared, copy])


def _lock_shared(tree_cache: Any, req: Any, state: RequestState, shared_tokens: int) -> None:
    """Lock what the request still shares with the tree instead of its whole history."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    named_tokens = shared_tokens + state.runtime.boundary_tokens
    key = _req_radix_key(tree_cache, req, row_ids(req, state), named_tokens)
    match = tree_cache.match_prefix(MatchPrefixParams(key=key))
    assert match.device_prefix_len == shared_tokens, (
        f"the locked history begins with it: expected {shared_tokens} tokens, got "
        f"{match.device_prefix_len} ({req.rid})"
    )
    lock = tree_cache.lock(match.last_device_node)
    tree_cache.unlock(req.lock)
    req.lock, req.last_node = lock, match.last_device_node
    req.kv.cache_protected_len = shared_tokens


@contextmanager
def leaving_history(
    req: Any, state: RequestState | None, tree_cache: Any, *, checkpoint: bool
) -> Iterator[None]:
    """While SGLang releases the row of a finished or aborted request, it files the row under its
    keys. checkpoint: whether it may file it; it does not if the request gives way to others, nor a
    row that depends on more than its ids."""
    files = checkpoint and not req.skip_radix_cache_insert
    if state is None or state.settings.kv_reuse is None or not files:
        yield
        return
    history, table = _history_of(req, state, tree_cache), tree_cache.req_to_token_pool.req_to_token
    if history is not None and len(history.key + history.padding) > table.shape[1]:
        history = None  # a row that fills the context; no prompt could continue it
    if history is not None:
        state.reuse.row_key = history.key + history.padding
        allocator = tree_cache.token_to_kv_pool_allocator
        fill_last_page(req, table, allocator, len(history.key))
        req.swa_branching_seqlen = None  # SGLang would file it up to there
    try:
        yield
    finally:
        state.reuse.row_key = None
    if history is not None:
        state.runtime.histories.add(history)


def split_behind_row_prompt(
    original: Callable[..., None], tree_cache: Any, req: Any, **kwargs: Any
) -> None:
    """AROUND ``UnifiedRadixCache.checkpoint_into_tree``: SGLang also inserts the prompt by itself,
    to split the row there, so it needs the prompt as the row has it."""
    state = state_of(req)
    if state is None or state.settings.kv_reuse is None:
        original(tree_cache, req, **kwargs)
        return
    prompt = req.origin_input_ids
    req.origin_input_ids = row_ids(req, state)[: state.shared_row_tokens]
    try:
        original(tree_cache, req, **kwargs)
    finally:
        req.origin_input_ids = prompt


def _history_of(req: Any, state: RequestState, tree_cache: Any) -> History | None:
    """What the request leaves: nothing if it failed or has no KV beyond its prompt."""
    if state.failure is not None:
        return None
    runtime, kv, prompt = state.runtime, req.kv, req.origin_input_ids
    output: array[int] = req.output_ids_through_stop
    text = state.logical_prompt(prompt) + output
    # A verify step may have added tokens behind the stop.
    logical_tokens = min(kv.kv_committed_len + state.kv.evicted_tokens, len(text))
    tokens, new_tokens = text[:logical_tokens], logical_tokens - state.prompt.tokens
    if new_tokens <= 0 and state.reuse.continued is None:
        return None
    pools = tree_cache.req_to_token_pool, tree_cache.token_to_kv_pool_allocator
    wait_for_forward(tree_cache.req_to_token_pool)
    policy = state.settings.policy
    follows = policy.needs_attention and not policy.follows_compactions
    if follows and state.settings.kv_reuse == "budget":
        # A next prompt may leave out the token that ended the output.
        known_tokens = logical_tokens - int(new_tokens >= len(output))
        if known_tokens > state.kv.followed_tokens:
            row_tokens = known_tokens - state.kv.evicted_tokens
            runtime.compactor.follow([due_of(req, state, row_tokens, *pools, paged_cache(*pools))])
    thought = runtime.thoughts.find(prompt, output) if state.settings.drops_thoughts else None
    if thought is not None and thought.tokens + runtime.boundary_tokens >= new_tokens:
        thought = None  # no KV of an answer that could be continued
    if thought is not None:
        row_tokens = logical_tokens - state.kv.evicted_tokens
        if state.failure is not None or not _drop(req, state, row_tokens, thought.tokens, *pools):
            return None
    row_tokens = logical_tokens - state.kv.evicted_tokens
    left = FinishedRow(prompt, tokens, row_ids(req, state)[:row_tokens], thought)
    history: History | None = runtime.leave_history(state, _namespace(state, req), left)
    return history


def _drop(
    req: Any,
    state: RequestState,
    row_tokens: int,
    thought_tokens: int,
    req_to_token_pool: Any,
    allocator: Any,
) -> bool:
    """Evict the first tokens that a finished request generated; whether that worked."""
    pools = req_to_token_pool, allocator
    check_lengths(req, state)
    span = (state.prompt.tokens, state.prompt.tokens + thought_tokens)
    due = due_of(req, state, row_tokens, *pools, None)
    table = req_to_token_pool.req_to_token
    buffers = row_buffers(bound_to(req_to_token_pool).scheduler)
    compaction: Compaction | None = state.runtime.compactor.drop(due, span, table, buffers)
    if compaction is None:
        return False
    release_evicted(*pools, [compaction], {state: req})
    return True


def whole_row_length(result: int, req: Any) -> int | None:
    """AFTER ``Req.owned_kv_len``: a row that is filed, or of a conversation, belongs to the request
    as a whole.

    SGLang computes the length from token counts, and from the prompt's alone with
    ``--strip-thinking-cache``. Of any other row of ours, the prompt comes first.
    """
    state = state_of(req)
    if state is None:
        return None
    reuse = state.reuse
    if reuse.row_key is None and reuse.continued is None and reuse.first_prompt is None:
        return None
    return int(req.kv.kv_committed_len) if reuse.row_key is None else len(reuse.row_key)


def _namespace(state: RequestState, req: Any) -> Hashable:
    return namespace_of(state, req.extra_key, req.cache_salt, req.lora_id)
