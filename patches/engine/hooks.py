"""Hooks into SGLang's scheduler, memory and forward passes: all are installed, or none."""

from __future__ import annotations

from sgl_skipkv.patches.hook import Hook, after, around, before, extends, uses

ENGINE_HOOKS: tuple[Hook, ...] = (
    # -- life of a request
    around(
        "managers.scheduler.Scheduler.init_req_max_new_tokens(self, req)",
        "engine.scheduler:bound_new_tokens",
        "a budgeted trace may be longer than the pool",
    ),
    around(
        "managers.scheduler.Scheduler._add_request_to_queue(self, req, is_retracted=False)",
        "engine.scheduler:refuse_unrecomputable",
        "a request that can be neither restored nor recomputed must not wait for ever",
    ),
    after(
        "managers.scheduler.Scheduler.get_prefill_adder_class(self)",
        "engine.admission:budgeted_adder_class",
        "admission reserves the most KV that a request can ever hold",
    ),
    extends(
        "managers.schedule_policy.PrefillAdder.add_one_req(self, req, has_chunked_req, "
        "truncation_align_size)",
        "engine.admission:_BudgetedAdder",
        "reserve the future KV tokens of a candidate",
    ),
    extends(
        "managers.schedule_policy.PrefillAdder.add_chunked_req(self, req)",
        "engine.admission:_BudgetedAdder",
        "reserve the future KV tokens of a chunked prompt",
    ),
    extends(
        "managers.schedule_policy.PrefillAdder.preempt_to_schedule(self, req)",
        "engine.admission:_BudgetedAdder",
        "never preempt a request that can be neither restored nor recomputed",
    ),
    extends(
        "managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset(self, req)",
        "engine.admission:_BudgetedAdder",
        "reserve the future KV tokens of running requests",
    ),
    after(
        "managers.schedule_batch.ScheduleBatch.prepare_for_extend(self)",
        "engine.batch:admit_rows",
        "a request has a row of the page table",
    ),
    after(
        "managers.schedule_batch.Req._compute_max_prefix_len(self, input_len)",
        "engine.retraction:limit_prefix_match",
        "a request matches at most its prompt in the radix tree",
    ),
    after(
        "managers.schedule_batch.Req.reset_for_retract(self)",
        "engine.retraction:reset_request",
        "a retracted request is restored, or its eviction starts again",
    ),
    after(
        "managers.schedule_batch.Req.init_next_round_input(self, tree_cache=None, cow_mamba=None)",
        "engine.backup:shorten_input",
        "a request with a backup is prefilled with the length of its row",
    ),
    around(
        "managers.schedule_batch.Req.init_next_round_input(self, tree_cache=None, cow_mamba=None)",
        "engine.reuse:continue_history",
        "a prompt that begins with an earlier request's prompt and output continues its row",
    ),
    after(
        "managers.schedule_batch.Req.refresh_fill_ids(self)",
        "engine.reuse:fill_with_keys",
        "the radix tree knows a history by its keys",
    ),
    around(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree(self, req, *, "
        "up_to, **kwargs)",
        "engine.reuse:split_behind_row_prompt",
        "the row of a history is split in the radix tree where its own prompt ends",
    ),
    after(
        "managers.schedule_batch.Req.owned_kv_len(self)",
        "engine.reuse:whole_row_length",
        "a row that is left for a next turn is filed as a whole",
    ),
    after(
        "managers.scheduler.Scheduler.record_weight_version_change(self, new_version)",
        "engine.new_weights:note_new_weights",
        "new weights are measured by the next request that evicts and finds the server idle",
    ),
    after(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "end_weight_update(self, recv_req)",
        "engine.new_weights:note_updated_weights",
        "a trainer may write weights from outside",
    ),
    before(
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "_observe_weight_load(self, source)",
        "engine.new_weights:note_weight_update",
        "an update may fail on one rank, and all of them must know that there was one",
    ),
    before(
        "managers.scheduler.Scheduler.get_next_batch_to_run(self, running_batch, last_batch)",
        "engine.new_weights:measure_together",
        "with DP attention the ranks measure new weights in a step of all of them",
    ),
    before(
        "disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue(self)",
        "engine.new_weights:measure_before_arrivals",
        "the same of a decode server, before prompts arrive",
    ),
    after(
        "managers.scheduler.Scheduler.flush_cache(self, empty_cache=True)",
        "engine.backup:forget_flushed",
        "histories live as long as the tree, and backups as long as the weights",
    ),
    around(
        "mem_cache.allocation._prefix_kv_indices(batch, req)",
        "engine.backup:row_slots",
        "a row is restored from its backup, or copied from a history that it may evict from",
    ),
    before(
        "managers.scheduler.Scheduler.send_abort_output(self, abort_req, req)",
        "engine.backup:drop_backup",
        "free the backup of a request that ends while it waits, and report its summary",
        "0.5.23",
    ),
    before(
        "managers.scheduler_components.output_sender.SenderWrapper.send_output(self, output, "
        "recv_obj=None)",
        "engine.sglang_0_5_22:drop_aborted",
        "free the backup of a request that ends while it waits, and report its summary",
        "0.5.22",
    ),
    around(
        "managers.scheduler.Scheduler.pause_generation(self, recv_req)",
        "engine.backup:forget_backups",
        "KV of old weights must not be restored",
    ),
    after(
        "managers.schedule_batch.ScheduleBatch._get_decode_retraction_order(reqs)",
        "engine.retraction:order_victims",
        "retract a request that can be neither restored nor recomputed last",
    ),
    around(
        "mem_cache.common.release_kv_cache(req, tree_cache, *, checkpoint)",
        "engine.release:close_request",
        "close or back up a request that loses its row",
    ),
    uses(
        "managers.scheduler_components.dp_attn.SchedulerDPAttnAdapter."
        "maybe_prepare_mlp_sync_batch(self, batch, need_sync=None)",
        "startup.measurements:_prefill",
        "with DP attention the measurement is a step of all ranks",
    ),
    uses(
        "managers.scheduler._make_abort_req(req, finished_reason=None)",
        "engine.waiting:_end",
        "end a request that waits",
    ),
    # -- a decode server of PD disaggregation
    around(
        "disaggregation.decode.SchedulerDisaggregationDecodeMixin._get_new_prebuilt_batch(self, "
        "running_batch)",
        "engine.pd_decode:hold_back_untracked",
        "a request starts when a track is free for it",
    ),
    before(
        "disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin."
        "process_prebuilt(self, future_map)",
        "engine.pd_decode:start_rows",
        "a request has a row of the page table, without a prefill",
    ),
    around(
        "disaggregation.decode.DecodePreallocQueue._pre_alloc_fill_len(req)",
        "engine.pd_decode:row_tokens",
        "a row that was compacted is restored with its own length",
    ),
    around(
        "mem_cache.common.backup_kv_cache(req, tree_cache, req_to_token_pool, "
        "token_to_kv_pool_allocator, backend)",
        "engine.pd_decode:back_up_row",
        "SGLang's copy is of a row as long as the sequence, and has no recordings",
    ),
    around(
        "mem_cache.common.discard_kv_cache_backup(req, tree_cache, backend)",
        "engine.pd_decode:discard_backup",
        "a budgeted request has no copy of SGLang's",
    ),
    around(
        "mem_cache.common.restore_kv_cache(req, tree_cache, req_to_token_pool, "
        "token_to_kv_pool_allocator, backend)",
        "engine.pd_decode:restore_row",
        "SGLang restores a row as long as the sequence",
    ),
    around(
        "disaggregation.decode.DecodePreallocQueue.hold_rebootstrap(self, req)",
        "engine.pd_decode:end_paused",
        "a prefill server does not record what it recomputes",
    ),
    around(
        "disaggregation.decode.DecodePreallocQueue._active_reserved_tokens(self, n_active=None, "
        "extra_reserved_reqs=0)",
        "engine.pd_admission:reserve_growth",
        "reserve the future KV tokens of requests that have a row",
    ),
    around(
        "disaggregation.decode.DecodePreallocQueue._need_space_for_single_req(self, "
        "retractable_tokens=None)",
        "engine.pd_admission:needed_by_longest",
        "reserve the future KV tokens of running requests",
    ),
    around(
        "disaggregation.decode.DecodePreallocQueue._required_admission_tokens(self, req, "
        "allocated_tokens, prefix_len, retractable_tokens)",
        "engine.pd_admission:needed_by_arrival",
        "reserve the future KV tokens of a candidate",
    ),
    around(
        "disaggregation.decode.DecodePreallocQueue._prealloc_required_tokens(self, req)",
        "engine.pd_admission:needed_by_restored",
        "reserve the future KV tokens of a request that is restored",
    ),
    # -- rows in the radix tree
    around(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.init_load_back(self, params)",
        "engine.hicache:load_row",
        "HiCache loads all of a history's row or nothing",
    ),
    around(
        "managers.scheduler.Scheduler.attach_hicache_storage_wrapped(self, recv_req)",
        "engine.hicache:refuse_storage",
        "a storage takes the private keys of histories for token ids",
    ),
    uses(
        "managers.cache_controller.LayerDoneCounter.update_producer(self)",
        "engine.hicache:wait_for_load",
        "a history is copied behind its load",
    ),
    uses(
        "mem_cache.common._req_radix_key(tree_cache, req, token_ids, max_prefix_len=None)",
        "engine.reuse:_has_whole_row",
        "the key of a history is in its request's namespace",
    ),
    uses(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix(self, params)",
        "engine.reuse:_has_whole_row",
        "find the last page of a history, and what a copied row still shares",
    ),
    uses(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.lock(self, node_id, "
        "skip_lock_components=())",
        "engine.reuse:_lock_shared",
        "a copied row locks what it still shares",
    ),
    uses(
        "mem_cache.unified_radix_cache.UnifiedRadixCache.unlock(self, lock)",
        "engine.reuse:_lock_shared",
        "and no more than that",
    ),
    uses(
        "mem_cache.allocation.alloc_token_slots(tree_cache, num_tokens)",
        "engine.kv_cache:alloc_slots",
        "slots for a restored or copied row",
    ),
    # -- window layers with a pool of their own
    around(
        "managers.schedule_batch.ScheduleBatch._evict_swa(self, req, pre_len, *, "
        "eviction_interval=1)",
        "engine.window_pool:move_cursor",
        "what has left the windows of a row is counted in row entries",
    ),
    around(
        "mem_cache.common.checkpoint_kv_cache(req, tree_cache)",
        "engine.window_pool:free_behind_chunk",
        "what is not inserted of a prompt in chunks must not fill the window pool",
    ),
    uses(
        "mem_cache.base_prefix_cache.BasePrefixCache.evict_sliding_windows(self, req, pre_len, *, "
        "eviction_interval=1)",
        "engine.window_pool:free_out_of_windows",
        "what a compaction may evict has left the windows",
    ),
    uses(
        "mem_cache.allocator.swa.SWATokenToKVPoolAllocator.free_full_segment(self, free_index, *, "
        "start_pos)",
        "engine.window_pool:free_evicted",
        "give evicted slots back that have none in the window pool",
    ),
    uses(
        "mem_cache.allocator.swa.SWATokenToKVPoolAllocator.set_full_to_swa_mapping(self, "
        "full_indices, swa_indices)",
        "engine.window_pool:alloc_windowed_slots",
        "of a restored row only the last tokens have slots in the window pool",
    ),
    uses(
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.free_page_ids(self, page_ids)",
        "engine.window_pool:free_moved",
        "give window pages back that a compacted row does not need any more",
    ),
    uses(
        "mem_cache.allocator.swa.SWATokenToKVPoolAllocator.free_swa_segment(self, free_index, *, "
        "start_pos)",
        "engine.window_pool:free_unmoved",
        "give windows back that the radix tree must not get",
    ),
    # -- layers with a state instead of KV
    around(
        "mem_cache.unified_cache.components.mamba.MambaComponent.prepare_for_caching_req(self, "
        "req, insert_params, token_ids_len, is_finished)",
        "engine.release:keep_states",
        "a prefix in the radix tree would have the states of a longer one",
    ),
    around(
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
        "_mamba_prefix_cache_update(self, req, batch, result, i, known_boundary=False)",
        "engine.linear_states:forget_copy",
        "SGLang takes a row that is shorter than its text for an error",
    ),
    # -- speculative decoding
    before(
        "speculative.eagle_worker_v2.EagleDraftWorker.draft_forward(self, forward_batch)",
        "engine.speculation:place_draft",
        "positions of drafts come from the logical length",
    ),
    before(
        "speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner._replay_graph(self, "
        "shape_key, forward_batch)",
        "engine.speculation:place_captured_draft",
        "the same where drafts are replayed from a CUDA graph",
    ),
    after(
        "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
        "_resolve_spec_v2_tokens(self, result, batch)",
        "engine.speculation:read_step",
        "what is kept must not depend on when a step's result is read",
    ),
    uses(
        "mem_cache.allocation_sizing.get_alloc_reserve_per_decode()",
        "engine.speculation:reserved_tokens",
        "slots that a step reserves for drafts",
    ),
    # -- the compaction
    uses(
        "mem_cache.allocator.base.BaseTokenToKVPoolAllocator.free_segment(self, free_index, *, "
        "start_pos)",
        "engine.kv_cache:release_evicted",
        "give evicted slots back",
    ),
    uses(
        "mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.free_segment(self, free_index, *, "
        "start_pos)",
        "engine.kv_cache:release_evicted",
        "give pages back that hold no token any more",
    ),
    before(
        "managers.schedule_batch.ScheduleBatch.check_decode_mem(self, selected_indices=None)",
        "engine.batch:compact_due_requests",
        "compact before memory is checked",
    ),
    after(
        "mem_cache.unified_cache.components.base.TreeComponent.prepare_for_caching_req(self, "
        "req, insert_params, token_ids_len, is_finished)",
        "engine.release:limit_insert",
        "a compacted row in the radix tree would be wrong KV under a valid key",
    ),
    after(
        "model_executor.forward_batch_info.ForwardBatch.init_new(cls, batch, model_runner, *, "
        "capture_hidden_mode=None, return_hidden_states_before_norm, "
        "extend_position_info=None, spec_mrope_positions=None, kv_loc_plan=None, "
        "write_cols=None)",
        "engine.forward:prepare_forward",
        "positions come from the logical length",
    ),
    before(
        "layers.sampler.Sampler.forward(self, logits_output, sampling_info, return_logprob, "
        "top_logprobs_nums, token_ids_logprobs, positions, *, logprob_logits=None)",
        "engine.sampling:shift_positions",
        "seeded noise depends on the position; after a prefill SGLang uses the row length",
    ),
    before(
        "layers.radix_attention.RadixAttention.forward(self, q, k, v, forward_batch, "
        "save_kv_cache=True, key_value_num_tokens=None, **kwargs)",
        "engine.forward:record_queries",
        "record the last queries, which score the cached keys",
    ),
    around(
        "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph("
        "self, forward_batch)",
        "engine.model_side:run_recorded_prefill_eagerly",
        "what a prefill records depends on its batch, so a graph cannot replay it",
    ),
    around(
        "managers.scheduler_components.dp_attn._local_prefill_cuda_graph_vote(*, local_batch, "
        "num_tokens, prefill_graph_runner, coordinated_prefill, breakable_prefill, spec_algorithm, "
        "model_config)",
        "engine.dp_attention:vote_against_prefill_graph",
        "with DP attention all ranks replay a graph, or none does",
        "0.5.23",
    ),
    before(
        "layers.logits_processor.LogitsProcessor.forward(self, input_ids, hidden_states, "
        "lm_head, logits_metadata, aux_hidden_states=None, hidden_states_before_norm=None)",
        "engine.forward:record_hidden",
        "record final hidden states for sentence vectors",
    ),
    # -- steering
    uses(
        "layers.layer_boundary.residual.batch.stream_of(forward_batch)",
        "engine.steering:residual_of",
        "the vector is added once to the residual stream, on every rank",
    ),
    uses(
        "layers.layer_boundary.residual.batch.snapshot(hidden_states, forward_batch)",
        "engine.hidden_capture:HiddenCapture",
        "read a layer's output, to extract a steering vector",
    ),
    uses(
        "model_executor.runner_utils.capture_mode.get_is_capture_mode()",
        "engine.steering:is_capturing",
        "a captured step records and steers every row",
    ),
    # -- output
    after(
        "managers.scheduler.Scheduler.get_output_streamer_class(self)",
        "engine.output:reporting_streamer_class",
        "send meta_info['skipkv'] to the main process",
    ),
)
