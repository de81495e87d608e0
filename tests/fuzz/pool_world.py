"""One scheduler process on the CPU without a model: SGLang's real pools, tree, requests, batches.

``World`` is built and receives requests here, and turns in ``pool_loop.py``. Only the forward pass
is made up (``pool_forward.py``); everything is held against plain books (``pool_books.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from pool_content import (
    CONTEXT,
    DELIMITER,
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    KV_TOKEN_BYTES,
    POOL,
    QUERY_HEADS,
    ROWS,
    STOP,
    TRACKED,
    VOCAB,
)
from pool_forward import ForwardStream, ScheduleStream
from pool_hicache import add_second_level
from pool_loop import Loop
from pool_steering import GAMMA, make_steerer
from pool_turns import BLANK, THINK_END, THINK_START, separated
from score_inputs import some_centres, some_reach

from sgl_skipkv.request.pages import page_ceil, page_floor


def reuse_newest_first(allocator: Any) -> None:
    """A slot that was just freed is the next that is given out, and not the last."""

    def flipped(original: Callable[..., Any]) -> Callable[..., Any]:
        def alloc(*arguments: Any, **named: Any) -> Any:
            allocator.free_pages = allocator.free_pages.flip(0)
            slots = original(*arguments, **named)
            allocator.free_pages = allocator.free_pages.flip(0)
            return slots

        return alloc

    allocator.alloc = flipped(allocator.alloc)
    allocator.alloc_extend = flipped(allocator.alloc_extend)
    allocator.alloc_decode = flipped(allocator.alloc_decode)


class World(Loop):
    """The scheduler's state, by the names that SGLang and the hooks use on ``Scheduler``."""

    # What the hooked methods of the real Scheduler read.
    max_new_tokens_limit = sliding_window_size = None
    kv_shard_widening = layers = 1
    max_total_num_tokens, max_req_len = POOL, POOL - 1
    processed_tokens_counter = 0
    drafts_with: str | None = None  # --speculative-algorithm
    has_tree, queues_refused, copies_states = True, False, False
    #: where the KV of a prompt comes from
    address: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        *,
        tree_core: str = "rust",
        overlap: bool = True,
        late: bool = False,
        newest_first: bool = False,
        chunk: int | None = None,
        token_ratio: float = 0.3,
        backup_bytes: int = 0,
        work_bytes: int = 96 << 20,
        reuse_bytes: int = 1 << 20,
        head_dim: int = HEAD_DIM,
        check_ledger: bool = True,
        drops: bool = False,
        page_tokens: int = 1,
        host_ratio: float = 0,
        write_policy: str = "write_through",
        device: torch.device | str = "cpu",
    ) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        super().__init__()
        self.head_dim, self.page_size, self.device = head_dim, page_tokens, torch.device(device)
        self.schedule_stream, self.forward_stream = ScheduleStream(), ForwardStream(late)
        self.drops = drops
        self.overlap, self.token_ratio = overlap, token_ratio
        self.chunked_prefill_size = None if chunk is None else page_ceil(chunk, page_tokens)
        self.disaggregation_mode = DisaggregationMode.NULL
        self.spec_algorithm = SpeculativeAlgorithm.from_string(self.drafts_with)
        self.model_config = SimpleNamespace(
            vocab_size=VOCAB, is_encoder_decoder=False, context_len=CONTEXT
        )
        self.req_to_token_pool = self._row_pool()
        self.token_to_kv_pool_allocator = self._allocator()
        if newest_first:
            for allocator in self._slot_lists():
                reuse_newest_first(allocator)
        params = CacheInitParams(
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            page_size=page_tokens,
            disable=not self.has_tree,
            sliding_window_size=self.sliding_window_size,
            enable_mamba_extra_buffer=self.copies_states,
            is_eagle=self.spec_algorithm.is_eagle(),
            tree_components=self._tree_components(),
            tree_core_backend=tree_core,
        )
        self.tree_cache = UnifiedRadixCache(params=params)
        assert self.tree_cache._tree_core_backend == tree_core
        if host_ratio:
            add_second_level(self, params, host_ratio, write_policy)
        self.running_batch = ScheduleBatch(reqs=[])
        self.last_batch: Any = None
        self.chunked_req: Any = None
        self.result_queue, self.waiting_queue, self.aborted, self.finished = [], [], [], []
        # Held to the end: what a request fails to let go must not go with it, whenever that is.
        self.arrived: list[Any] = []
        self.retract_now = self.pending_chunk_abort = False
        self.ample = reuse_bytes >= 1 << 20
        self._bind(
            retraction_backup_bytes=backup_bytes,
            compaction_work_bytes=work_bytes,
            kv_reuse_bytes=reuse_bytes,
            check_ledger=check_ledger,
        )

    def _row_pool(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        return ReqToTokenPool(
            size=ROWS, max_context_len=CONTEXT, device=self.device, enable_memory_saver=False
        )

    def _allocator(self) -> Any:
        """Of the KV pool, with the pool."""
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        paged = {} if self.page_size == 1 else {"page_size": self.page_size}
        allocator_of = PagedTokenToKVPoolAllocator if paged else TokenToKVPoolAllocator
        return allocator_of(
            **paged,
            size=POOL,
            dtype=torch.float32,
            device=self.device,
            need_sort=False,
            kvcache=MHATokenToKVPool(
                size=POOL,
                page_size=self.page_size,
                dtype=torch.float32,
                head_num=KV_HEADS,
                head_dim=self.head_dim,
                layer_num=1,
                device=self.device,
                enable_memory_saver=False,
            ),
        )

    def _slot_lists(self) -> list[Any]:
        """Allocators that give out slots of one pool each."""
        return [self.token_to_kv_pool_allocator]

    def _tree_components(self) -> tuple[Any, ...]:
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType

        return (ComponentType.FULL,)

    def _bind(self, **given: Any) -> None:
        from sgl_skipkv.config import ServerConfig
        from sgl_skipkv.eviction.runtime import Runtime
        from sgl_skipkv.metrics import Metrics
        from sgl_skipkv.patches.engine.binding import Binding
        from sgl_skipkv.patches.limits import ServerLimits
        from sgl_skipkv.patches.readiness import Readiness
        from sgl_skipkv.recording.recorder import ModelShape, Recorder
        from sgl_skipkv.recording.sentences import Delimiters
        from sgl_skipkv.reuse.thoughts import ThoughtTokens

        config = ServerConfig(
            query_window=4,
            max_sentences=8,
            max_tracked_requests=TRACKED,
            **given,
            poison_evicted=True,
            steering_vector="none.safetensors",
            steering_gamma=GAMMA,
        )
        delimiters = Delimiters([(DELIMITER, ".\n")], VOCAB)
        self.recorder = Recorder(
            ModelShape(1, QUERY_HEADS, self.head_dim, HIDDEN),
            track_count=TRACKED,
            query_window=config.query_window,
            max_sentences=config.max_sentences,
            delimiters=delimiters,
            dtype=torch.float32,
            device=self.device,
        )
        self.recorder.use_rows(ROWS + 1)
        self.runtime = Runtime(
            config,
            recorder=self.recorder,
            scale=self.head_dim**-0.5,
            pool_tokens=POOL,
            page_tokens=self.page_size,
            kv_token_bytes=self.layers * KV_TOKEN_BYTES * self.head_dim // HEAD_DIM,
            steerer=make_steerer(delimiters, HIDDEN, ROWS + 1, self.device),
            thoughts=ThoughtTokens(THINK_END, THINK_START, frozenset({BLANK})),
            centres=some_centres(1, QUERY_HEADS, self.head_dim, self.device),
            reach=some_reach(1, KV_HEADS, self.device),
        )
        ready = Readiness((), enabled=False)
        of_model = {"limits": ServerLimits(has_thoughts=True), "scored_layers": (0,)}
        self.skipkv = Binding(config, ready, self.runtime, self, Metrics(), **of_model)
        self.req_to_token_pool.skipkv = self.skipkv
        self.runner = SimpleNamespace(skipkv=SimpleNamespace(capture=None))  # a ``ModelSide``

    # -- what the hooked methods of the real Scheduler call

    def _set_or_validate_priority(self, req: Any) -> bool:
        return True

    def _abort_on_queued_limit(self, req: Any) -> bool:
        return False

    def _prefetch_kvcache(self, req: Any) -> None:
        return None

    def send_abort_output(self, abort: Any, req: Any) -> None:
        self.count["refused"] += 1
        self.aborted.append(req)

    # -- requests

    def arrive(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool = True,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        becomes: Sequence[int] | None = None,
        rid: str | None = None,
        **keys: Any,
    ) -> Any:
        """A request is received: state, limits, queue. ``keys`` are those of the API; ``becomes``
        is what SGLang makes of its prompt."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.sampling.sampling_params import SamplingParams

        from sgl_skipkv.patches.engine.scheduler import open_request

        self.count["arrived"] += 1
        # SGLang queues a prompt for ever that leaves less than a page of the pool beside its own.
        prompt = prompt[: page_floor(POOL - self.page_size - 2, self.page_size)]
        if self.drops and "kv_params" in keys:
            drops = bool(keys.get("kv_reuse"))
            keys["kv_params"] = {**keys["kv_params"], "drop_thoughts": drops}
        params = SamplingParams(
            max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, custom_params=keys or None
        )
        params.normalize(None)
        req = Req(
            rid=rid or f"r{self.count['arrived']}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=params,
            eos_token_ids={STOP},
            vocab_size=VOCAB,
            extra_key=extra_key,
            cache_salt=cache_salt,
            **self.address,
        )
        self.arrived.append(req)
        self.received = received = SimpleNamespace(
            rid=req.rid,
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=5,
            mm_inputs=None,
            session_params=None,
            session_id=None,
            return_routed_experts=False,
            return_indexer_topk=False,
        )
        open_request(req, self, received)
        if req.to_finish is not None and not self.queues_refused:
            return req
        if becomes is not None:
            req.origin_input_ids = array("q", becomes)
        Scheduler.init_req_max_new_tokens(self, req)
        Scheduler._add_request_to_queue(self, req)
        return req

    def abort(self, req: Any) -> None:
        """``Scheduler.abort_request``: by where the request is."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        from sgl_skipkv.patches.engine.backup import drop_backup

        self.count["aborts"] += 1
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
            self.backed_up.pop(req.rid, None)
            abort = SimpleNamespace(finished_reason=None, abort_message=None)
            drop_backup(self, abort, req)
        elif req is self.chunked_req:
            self.pending_chunk_abort = True
        elif not req.finished():
            req.to_finish = FINISH_ABORT("Aborted")

    def pause(self) -> None:
        """``Scheduler.pause_generation(mode="retract")``: everybody gives way, and queues again."""
        from sgl_skipkv.patches.engine.backup import forget_backups

        forget_backups(World._pause, self, SimpleNamespace(mode="retract"))
        self.backed_up.clear()
        assert not self.runtime.host_memory.used_bytes, "KV that must be computed again"

    def _pause(self, _: Any) -> None:
        from sglang.srt.managers.schedule_batch import retract_all
        from sglang.srt.managers.scheduler import Scheduler

        self._process(0)
        running = [req for req in self.owners() if not req.finished()]
        self.last_batch = None
        retract_all(
            reqs=running,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
        )
        for req in running:
            self._lose_row(req)
            Scheduler._add_request_to_queue(self, req)
        self.running_batch.filter_batch(keep_indices=[])
        self.running_batch.batch_is_full = False
        self.chunked_req = None

    def flush(self) -> bool:
        """``Scheduler.flush_cache``: only an idle server does it."""
        from sgl_skipkv.patches.engine.backup import forget_flushed

        if not self.is_idle():
            return False
        self.last_batch = None
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        forget_flushed(True, self)
        self.left.clear()
        known = self.runtime.histories._by_use
        assert not any(history.has_kv for history in known), "histories of an empty tree"
        assert not self.runtime.histories.memory.used_bytes, "recordings of an empty tree"
        return True

    def evict_tree(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree_cache.evict(EvictParams(num_tokens=tokens))

    def drain(self) -> None:
        """Abort everything, run dry, empty the tree: nothing may be left anywhere."""
        for req in [*self.waiting_queue, *self.owners()]:
            self.abort(req)
        for _ in range(20):  # a prompt in chunks is prefilled to its end, aborted or not
            self.step()
            self.check()
            if self.is_idle():
                break
        assert self.is_idle() and self.runtime.open_requests == 0
        for req in self.finished:
            self.probe([*req.origin_input_ids, *req.output_ids], separated(req))
        self.probe_histories()
        self.evict_tree(POOL)
        self.check()
        assert not self.runtime.host_memory.used_bytes, "a backup outlives its call"
        self.check_empty()
        assert self.req_to_token_pool.available_size() == ROWS
        assert self.flush()
