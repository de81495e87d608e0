"""Where this package touches SGLang's scheduler, memory and forward passes.

Installed all together, or not at all.
"""

from __future__ import annotations

from sgl_skipkv.patches.seam import Seam

_SCHEDULER = "managers.scheduler.Scheduler"
_BATCH = "managers.schedule_batch.ScheduleBatch"
_REQ = "managers.schedule_batch.Req"
_ADDER = "managers.schedule_policy.PrefillAdder"

ENGINE_SEAMS: tuple[Seam, ...] = (
    # -- configuration and state
    Seam(
        f"{_SCHEDULER}.init_memory_pools",
        "around",
        "(self)",
        "startup:reserve",
        "buffers before the pool is sized, hooks before graphs are captured",
    ),
    # -- life of a call
    Seam(
        f"{_SCHEDULER}.init_req_max_new_tokens",
        "around",
        "(self, req)",
        "scheduler:bound_new_tokens",
        "a budgeted trace may be longer than the pool",
    ),
    Seam(
        f"{_SCHEDULER}._add_request_to_queue",
        "around",
        "(self, req, is_retracted=False)",
        "scheduler:refuse_unrecomputable",
        "a call that cannot come back must not wait for ever",
    ),
    Seam(
        f"{_SCHEDULER}.get_prefill_adder_class",
        "after",
        "(self)",
        "admission:budgeted_adder_class",
        "admission reserves what a call can ever hold",
    ),
    Seam(
        f"{_ADDER}.add_one_req",
        "extend",
        "(self, req, has_chunked_req, truncation_align_size)",
        "admission:_BudgetedAdder",
        "reserve the future KV tokens of a candidate",
    ),
    Seam(
        f"{_ADDER}.add_chunked_req",
        "extend",
        "(self, req)",
        "admission:_BudgetedAdder",
        "reserve the future KV tokens of a chunked prompt",
    ),
    Seam(
        f"{_ADDER}.preempt_to_schedule",
        "extend",
        "(self, req)",
        "admission:_BudgetedAdder",
        "a call that can be neither restored nor recomputed never gives way",
    ),
    Seam(
        f"{_ADDER}._get_running_request_total_token_offset",
        "extend",
        "(self, req)",
        "admission:_BudgetedAdder",
        "reserve the future KV tokens of running calls",
    ),
    Seam(
        f"{_BATCH}.prepare_for_extend", "after", "(self)", "batch:admit_rows", "a call got its row"
    ),
    Seam(
        f"{_REQ}._compute_max_prefix_len",
        "after",
        "(self, input_len)",
        "retraction:limit_prefix_match",
        "a call shares at most its prompt",
    ),
    Seam(
        f"{_REQ}.reset_for_retract",
        "after",
        "(self)",
        "retraction:reset_call",
        "a retracted call is restored, or its eviction starts anew",
    ),
    Seam(
        f"{_REQ}.init_next_round_input",
        "after",
        "(self, tree_cache=None, cow_mamba=None)",
        "backup:shorten_input",
        "a call with a backup is prefilled from its row, not from its trace",
    ),
    Seam(
        "mem_cache.allocation._prefix_kv_indices",
        "around",
        "(batch, req)",
        "backup:restore_row",
        "the row of a call with a backup comes from host memory",
    ),
    Seam(
        f"{_SCHEDULER}.send_abort_output",
        "after",
        "(self, abort_req, req)",
        "backup:drop_backup",
        "a call that ends while it waits gives host memory back",
    ),
    Seam(
        f"{_SCHEDULER}.pause_generation",
        "around",
        "(self, recv_req)",
        "backup:forget_backups",
        "KV of old weights must not come back",
    ),
    Seam(
        f"{_BATCH}._get_decode_retraction_order",
        "after",
        "(reqs)",
        "retraction:order_victims",
        "a call that cannot come back gives way last",
    ),
    Seam(
        "mem_cache.common.release_kv_cache",
        "around",
        "(req, tree_cache, *, checkpoint)",
        "release:close_call",
        "close a call's state with its row",
    ),
    # -- the compaction
    Seam(
        f"{_BATCH}.check_decode_mem",
        "before",
        "(self, selected_indices=None)",
        "batch:compact_due_requests",
        "compact before memory is checked",
    ),
    Seam(
        "mem_cache.unified_cache.components.base.TreeComponent.prepare_for_caching_req",
        "after",
        "(self, req, insert_params, token_ids_len, is_finished)",
        "release:limit_insert",
        "a compacted row filed in the radix tree is wrong KV under a valid key",
    ),
    Seam(
        "model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        "(cls, batch, model_runner, *, capture_hidden_mode=None, return_hidden_states_before_norm, "
        "extend_position_info=None, spec_mrope_positions=None, kv_loc_plan=None, write_cols=None)",
        "forward:prepare_forward",
        "positions come from the logical length",
    ),
    Seam(
        "layers.sampler.Sampler.forward",
        "before",
        "(self, logits_output, sampling_info, return_logprob, top_logprobs_nums, "
        "token_ids_logprobs, positions, *, logprob_logits=None)",
        "sampling:shift_positions",
        "the noise of a seed is drawn for a position, after a prefill for the row length",
    ),
    Seam(
        "layers.radix_attention.RadixAttention.forward",
        "before",
        "(self, q, k, v, forward_batch, save_kv_cache=True, key_value_num_tokens=None, **kwargs)",
        "forward:record_queries",
        "the last queries score the cache",
    ),
    Seam(
        "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        "around",
        "(self, forward_batch)",
        "model_side:run_recorded_prefill_eagerly",
        "what a prefill records depends on its batch, so it cannot be a replay",
    ),
    Seam(
        "layers.logits_processor.LogitsProcessor.forward",
        "before",
        "(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, "
        "hidden_states_before_norm=None)",
        "forward:record_hidden",
        "final hidden states make sentence vectors",
    ),
    # -- steering
    Seam(
        "layers.layer_boundary.residual.batch.stream_of",
        "use",
        "(forward_batch)",
        "steering:residual_of",
        "the vector is added to the residual stream, once, on every rank",
    ),
    Seam(
        "layers.layer_boundary.residual.batch.snapshot",
        "use",
        "(hidden_states, forward_batch)",
        "capture:HiddenCapture",
        "a layer's output, for the extraction of a vector",
    ),
    Seam(
        "model_executor.runner_utils.capture_mode.get_is_capture_mode",
        "use",
        "()",
        "capturing:capturing",
        "a captured step contains recording and steering, whoever runs in it",
    ),
    # -- the way out
    Seam(
        f"{_SCHEDULER}.get_output_streamer_class",
        "after",
        "(self)",
        "output:reporting_streamer_class",
        "meta_info['skipkv'] leaves the scheduler",
    ),
)
