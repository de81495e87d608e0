"""The scheduler's loop: ``get_next_batch_to_run`` and ``process_batch_result``, step by step.

Admission, batches, memory and retraction are SGLang's own functions with our hooks applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pool_forward import Forward


class Loop(Forward):
    """What turns: the scheduler's state is by the names that SGLang and the hooks use.

    Attributes:
        overlap: whether a batch is launched before the last one's results are looked at.
        retract_now: the next decode step retracts, as in SGLang's own test mode.
        pending_chunk_abort: the request in the middle of its prefill is to end.
    """

    def step(self) -> None:
        """One turn of ``event_loop_overlap`` or ``event_loop_normal``."""
        aborted = len(self.aborted)
        batch = self._next_batch()
        made_room = len(self.aborted) > aborted  # by the end of the last one, which was too long
        if batch is None and not self.result_queue and not self.owners() and not made_room:
            assert not self.waiting_queue, "everybody waits, and nobody runs who could make room"
        if batch is not None:
            self.result_queue.append((batch.copy(), self._forward(batch)))
        self._process(1 if self.overlap and batch is not None else 0)
        self.last_batch = batch

    def run_dry(self) -> None:
        """To the end of every request."""
        while self.owners() or self.waiting_queue:
            self.step()
            self.check()

    def _process(self, left: int) -> None:
        """Process results until this many are left."""
        while len(self.result_queue) > left:
            done, tokens = self.result_queue.pop(0)
            if not self.result_queue:
                self.forward_stream.run()  # it has a result, so it has ended
            self.token_to_kv_pool_allocator.free_group_begin()
            if done.forward_mode.is_extend():
                self._finish_prefill(done, tokens)
            else:
                self._finish_decode(done, tokens)
            self.token_to_kv_pool_allocator.free_group_end()
            if self.tree_cache.cache_controller is not None:
                self.tree_cache.flush_pending_backups()

    def is_idle(self) -> bool:
        busy = self.waiting_queue or self.result_queue or self.chunked_req is not None
        return not busy and not self.owners()

    def _next_batch(self) -> Any:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.mem_cache import common

        if self.pending_chunk_abort and self.chunked_req is not None:
            req, self.chunked_req = self.chunked_req, None
            req.finished_reason = FINISH_ABORT("Aborted")
            common.release_kv_cache(req, self.tree_cache, checkpoint=False)
            self._forget(req)
        self.pending_chunk_abort = False
        if self.tree_cache.cache_controller is not None:
            self.tree_cache.check_hicache_events()
        leaving = set()
        if self.chunked_req is not None:
            leaving.add(self.chunked_req)
            if self.chunked_req.extend_end > self.chunked_req.prefix_len:
                common.checkpoint_kv_cache(self.chunked_req, self.tree_cache)
        last = self.last_batch
        if last is not None and last.forward_mode.is_extend():
            if last.chunked_req is not None:
                leaving.add(last.chunked_req)
            last.filter_batch(reqs_to_exclude=list(leaving))
            if not last.is_empty() and last is not self.running_batch:
                if self.running_batch.is_empty():
                    self.running_batch = last
                else:
                    self.running_batch.merge_batch(last)
        self.running_batch.filter_batch()
        prefill = self._prefill_batch()
        if prefill is not None:
            return prefill
        if self.running_batch.is_empty():
            return None
        decode = self._decode_batch(self.running_batch)
        return None if decode is None or decode.is_empty() else decode

    def adder(self) -> Any:
        """SGLang's admission of one step."""
        from sglang.srt.managers.scheduler import Scheduler

        return Scheduler.get_prefill_adder_class(self)(
            self.page_size,
            self.tree_cache,
            self.token_to_kv_pool_allocator,
            self.running_batch,
            self.token_ratio,
            10_000,
            self.chunked_prefill_size,
        )

    def _prefill_batch(self) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.schedule_policy import AddReqResult

        if not self.waiting_queue and self.chunked_req is None:
            return None
        adder = self.adder()
        if self.chunked_req is not None:
            self.chunked_req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        states = getattr(self.req_to_token_pool, "mamba_allocator", None)
        if states is not None:
            states.alloc_group_begin(len(self.waiting_queue))
        for req in self.waiting_queue:
            held = sum(r.kv.holds_kv for r in adder.can_run_list)
            if len(adder.can_run_list) >= self.req_to_token_pool.available_size() + held:
                break
            req.init_next_round_input(self.tree_cache)
            added = adder.add_one_req(
                req, has_chunked_req=self.chunked_req is not None, truncation_align_size=None
            )
            if added != AddReqResult.CONTINUE:
                if req not in adder.can_run_list[-1:]:
                    self._revert_match(req)
                break
        if states is not None:
            states.alloc_group_end()
        chosen = adder.can_run_list
        if not chosen:
            return None
        self.waiting_queue = [req for req in self.waiting_queue if req not in chosen]
        if adder.new_chunked_req is not None:
            assert self.chunked_req is None
            self.chunked_req = adder.new_chunked_req
        if self.chunked_req is not None:
            self.chunked_req.inflight_middle_chunks += 1
        batch = ScheduleBatch.init_new(
            chosen,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.overlap,
            self.spec_algorithm,
            chunked_req=self.chunked_req,
        )
        retracted = {
            req.rid for req in chosen if req.is_retracted and req.rid not in self.backed_up
        }
        if self.tree_cache.cache_controller is not None:
            batch.hicache_consumer_index = self.tree_cache.ready_to_load_host_cache()
        batch.prepare_for_extend()
        self.recomputed |= retracted
        self.count["prefix hits"] += sum(length > 0 for length in batch.prefix_lens)
        return batch

    def _revert_match(self, req: Any) -> None:
        """Who is not admitted keeps nothing of the prefix that it has matched."""
        if not hasattr(self.req_to_token_pool, "mamba_allocator"):
            return
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False
        if req.kv.holds_mamba:
            self.req_to_token_pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
            req.kv.mamba_pool_idx = None

    def look_at_waiting(self) -> None:
        """The scheduler looks at who waits, and finds no room."""
        for req in self.waiting_queue:
            req.init_next_round_input(self.tree_cache)
            self._revert_match(req)

    def _decode_batch(self, batch: Any) -> Any:
        from sglang.srt.managers.scheduler import Scheduler

        from sgl_skipkv.patches.engine.backup import drop_backup

        queued = {id(req) for done, _ in self.result_queue for req in done.reqs}
        finishing = [
            req for req in batch.reqs if id(req) in queued and req.next_output_finishes_by_length()
        ]
        batch.filter_batch(reqs_to_exclude=finishing)
        if batch.is_empty():
            return batch
        before = {req.rid: self._row(req) for req in batch.reqs}
        compactions = {req.rid: self._compactions(req) for req in batch.reqs}
        enough = batch.check_decode_mem()
        for req in batch.reqs:
            if self._compactions(req) > compactions[req.rid]:
                self._book_compaction(req, before[req.rid])
        if not enough and finishing:
            self.count["decode steps that waited for memory"] += 1
            return None
        if not enough or self.retract_now:
            self.count["retractions, pool full"] += not enough
            self.retract_now = False
            ahead = {req.rid for req in batch.reqs if self._compacted_ahead(req)}
            retracted, _, hopeless = batch.retract_decode()
            self.count["recomputed because just compacted"] += sum(
                req.rid in ahead for req in retracted
            )
            for req in hopeless:
                self.rows.pop(req.rid)
                self.aborted.append(req)
                drop_backup(self, SimpleNamespace(finished_reason=None, abort_message=None), req)
            for req in retracted:
                self._lose_row(req)
                Scheduler._add_request_to_queue(self, req, is_retracted=True)
        if not batch.is_empty():
            batch.prepare_for_decode()
        return batch

    def _compacted_ahead(self, req: Any) -> bool:
        state = getattr(req, "skipkv", None)
        generated = len(req.output_ids)
        return state is not None and self.runtime.compactor.compacted_ahead(state, generated)

    # -- results

    def _finish_prefill(self, batch: Any, tokens: list[int | None]) -> None:
        from sglang.srt.mem_cache import common

        for req, token in zip(batch.reqs, tokens, strict=True):
            if (req.finished() and req.inflight_middle_chunks <= 0) or req.is_retracted:
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            self._take_token(req, token)
            if not req.finished():
                common.checkpoint_kv_cache(req, self.tree_cache)

    def _finish_decode(self, batch: Any, tokens: list[int | None]) -> None:
        for req, token in zip(batch.reqs, tokens, strict=True):
            if not (self.overlap and (req.finished() or req.is_retracted)):
                self._take_token(req, token)

    def _take_token(self, req: Any, token: int | None) -> None:
        """A sampled token; the last one gives the request's KV back."""
        from sglang.srt.mem_cache import common

        req.output_ids.append(token)
        req.update_finish_state()
        if req.finished():
            slots = self._row(req)
            common.release_kv_cache(req, self.tree_cache, checkpoint=True)
            self._forget(req, slots)

    def _forget(self, req: Any, slots: Sequence[int] = ()) -> None:
        row = self.rows.pop(req.rid)
        if row:
            self._leave(req, row, slots)
        self.recomputed.discard(req.rid)
        self.finished.append(req)
        self.count["finished"] += 1
