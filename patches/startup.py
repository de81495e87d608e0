"""The start of a scheduler: decide the state on what was really built, then build our side."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sgl_skipkv.call import check_server_defaults
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches import seams
from sgl_skipkv.patches.binding import Binding, binding_of
from sgl_skipkv.patches.capabilities import missing_capabilities
from sgl_skipkv.patches.capture import HiddenCapture
from sgl_skipkv.patches.forward import attach
from sgl_skipkv.patches.metrics import Metrics
from sgl_skipkv.patches.readiness import Readiness
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
