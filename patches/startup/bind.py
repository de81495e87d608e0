"""The start of a scheduler: decide the state on what was really built, then build our side."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.eviction.warm_up import warm_up, warm_up_without_scores, windows_of
from sgl_skipkv.kernels.on_device import uses_triton
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.engine.binding import Binding, binding_of
from sgl_skipkv.patches.engine.kernel_compilation import own_stream
from sgl_skipkv.patches.engine.kv_cache import kv_buffers, paged_cache
from sgl_skipkv.patches.engine.metrics import Metrics
from sgl_skipkv.patches.engine.model_side import (
    ModelSide,
    attention_layers,
    build_model_side,
    key_scale_of,
    model_side_of,
)
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.patches.startup.capabilities import missing_capabilities
from sgl_skipkv.patches.startup.flags import config_of
from sgl_skipkv.policy.base import PagedCache
from sgl_skipkv.recording.recorder import Recorder
from sgl_skipkv.request.settings import check_server_defaults
from sgl_skipkv.request.trace import TraceWriter
from sgl_skipkv.steering.vector import SteeringVector

logger = logging.getLogger(__name__)


def reserve(original: Callable[[Any], None], scheduler: Any) -> None:
    """AROUND ``Scheduler.init_memory_pools``: the model is loaded; pools and graphs come next.

    What the operator asked for takes its memory first, so that the pool is sized around it. What is
    wrong about it is told by ``bind``, together with everything else that is wrong.
    """
    side, room, scheduler.skipkv_reasons = None, None, []
    try:
        config = config_of(scheduler.server_args)
        path = config.steering_vector
        vector = SteeringVector.load(path) if path is not None else None
        if config.enabled and not registry.problems() and _can_record(scheduler):
            side = build_model_side(config, scheduler, vector)
            room = _room_for_compactions(config, scheduler)
    except (SettingError, torch.OutOfMemoryError) as error:
        scheduler.skipkv_reasons.append(str(error))
    original(scheduler)
    runner = scheduler.tp_worker.model_runner
    # From here on compactions find it free; where graphs are captured before the pool is sized for
    # good, from ``bind`` on.
    held = room is not None and runner.token_to_kv_pool.post_capture_active
    scheduler.skipkv_room = room if held else None
    if side is not None:
        side.use_rows(runner.req_to_token_pool.req_to_token.shape[0])


def _room_for_compactions(config: ServerConfig, scheduler: Any) -> torch.Tensor | None:
    """A workspace that is held until the pool has been sized; None where scores need no kernels.

    Raises:
        torch.OutOfMemoryError: no room for it.
    """
    device = torch.device(scheduler.tp_worker.model_runner.device)
    if not uses_triton(device):
        return None
    return torch.empty(config.compaction_work_bytes, dtype=torch.uint8, device=device)


def _can_record(scheduler: Any) -> bool:
    """Whether recording may run in this model's forward pass, as far as can be told before pools.

    What it does not tell is found by ``bind``, which has all the reasons.
    """
    if missing_capabilities(scheduler, settings_only=True) or scheduler.tokenizer is None:
        return False
    layers = attention_layers(scheduler.tp_worker.model_runner.model)
    shapes = {(layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim) for layer in layers}
    return len(shapes) == 1 and all(width == value_width for _, width, value_width in shapes)


def bind(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.__init__``: pools and model exist; decide the state, build the runtime."""
    _give_room_back(scheduler)
    config, runner = config_of(scheduler.server_args), scheduler.tp_worker.model_runner
    # The checks read this SGLang's attributes; in another one they might not exist.
    reasons = registry.problems() or missing_capabilities(scheduler)
    reasons += getattr(scheduler, "skipkv_reasons", [])
    runtime = capture = key_scale = None
    try:
        check_server_defaults(config)
        trace = TraceWriter(config.trace) if config.trace is not None else None
        side = model_side_of(runner)
        if not reasons and side is None and config.enabled:
            reasons.append("attention whose queries cannot be recorded (keys unlike values)")
        if not reasons:
            if side is None:
                side = build_model_side(config, scheduler)
                side.use_rows(scheduler.req_to_token_pool.req_to_token.shape[0])
            runtime, capture = _build_runtime(config, scheduler, side, trace), side.capture
            key_scale = key_scale_of(runner)
    except (SettingError, torch.OutOfMemoryError) as error:
        reasons.append(str(error))
    readiness = Readiness(tuple(reasons), config.enabled)
    if readiness.state == "refused" and _has_no_gate(scheduler.server_args):
        raise SystemExit(readiness.message())
    collector = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    metrics = Metrics(collector, readiness)
    binding = Binding(*(config, readiness, runtime, scheduler, metrics, capture, key_scale))
    scheduler.skipkv = scheduler.req_to_token_pool.skipkv = binding
    if runtime is not None:
        _warm_up(binding, runtime)
    logger.info(readiness.message())


def _give_room_back(scheduler: Any) -> None:
    """The pool is as large as it will be: what was held for compactions is theirs to allocate.

    To the device, not to the allocator's cache: that keeps it for the stream that it was taken on.
    """
    if getattr(scheduler, "skipkv_room", None) is not None:
        scheduler.skipkv_room = None
        torch.cuda.empty_cache()


def _has_no_gate(server_args: Any) -> bool:
    """Whether no process of ours hears the scheduler's report, and none could refuse the start:
    SMG's gRPC servicer does not start SGLang's ``Engine``."""
    return any(getattr(server_args, name, False) for name in ("smg_grpc_mode", "grpc_mode"))


def _warm_up(binding: Binding, runtime: Runtime) -> None:
    """Compile what steps and compactions launch, before anybody waits for it: before the server is
    ready if it was configured for eviction, else while it serves."""
    pool, recorder = binding.scheduler.req_to_token_pool, runtime.recorder
    cache = paged_cache(pool, binding.scheduler.token_to_kv_pool_allocator)
    windows, width = windows_of(binding.config), pool.req_to_token.shape[1]

    def launch(recorder: Recorder, cache: PagedCache | None) -> None:
        if cache is None:
            warm_up_without_scores(recorder, width, runtime.steerer)
        else:
            warm_up(recorder, cache, windows, runtime.steerer)

    def compile_kernels() -> None:
        with own_stream(recorder.device):
            launch(recorder.scratch(), None if cache is None else cache.scratch())

    if not uses_triton(recorder.device):
        return
    if binding.config.enabled:
        launch(recorder, cache)
    else:
        binding.compilation.start(compile_kernels)


def _build_runtime(
    config: ServerConfig, scheduler: Any, side: ModelSide, trace: TraceWriter | None
) -> Runtime:
    return Runtime(
        config,
        side.delimiters,
        recorder=side.recorder,
        layers=side.shape.layers,
        scale=side.scale,
        pool_tokens=scheduler.max_total_num_tokens,
        kv_token_bytes=_kv_token_bytes(scheduler),
        steerer=side.steerer,
        trace=trace,
    )


def _kv_token_bytes(scheduler: Any) -> int:
    """Keys and values of one token in all layers of this rank."""
    return sum(buffer[0].nbytes for buffer in kv_buffers(scheduler.token_to_kv_pool_allocator))


def report(result: dict[str, Any], scheduler: Any) -> None:
    """AFTER ``Scheduler.get_init_info``: the main process learns the state with the handshake."""
    binding = binding_of(scheduler)
    if binding is not None:
        result["skipkv"] = {"reasons": list(binding.readiness.reasons)}
