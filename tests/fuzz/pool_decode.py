"""A decode server of PD disaggregation, of a ``World``: SGLang's real queues, loop and retraction.

Only the network is made up (``pool_network.py``). Prompts arrive in slots that SGLang has given to
them, and a request begins with a step that computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from pool_content import CONTEXT, POOL, ROWS
from pool_decode_books import CLIPPED, DecodeBooks
from pool_network import ADDRESS, Manager, Receiver
from pool_world import World

#: steps without anybody who runs or arrives, while somebody waits
PATIENCE = 3


@contextmanager
def decode_flags(
    *, radix: bool = True, reserved: int = 4, sglang_backup: str = "cpu_tensor"
) -> Iterator[None]:
    """A published configuration is that of a decode server.

    Args:
        radix: whether it has a radix cache.
        reserved: tokens that SGLang keeps free for each running request.
        sglang_backup: where SGLang keeps the KV of retracted requests without a budget.
    """
    from sglang.srt.disaggregation import decode
    from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

    flags = get_disagg().override(
        disaggregation_mode="decode",
        disaggregation_decode_enable_radix_cache=radix,
        disaggregation_decode_retraction_backup=sglang_backup,
        num_reserved_decode_tokens=reserved,
    )
    alone = SimpleNamespace(cpu_group=SimpleNamespace(size=lambda: 1))
    usual, decode.CLIP_MAX_NEW_TOKEN = decode.CLIP_MAX_NEW_TOKEN, CLIPPED
    try:
        with (
            flags,
            get_memory().override(disable_radix_cache=not radix),
            get_parallel().override(attn_tp_group=alone),
        ):
            yield
    finally:
        decode.CLIP_MAX_NEW_TOKEN = usual


class Silent:
    """A part of the scheduler that has nothing to do here: every call returns None."""

    def __init__(self, **known: Any) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: None


class Results(list[Any]):
    """The queue of results, as the world and SGLang empty it."""

    def popleft(self) -> Any:
        return self.pop(0)


class DecodeWorld(DecodeBooks, World):
    """What is not said here is the real ``Scheduler``'s own.

    Args:
        radix: whether the tree keeps prompts.
        running: how many requests run at most; the other rows are for such as arrive.
        reserved, sglang_backup: see ``decode_flags``, in which the world has to live.
        network: of what the network does.

    Attributes:
        idle_steps: since somebody ran or arrived.
    """

    queues_refused = True
    max_new_tokens_limit = None
    enable_lora = enable_hisparse = enable_priority_scheduling = enable_decode_hicache = False
    enable_hierarchical_cache = enable_lmcache = enable_overlap_mlx = False
    enable_continuous_input_polling = enable_skip_finishing_decode = False
    mm_receiver = dllm_config = decode_offload_manager = hisparse_coordinator = None
    draft_worker = rust_server = scheduler_stage_metrics = kv_checksum_computer = None
    forward_ct = random_seed = 0

    def __init__(
        self,
        *,
        radix: bool = True,
        running: int = 3,
        reserved: int = 4,
        network: int | None = None,
        **how: Any,
    ) -> None:
        self.has_tree, self.running_rows = radix, running
        super().__init__(**how)
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.overlap_utils import FutureMap

        self.disaggregation_mode = DisaggregationMode.DECODE
        self.enable_overlap = self.overlap
        self.max_running_requests, self.network = running, network
        # Of longer ones without a budget SGLang admits, retracts and then never restores some.
        self.max_req_len = POOL - reserved - self.page_size - CLIPPED
        self.result_queue = Results()
        self.steps = self.idle_steps = 0
        self._engine_paused, self._pause_started_at, self._pause_intervals = False, None, []
        self.grammar_manager, self.ipc_channels = (
            Silent(grammar_queue=()),
            SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=self._send_abort)),
        )
        self.metrics_reporter = Silent(
            enable_metrics=False, current_scheduler_metrics_enabled=False, is_stats_logging_rank=0
        )
        self.new_token_ratio_tracker = Silent(current=0.0)
        self.ngram_embedding_manager = self.beam_coordinator = self.kv_events_publisher = Silent()
        self.dllm_manager = Silent()
        self.dp_attn_adapter = SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda batch: batch)
        self.output_streamer = SimpleNamespace(stream_output=self._stream)
        self.batch_result_processor = SimpleNamespace(
            process_batch_result_prebuilt=self._begin,
            _maybe_update_reasoning_tokens=lambda *unused: None,
        )
        self.tp_worker = SimpleNamespace(is_hybrid_swa=False)
        self.future_map = FutureMap(self.device, self.spec_algorithm, self.req_to_token_pool)
        self._make_queues(reserved)

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.managers.scheduler import Scheduler

        return getattr(Scheduler, name).__get__(self)

    def _row_pool(self) -> Any:
        from sglang.srt.disaggregation.decode import DecodeReqToTokenPool

        return DecodeReqToTokenPool(
            size=self.running_rows,
            max_context_len=CONTEXT,
            device=self.device,
            enable_memory_saver=False,
            pre_alloc_size=ROWS - self.running_rows,
        )

    def _bind(self, **given: Any) -> None:
        super()._bind(**given)
        self.runtime.recomputes = False
        limits = replace(
            self.skipkv.limits, prompt_is_elsewhere=True, without_reuse=("PD disaggregation",)
        )
        self.skipkv = self.req_to_token_pool.skipkv = replace(self.skipkv, limits=limits)
        self._count_calls()

    def _make_queues(self, reserved: int) -> None:
        """As ``Scheduler.init_disaggregation``."""
        from sglang.srt.disaggregation.decode import (
            DecodePreallocQueue,
            DecodeRequest,
            DecodeTransferQueue,
        )
        from sglang.srt.disaggregation.utils import (
            MetadataBuffers,
            ReqToMetadataIdxAllocator,
            TransferBackend,
        )

        class Prealloc(DecodePreallocQueue):  # type: ignore[misc]  # untyped
            """With receivers of the made-up network."""

            def _init_kv_manager(self) -> Manager:
                return Manager()

            def _create_receiver_and_enqueue(self, req: Any, is_rebootstrap: bool = False) -> Any:
                receiver = Receiver(self.scheduler, req)
                self.queue.append(
                    DecodeRequest(req=req, kv_receiver=receiver, is_rebootstrap=is_rebootstrap)
                )
                return self.queue[-1]

        size = self.req_to_token_pool.size * 2
        of_metadata = {
            "req_to_metadata_buffer_idx_allocator": ReqToMetadataIdxAllocator(size),
            "metadata_buffers": MetadataBuffers(size, 16, torch.float32, 0),
        }
        self.metadata_buffers = of_metadata["metadata_buffers"]
        self.metadata_slots = of_metadata["req_to_metadata_buffer_idx_allocator"]
        shared = {**of_metadata, "scheduler": self, "tree_cache": self.tree_cache}
        self.disagg_decode_prealloc_queue: Any = None
        self.disagg_decode_transfer_queue = DecodeTransferQueue(**shared)
        self.disagg_decode_prealloc_queue = Prealloc(
            **shared,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            draft_token_to_kv_pool=None,
            transfer_queue=self.disagg_decode_transfer_queue,
            gpu_id=0,
            bootstrap_port=0,
            max_total_num_tokens=POOL,
            num_reserved_decode_tokens=reserved,
            transfer_backend=TransferBackend.MOONCAKE,
        )

    # -- requests

    def arrive(self, prompt: Any, max_new_tokens: int, **how: Any) -> Any:
        number = self.count["arrived"] + 1
        self.address = MappingProxyType({**ADDRESS, "bootstrap_room": number})
        # SGLang aborts every request whose id begins like that.
        how = {"rid": f"r{number}.", **how}
        return super().arrive(prompt, max_new_tokens, **how)

    def waiting(self) -> list[Any]:
        """Requests that do not run, wherever they are."""
        prealloc, transfer = self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue
        arriving = [one.req for one in chain(prealloc.queue, transfer.queue)]
        held = prealloc.held_rebootstrap_reqs
        return [*arriving, *prealloc.retracted_queue, *self.waiting_queue, *held]

    def live(self) -> list[Any]:
        """Requests that have not ended, in the order of their arrival."""
        return [req for req in self.arrived if not self.ends[req.rid]]

    def owners(self) -> list[Any]:
        owners = super().owners()
        return owners + [req for req in self.waiting() if req.kv.holds_kv]

    def is_idle(self) -> bool:
        return not self.waiting() and bool(self.is_fully_idle())

    def abort(self, req: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.count["aborts"] += 1
        self.abort_request(AbortReq(rid=req.rid))
        self._drop_rows()

    def pause(self, mode: str = "retract") -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self.pause_generation(PauseGenerationReqInput(mode=mode))
        self._drop_rows()
        self.count[f"pauses, {mode}"] += 1
        if mode == "retract":
            assert not self.runtime.host_memory.used_bytes, "KV of old weights"

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._engine_paused:
            self.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def flush(self) -> bool:
        done: bool = self.flush_cache(empty_cache=False)
        self.count["flushes"] += done
        return done

    def run_dry(self) -> None:
        while not self.is_idle():
            self.step()
            self.check()

    def drain(self) -> None:
        self.resume()
        for req in self.live():
            self.abort(req)
        super().drain()
        assert self.metadata_slots.available_size() == self.metadata_slots.size
        assert not self.backed_up
        for req in self.arrived:
            assert self.ends[req.rid] == 1, f"{req.rid} has ended {self.ends[req.rid]} times"

    # -- steps

    def step(self) -> None:
        if self._engine_paused:
            return
        self.steps += 1
        super().step()
        queue = self.disagg_decode_prealloc_queue.queue
        transfers = self.disagg_decode_transfer_queue.queue
        moves = super().owners() or self.result_queue or transfers
        moves = moves or any(not one.waiting_for_input for one in queue)
        self.idle_steps = 0 if moves or not self.waiting() else self.idle_steps + 1
        assert self.idle_steps < PATIENCE, "everybody waits, and nobody runs who could make room"

    def _next_batch(self) -> Any:
        queue = self.disagg_decode_prealloc_queue
        for req in queue.retracted_queue:
            self.needed[req.rid], _ = queue._prealloc_required_tokens(req)
        self.process_decode_queue()
        self._book_rows()
        plan = self.get_next_disagg_decode_batch_to_run(running_batch=self.running_batch)
        self.running_batch = plan.running_batch
        self._drop_rows()
        return plan.batch_to_run

    def process_batch_result(self, batch: Any, tokens: Any) -> None:
        self.result_queue.insert(0, (batch, tokens))
        self._process(len(self.result_queue) - 1)

    def update_running_batch(self, batch: Any) -> Any:
        """SGLang's own, with a look at the rows before and after compactions."""
        from sglang.srt.managers import scheduler

        check = batch.check_decode_mem

        def booked(selected_indices: Any = None) -> bool:
            if selected_indices is not None:
                return bool(check(selected_indices=selected_indices))
            before = {req.rid: (self._row(req), self._compactions(req)) for req in batch.reqs}
            enough = check()
            for req in batch.reqs:
                row, compactions = before[req.rid]
                if self._compactions(req) > compactions:
                    self._book_compaction(req, row)
            self.count["retractions, pool full"] += not enough
            return bool(enough)

        batch.check_decode_mem, usual = booked, scheduler.TEST_RETRACT
        scheduler.TEST_RETRACT, self.retract_now = self.retract_now, False
        try:
            return scheduler.Scheduler.update_running_batch(self, batch)
        finally:
            scheduler.TEST_RETRACT = usual
            del batch.check_decode_mem

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        from sglang.srt.managers.scheduler import Scheduler

        if is_retracted:
            self.started.discard(req.rid)
            self._lose_row(req)
        Scheduler._add_request_to_queue(self, req, is_retracted=is_retracted)

    def _take_token(self, req: Any, token: int | None) -> None:
        self.tokens[req.rid] += 1
        super()._take_token(req, token)
        self._stream([req])

    def _begin(self, batch: Any) -> None:
        """Requests begin to run: what they have received or got back is on the device."""
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor,
        )

        for req in batch.reqs:
            slots, row = self._row(req), self.rows[req.rid]
            self._check_stored(slots, [entry.tag for entry in row])
            assert [self.content[slot] for slot in slots] == [entry.tag for entry in row]
            req.fed_next = int(self.future_map.output_tokens_buf[req.kv.req_pool_idx])
            assert req.fed_next == req.output_ids[-1]
            self.tokens[req.rid] += req.rid not in self.begun
            self.started.add(req.rid)
            self.begun.add(req.rid)
        self.count["begun"] += len(batch.reqs)
        SchedulerBatchResultProcessor.process_batch_result_prebuilt(self, batch)
        for req in batch.reqs:
            if req.finished():
                self._forget(req)
