"""HiCache (``--enable-hierarchical-cache``): the radix tree's second level, in host memory.

SGLang copies nodes of the tree there, by their slots. A prompt is in such nodes, and so is the row
of a history, under its own keys; the rest of a running request is not. What it finds there it loads
when it admits a request, layer by layer beside the prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_skipkv.patches.engine.binding import binding_of, bound_to, state_of
from sgl_skipkv.request.state import RequestState


def load_row(original: Callable[..., Any], tree_cache: Any, params: Any) -> Any:
    """AROUND ``UnifiedRadixCache.init_load_back``: loads all of a history's row; None: not now.

    SGLang does not load a few tokens, and computes what it does not load. A history cannot be
    computed from its keys. The next pass tries again; if no other request runs, the history is not
    continued.
    """
    req = params.req
    state = state_of(req)
    continued = None if state is None else state.reuse.continued
    if state is None or continued is None or req.prefix_len >= continued.row_tokens:
        return original(tree_cache, params)  # text, which can be computed
    fewest, tree_cache.load_back_threshold = tree_cache.load_back_threshold, 1
    try:
        loaded = original(tree_cache, params)
    finally:
        tree_cache.load_back_threshold = fewest
    if loaded is not None and loaded[0] >= params.host_hit_length:
        _, node = loaded
        return params.host_hit_length, node  # without the slots behind the row in its last page
    state.reuse.loads = False
    return None


def leave_to_backup(req: Any, state: RequestState) -> None:
    """A retracted request is restored from its backup as a whole: nothing of it is loaded."""
    if state.offloaded.backup is not None:
        req.host_hit_length = 0


def wait_for_load(batch: Any) -> None:
    """Let the schedule stream wait for all that HiCache loads for this batch; the CPU does not
    wait."""
    index = batch.hicache_consumer_index
    if index >= 0:
        loaded = batch.tree_cache.cache_controller.layer_done_counter.events[index].finish_event
        loaded.wait(bound_to(batch.req_to_token_pool).scheduler.schedule_stream)


def refuse_storage(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.attach_hicache_storage_wrapped``: a storage would take the private keys of
    histories for token ids. It may be attached where ``kv_reuse`` is refused, as on a server that
    started with one."""
    binding = binding_of(scheduler)
    if binding is None or binding.runtime is None or binding.limits.without_reuse:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    message = (
        "sgl_skipkv: rows that requests leave with kv_reuse must not reach a storage. Start the "
        "server with --hicache-storage-backend, which refuses kv_reuse and serves kv_budget."
    )
    return AttachHiCacheStorageReqOutput(success=False, message=message)
