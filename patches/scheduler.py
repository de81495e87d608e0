"""The scheduler: bind at start, open calls, bound their length, answer for requests that cannot
return.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch

from sgl_skipkv.call import CallSettings, check_server_defaults, resolve_call, take_keys
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches import seams
from sgl_skipkv.patches.binding import Binding, binding_of, state_of
from sgl_skipkv.patches.capabilities import missing_capabilities
from sgl_skipkv.patches.capture import HiddenCapture
from sgl_skipkv.patches.forward import attach
from sgl_skipkv.patches.metrics import Metrics
from sgl_skipkv.patches.readiness import Readiness, Unavailable
from sgl_skipkv.patches.server_args import config_of
from sgl_skipkv.patches.steering import attach_steering, decoder_layers
from sgl_skipkv.recorder import ModelShape, Recorder
from sgl_skipkv.runtime import Runtime
from sgl_skipkv.sentences import Delimiters, newline_tokens
from sgl_skipkv.steering import Steerer, TokenClasses
from sgl_skipkv.steering_vector import SteeringVector
from sgl_skipkv.trace import TraceWriter

logger = logging.getLogger(__name__)


def bind(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.__init__``: pools and model exist; decide the state, build the runtime."""
    config = config_of(scheduler.server_args)
    # The checks read this SGLang's attributes; in another one they might not exist.
    reasons = seams.problems() or missing_capabilities(scheduler)
    runtime = capture = None
    try:
        check_server_defaults(config)
        trace = TraceWriter(config.trace) if config.trace is not None else None
        path = config.steering_vector
        vector = SteeringVector.load(path) if path is not None else None
        if not reasons:
            runtime = _build_runtime(config, scheduler, vector, trace)
            capture = _build_capture(config, scheduler)
    except (SettingError, torch.OutOfMemoryError) as error:
        reasons.append(str(error))
    readiness = Readiness(tuple(reasons), config.asked)
    collector = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    metrics = Metrics(collector, readiness)
    binding = Binding(config, readiness, runtime, scheduler, metrics, capture)
    scheduler.skipkv = scheduler.req_to_token_pool.skipkv = binding
    logger.info(readiness.message())


def report(result: dict[str, Any], scheduler: Any) -> None:
    """AFTER ``Scheduler.get_init_info``: the main process learns the state with the handshake."""
    binding = binding_of(scheduler)
    if binding is not None:
        result["skipkv"] = {"reasons": list(binding.readiness.reasons)}


def _build_runtime(
    config: ServerConfig,
    scheduler: Any,
    vector: SteeringVector | None,
    trace: TraceWriter | None,
) -> Runtime:
    runner = scheduler.tp_worker.model_runner
    pool, attention = scheduler.req_to_token_pool, _first_attention(runner.model)
    shape = ModelShape(
        layers=runner.token_to_kv_pool.layer_num,
        query_heads=attention.tp_q_head_num,
        head_dim=attention.head_dim,
        hidden_size=runner.model_config.hidden_size,
    )
    delimiters = _delimiters(scheduler)
    steerer = None
    if vector is not None:
        steerer = _build_steerer(vector, config.steering_gamma, scheduler, delimiters)
    recorder = Recorder(
        shape,
        rows=pool.req_to_token.shape[0],
        slots=min(config.max_tracked_calls, pool.size),
        query_window=config.query_window,
        max_sentences=config.max_sentences,
        delimiters=delimiters,
        like=runner.token_to_kv_pool.get_key_buffer(runner.token_to_kv_pool.start_layer),
    )
    if config.asked:
        recorder.reserve()
    attach(runner.model, recorder)
    return Runtime(
        config,
        delimiters,
        recorder=recorder,
        layers=shape.layers,
        scale=attention.scaling,
        pool_tokens=scheduler.max_total_num_tokens,
        steerer=steerer,
        trace=trace,
    )


def _delimiters(scheduler: Any) -> Delimiters:
    vocab_size = scheduler.tp_worker.model_runner.model_config.vocab_size
    return Delimiters(newline_tokens(scheduler.tokenizer), vocab_size)


def _build_capture(config: ServerConfig, scheduler: Any) -> HiddenCapture | None:
    """What `skipkv steering extract` asked this server for."""
    if config.steering_capture is None:
        return None
    model, folder = scheduler.tp_worker.model_runner.model, config.steering_capture
    return HiddenCapture(model, folder, _delimiters(scheduler), config.delimiters)


def _build_steerer(
    vector: SteeringVector, gamma: float, scheduler: Any, delimiters: Delimiters
) -> Steerer:
    """The operator's vector, checked against the model and attached to its layer."""
    runner = scheduler.tp_worker.model_runner
    vector.check_model(runner.model_config.hidden_size, len(decoder_layers(runner.model)))
    preset, keywords = vector.origin.delimiters, vector.keywords
    steerer = Steerer(
        vector,
        TokenClasses(scheduler.tokenizer, delimiters, preset, keywords),
        gamma,
        rows=scheduler.req_to_token_pool.req_to_token.shape[0],
        device=runner.token_to_kv_pool.get_key_buffer(runner.token_to_kv_pool.start_layer).device,
    )
    attach_steering(runner.model, steerer)
    return steerer


def _first_attention(model: Any) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    return next(module for module in model.modules() if isinstance(module, RadixAttention))


def open_call(req: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler._create_generation_req``: a request with a budget gets its state.

    The tokenizer process has validated the keys already; requests that came another way have not
    been, and a wrong one ends with 400 here.
    """
    binding = binding_of(scheduler)
    params = req.sampling_params.custom_params
    keys = take_keys(params)[1] if isinstance(params, dict) else {}
    if binding is None or (not keys and not binding.config.defaults_apply):
        return
    try:
        if binding.runtime is None:
            field, got = next(iter(keys.items()))
            raise Unavailable(field, got, binding.readiness)
        settings = resolve_call(keys, binding.config)
        if settings is None:
            return
        settings.check_prompt(len(req.origin_input_ids))
        _check_request_kind(settings, recv_req)
        req.skipkv = binding.runtime.open(req.rid, settings, req.origin_input_ids)
    except ValueError as error:
        req.set_finish_with_abort(str(error), status_code=HTTPStatus.BAD_REQUEST)
        return
    except torch.OutOfMemoryError as error:
        req.set_finish_with_abort(
            f"kv_budget: no device memory for the recording buffers ({error}); lower "
            "max_tracked_calls or --mem-fraction-static",
            status_code=HTTPStatus.SERVICE_UNAVAILABLE,
            err_type="ServiceUnavailableError",
        )
        return
    if req.skipkv.keeps_prompt_private:
        req.skip_radix_cache_insert = True


def _check_request_kind(settings: CallSettings, recv_req: Any) -> None:
    """Requests whose rows are not plain token lists, or are handed on, cannot change their KV."""
    if not settings.changes_kv:
        return
    field = "kv_budget" if settings.evicts else "steering"
    beam_width = recv_req.sampling_params.beam_width or 1
    if beam_width > 1:
        raise SettingError(field, "no beam search", f"beam_width={beam_width}", "one of both")
    if recv_req.session_params is not None or recv_req.session_id is not None:
        raise SettingError(field, "no session", "a session", "one of both")
    captures = recv_req.return_routed_experts or recv_req.return_indexer_topk
    if settings.evicts and captures:
        got = "return_routed_experts or return_indexer_topk"
        raise SettingError("kv_budget", "no per-token capture of the row", got, "one of both")


def bound_new_tokens(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """AROUND ``Scheduler.init_req_max_new_tokens``: a budgeted call is bounded by the context only.

    SGLang also cuts ``max_new_tokens`` to what the pool could hold of the whole trace. A budgeted
    call never holds its whole trace.
    """
    state, params = state_of(req), req.sampling_params
    wanted, wanted_min = params.max_new_tokens, params.min_new_tokens
    original(scheduler, req)
    if state is None or not state.settings.evicts or req.to_finish is not None:
        return
    prompt_tokens = len(req.origin_input_ids)
    peak_row_tokens = prompt_tokens + max(
        state.settings.peak_own_tokens() - state.own_tokens(prompt_tokens), 1
    )
    if not state.runtime.fits_pool(peak_row_tokens):
        return
    limit = scheduler.model_config.context_len - 1 - prompt_tokens - 1
    for bound in (wanted, scheduler.max_new_tokens_limit or None):
        limit = min(limit, bound) if bound is not None else limit
    params.max_new_tokens = max(limit, 0)
    params.min_new_tokens = min(wanted_min, params.max_new_tokens)


def refuse_unrecomputable(
    original: Callable[..., None], scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    """AROUND ``Scheduler._add_request_to_queue``: a retracted call that cannot come back ends here.

    Its KV is gone and its whole trace is longer than the pool, so it would wait for ever.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    state, generated = state_of(req), len(req.output_ids)
    if state is None or not req.is_retracted or state.runtime.can_recompute(state, generated):
        original(scheduler, req, is_retracted=is_retracted)
        return
    pool_tokens, trace_tokens = state.runtime.pool_tokens, state.prompt_tokens + generated
    reason = FINISH_ABORT(
        f"kv_budget call {req.rid}: the KV pool ({pool_tokens} tokens) ran full, nothing else "
        f"could give way, and the call cannot be recomputed: its {trace_tokens} tokens do not fit "
        "the pool. Lower the load or raise --max-total-tokens / --mem-fraction-static.",
        status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
        err_type="InternalServerError",
    )
    logger.error(reason.message)
    state.runtime.close(state, 0, req.output_ids, "abort")
    scheduler.send_abort_output(_make_abort_req(req, finished_reason=reason.to_json()), req)
