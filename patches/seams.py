"""Every place where this package touches SGLang, as data; installing and verifying them.

SGLang applies hooks with its own registry and only logs what goes wrong. So each seam is checked
twice here: its target and signature before it is registered, and that it took afterwards.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

TESTED_SGLANG = ("0.5.23",)

Kind = Literal["before", "after", "around", "replace", "extend", "use"]
_UNHOOKED = ("extend", "use")


@dataclass(frozen=True)
class Seam:
    """One touched place of SGLang.

    Attributes:
        target: below ``sglang.srt.``.
        kind: how it is hooked; ``extend`` marks a method that a subclass of ours overrides,
            ``use`` a function that we call.
        signature: parameters expected there, without annotations.
        hook: ``module:attribute`` below ``sgl_skipkv.patches.``.
        why: what would be wrong without it.
        api: needed to answer calls; installed even where eviction itself is not possible.
    """

    target: str
    kind: Kind
    signature: str
    hook: str
    why: str
    api: bool = False

    @property
    def path(self) -> str:
        return f"sglang.srt.{self.target}"


_SCHEDULER = "managers.scheduler.Scheduler"
_BATCH = "managers.schedule_batch.ScheduleBatch"
_REQ = "managers.schedule_batch.Req"
_ADDER = "managers.schedule_policy.PrefillAdder"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
_OPENAI = "entrypoints.openai"
_ANTHROPIC = "entrypoints.anthropic"
_OLLAMA = "entrypoints.ollama.serving.OllamaServing"

SEAMS: tuple[Seam, ...] = (
    # -- configuration and state
    Seam(
        "server_args.ServerArgs.add_cli_args",
        "after",
        "(parser)",
        "server_args:add_flags",
        "flags on launch_server",
        api=True,
    ),
    Seam(
        "server_args.ServerArgs.from_cli_args",
        "after",
        "(cls, args)",
        "server_args:read_flags",
        "settings travel with ServerArgs",
        api=True,
    ),
    Seam(
        f"{_SCHEDULER}.init_memory_pools",
        "around",
        "(self)",
        "startup:reserve",
        "buffers before the pool is sized, hooks before graphs are captured",
    ),
    Seam(
        f"{_SCHEDULER}.__init__",
        "after",
        "(self, server_args, port_args)",
        "startup:bind",
        "decide the state on the resolved runtime",
        api=True,
    ),
    Seam(
        f"{_SCHEDULER}.get_init_info",
        "after",
        "(self)",
        "startup:report",
        "the main process learns the state",
        api=True,
    ),
    Seam(
        "entrypoints.engine.Engine._set_startup_time",
        "after",
        "(tokenizer_manager, scheduler_init_result, startup_tic)",
        "tokenizer:open_gate",
        "refuse to start, or open the gate for calls",
        api=True,
    ),
    # -- ways in
    Seam(
        f"{_MANAGER}._create_tokenized_object",
        "before",
        "(self, obj, input_text, input_ids, input_embeds=None, mm_inputs=None, "
        "token_type_ids=None)",
        "tokenizer:move_keys",
        "validate a call's keys and carry them as custom_params",
        api=True,
    ),
    Seam(
        "entrypoints.api_contract.generate_contract_error",
        "around",
        "(body)",
        "http_api:allow_keys",
        "/generate refuses unknown sampling parameters",
        api=True,
    ),
    Seam(
        f"{_OPENAI}.protocol.ChatCompletionRequest",
        "replace",
        "class",
        "openai_api:ChatCompletionRequest",
        "top-level keys of a chat completion",
        api=True,
    ),
    Seam(
        f"{_OPENAI}.protocol.CompletionRequest",
        "replace",
        "class",
        "openai_api:CompletionRequest",
        "top-level keys of a completion",
        api=True,
    ),
    Seam(
        f"{_OPENAI}.protocol.ResponsesRequest",
        "replace",
        "class",
        "openai_api:ResponsesRequest",
        "top-level keys of a response",
        api=True,
    ),
    Seam(
        f"{_OPENAI}.serving_completions.OpenAIServingCompletion._build_sampling_params",
        "after",
        "(self, request)",
        "openai_api:add_completion_keys",
        "completions build their sampling parameters here",
        api=True,
    ),
    Seam(
        f"{_ANTHROPIC}.protocol.AnthropicMessagesRequest",
        "replace",
        "class",
        "anthropic_api:AnthropicMessagesRequest",
        "top-level keys of a message",
        api=True,
    ),
    Seam(
        f"{_ANTHROPIC}.serving.AnthropicServing.handle_messages",
        "around",
        "(self, request, raw_request)",
        "anthropic_api:check_keys",
        "a wrong key of a streamed message would be an error after 200",
        api=True,
    ),
    Seam(
        f"{_ANTHROPIC}.serving.AnthropicServing._convert_to_chat_completion_request",
        "after",
        "(self, anthropic_request)",
        "anthropic_api:carry_keys",
        "messages become chat completions here",
        api=True,
    ),
    Seam(
        f"{_OLLAMA}.handle_chat",
        "around",
        "(self, request, raw_request)",
        "ollama_api:check_keys",
        "a wrong key would be 500, or half an answer",
        api=True,
    ),
    Seam(
        f"{_OLLAMA}.handle_generate",
        "around",
        "(self, request, raw_request)",
        "ollama_api:check_keys",
        "a wrong key would be 500, or half an answer",
        api=True,
    ),
    Seam(
        f"{_OLLAMA}._convert_options_to_sampling_params",
        "after",
        "(self, options=None)",
        "ollama_api:add_option_keys",
        "options that it does not know are dropped",
        api=True,
    ),
    Seam(
        "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        "around",
        "(self, forward_batch)",
        "model_side:run_recorded_prefill_eagerly",
        "what a prefill records depends on its batch, so it cannot be a replay",
    ),
    # -- life of a call
    Seam(
        f"{_SCHEDULER}._create_generation_req",
        "after",
        "(self, recv_req, *args, **kwargs)",
        "scheduler:open_call",
        "open a call's state",
        api=True,
    ),
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
    Seam(
        f"{_MANAGER}.update_request_meta_info",
        "after",
        "(self, meta_info, state, customized_info, index, finish_reason)",
        "output:unwrap_meta_info",
        "meta_info['skipkv'] is one object",
        api=True,
    ),
)


def current_signature(seam: Seam) -> str:
    """The parameters found at a seam's target, without annotations; ``class`` for a class.

    Raises:
        ImportError, AttributeError, KeyError: no such target in this SGLang.
    """
    owner_path, _, name = seam.path.rpartition(".")
    # Through __dict__: an inherited method would be copied onto the subclass by hooking it there.
    found = vars(pkgutil.resolve_name(owner_path))[name]
    found = getattr(found, "__func__", found)
    if isinstance(found, type):
        return "class"
    signature = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def check(seam: Seam) -> str | None:
    """What is wrong with a seam's target before it is hooked, or None."""
    try:
        found = current_signature(seam)
    except (ImportError, AttributeError, KeyError) as error:
        return f"seam {seam.target} not found ({error!r:.100})"
    if found != seam.signature:
        return f"seam {seam.target} has signature {found}, expected {seam.signature}"
    others = [
        hook for kind, hook, _ in HookRegistry._hooks.get(seam.path, ()) if kind is HookType.REPLACE
    ]
    return f"seam {seam.target} is replaced by another plugin" if others else None


_problems_before: list[str] = []


def install(sglang_version: str) -> None:
    """Register every hook whose target is as expected.

    With any problem nothing that changes the engine is hooked, only what answers calls with 400.
    """
    _problems_before.clear()
    if sglang_version not in TESTED_SGLANG:
        tested = ", ".join(TESTED_SGLANG)
        _problems_before.append(f"SGLang {sglang_version} is not a tested version ({tested})")
    found = {seam: check(seam) for seam in SEAMS}
    _problems_before.extend(problem for problem in found.values() if problem is not None)
    for seam, problem in found.items():
        usable = problem is None and (seam.api or not _problems_before)
        if usable and seam.kind not in _UNHOOKED:
            HookRegistry.register(seam.path, _load_hook(seam), HookType(seam.kind))


def _load_hook(seam: Seam) -> Callable[..., Any]:
    hook: Callable[..., Any] = pkgutil.resolve_name(f"sgl_skipkv.patches.{seam.hook}")
    return hook


def problems_before() -> list[str]:
    """What was wrong before hooking: the version, a target, a signature."""
    return list(_problems_before)


def load() -> None:
    """Let SGLang load its plugins, as it does at the start of a server."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


def problems() -> list[str]:
    """Every seam that is not as it should be, after SGLang applied the hooks."""
    if _problems_before:
        return list(_problems_before)
    return [
        f"seam {seam.target} did not take"
        for seam in SEAMS
        if seam.kind not in _UNHOOKED and seam.path not in HookRegistry._patched
    ]
