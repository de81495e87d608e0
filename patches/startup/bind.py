"""Startup of a scheduler: decide the state from the resolved runtime, then build the plugin's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.error_boundary import attempt
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.eviction.warm_up import compiled_windows, warm_up
from sgl_skipkv.kernels.on_device import uses_triton
from sgl_skipkv.metrics import Metrics
from sgl_skipkv.patches import registry
from sgl_skipkv.patches.engine.attention_layers import (
    attention_layers,
    model_window_tokens,
    scored_layers,
)
from sgl_skipkv.patches.engine.binding import Binding, binding_of, runtime_of
from sgl_skipkv.patches.engine.dp_attention import has_dp_attention
from sgl_skipkv.patches.engine.kv_cache import paged_cache, row_buffers
from sgl_skipkv.patches.engine.linear_states import (
    NO_BACKUPS,
    WITHOUT_BACKUPS,
    has_linear_states,
)
from sgl_skipkv.patches.engine.model_side import build_model_side, kv_scales_of, model_side_of
from sgl_skipkv.patches.engine.pd_roles import is_decode_server, is_prefill_server
from sgl_skipkv.patches.engine.speculation import boundary_tokens, is_speculative, reserved_tokens
from sgl_skipkv.patches.engine.vocabulary import missing_vocabulary, tokenizer_of
from sgl_skipkv.patches.engine.window_pool import most_saved_tokens, window_buffers
from sgl_skipkv.patches.limits import NO_LIMITS, PROMPT_IS_ELSEWHERE, WITHOUT_PROMPT, ServerLimits
from sgl_skipkv.patches.readiness import Readiness
from sgl_skipkv.patches.startup.attention_check import AttentionMismatch
from sgl_skipkv.patches.startup.capabilities import missing_capabilities, missing_for_reuse
from sgl_skipkv.patches.startup.draft_kinds import SPECULATION
from sgl_skipkv.patches.startup.flags import config_of
from sgl_skipkv.patches.startup.measurements import measure_model, text_ids, without_rotation
from sgl_skipkv.patches.startup.parallel import (
    is_first_rank,
    joins_running_server,
    open_ranks,
    reasons_of_ranks,
)
from sgl_skipkv.patches.startup.pool_kinds import without_budget_reuse
from sgl_skipkv.patches.startup.replicas import trace_path
from sgl_skipkv.policy import policy_class
from sgl_skipkv.ranks import RanksError
from sgl_skipkv.request.settings import check_server_defaults
from sgl_skipkv.request.trace import TraceWriter
from sgl_skipkv.reuse.thoughts import NO_THOUGHTS, ThoughtTokens
from sgl_skipkv.steering.vector import SteeringVector

logger = logging.getLogger(__name__)


def reserve(original: Callable[[Any], None], scheduler: Any) -> None:
    """AROUND ``Scheduler.init_memory_pools``: the model is loaded; pools and graphs come next.

    If eviction is enabled, its buffers are allocated first, so that the pool is sized around them.
    ``bind`` reports the errors, together with all other reasons.
    """
    side, workspace, scheduler.skipkv_reasons = None, None, []
    try:
        config = config_of(scheduler.server_args)
        path = config.steering_vector
        vector = SteeringVector.load(path) if path is not None else None
        if config.enabled and not registry.problems() and _records(scheduler):
            side = build_model_side(config, scheduler, vector)
            workspace = _reserved_workspace(config, scheduler)
    except (SettingError, torch.OutOfMemoryError) as error:
        scheduler.skipkv_reasons.append(str(error))
    original(scheduler)
    runner = scheduler.tp_worker.model_runner
    # The workspace is freed here, or in ``bind`` if the pool is resized after graph capture.
    resized = workspace is not None and runner.token_to_kv_pool.post_capture_active
    scheduler.skipkv_workspace = workspace if resized else None
    if side is not None:
        side.use_rows(runner.req_to_token_pool.req_to_token.shape[0])


def _reserved_workspace(config: ServerConfig, scheduler: Any) -> torch.Tensor | None:
    """The workspace, allocated while the pool is sized; None where no scoring kernels run.

    Raises:
        torch.OutOfMemoryError: the device has no memory for it.
    """
    device = torch.device(scheduler.tp_worker.model_runner.device)
    if not uses_triton(device):
        return None
    return torch.empty(config.compaction_work_bytes, dtype=torch.uint8, device=device)


def _records(scheduler: Any) -> bool:
    """Whether this model's forward pass can be recorded, as far as is known before pools exist, and
    is: a prefill server records nothing (PD disaggregation).

    ``bind`` checks the rest and reports all reasons.
    """
    from sglang.srt.configs.model_config import AttentionArch

    if missing_capabilities(scheduler, settings_only=True) or missing_vocabulary(scheduler):
        return False
    if is_prefill_server():
        return False
    layers = scored_layers(attention_layers(scheduler.tp_worker.model_runner.model))
    shapes = {(layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim) for layer in layers}
    latent = scheduler.model_config.attention_arch == AttentionArch.MLA  # a key contains its value
    return len(shapes) == 1 and all(latent or width == of_value for _, width, of_value in shapes)


class ModelFacts(NamedTuple):
    """What the runtime needs to know of the model, where eviction is supported.

    Attributes:
        limits: what requests may not ask for.
        layers: every attention layer.
        thoughts: None: the vocabulary marks none.
        without_backups: why retracted requests are recomputed; None: they are backed up.
        without_steering: why a steering vector is refused; None: it is not.
    """

    limits: ServerLimits = NO_LIMITS
    layers: Sequence[Any] = ()
    thoughts: ThoughtTokens | None = None
    without_backups: str | None = None
    without_steering: str | None = None


def bind(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER ``Scheduler.__init__``: pools and model exist; decide the state, build the runtime."""
    if getattr(scheduler, "skipkv_workspace", None) is not None:
        # The pool has its final size, so compactions may have the memory. The cache is emptied too:
        # the allocator would keep it for the stream it was allocated on.
        scheduler.skipkv_workspace = None
        torch.cuda.empty_cache()
    config = config_of(scheduler.server_args)
    problems = registry.problems()
    # The checks read attributes that another SGLang version may not have.
    reasons = problems or missing_capabilities(scheduler)
    reasons += getattr(scheduler, "skipkv_reasons", [])
    facts, measured_ids = ModelFacts(), list[int]()
    if not reasons:  # as above: where eviction is not supported, nothing more is read
        facts = _facts(scheduler)
        reasons += _wrong_settings(config, facts)
    if not reasons:
        read = partial(_measured_text, scheduler, config, reasons)
        found, failure = attempt("sgl_skipkv: the text that measures the model", read)
        measured_ids = found or []
        reasons += [] if failure is None else [failure]
    trace = None
    try:
        check_server_defaults(config, facts.limits.model_window_tokens)
        if config.trace is not None and not problems and is_first_rank():
            trace = None if is_prefill_server() else TraceWriter(trace_path(config.trace))
    except SettingError as error:
        reasons.append(str(error))
    reasons, metrics = _shared(scheduler, reasons, problems)
    runtime: Runtime | None = None
    if not reasons and not is_prefill_server():
        build = partial(_build, scheduler, config, facts, measured_ids, trace, metrics, reasons)
        runtime, failure = attempt("sgl_skipkv: the start of a scheduler", build)
        reasons += [] if failure is None else [failure]
    readiness = Readiness(tuple(reasons), config.enabled)
    if readiness.state == "refused" and _has_no_gate(scheduler):
        raise SystemExit(readiness.message())
    metrics.decided(readiness.state)
    kv_scales = (None, None) if runtime is None else kv_scales_of(scheduler.tp_worker.model_runner)
    binding = Binding(
        *(config, readiness, runtime, scheduler, metrics),
        kv_scales=kv_scales,
        limits=facts.limits,
        scored_layers=[layer.layer_id for layer in scored_layers(facts.layers)],
        measure_again=partial(_measure_again, scheduler, measured_ids),
    )
    scheduler.skipkv = binding
    if (pool := getattr(scheduler, "req_to_token_pool", None)) is not None:
        pool.skipkv = binding
    if runtime is not None:
        _warm_up(binding, runtime)
    given = f"; settings {json.dumps(config.given())}" if config.enabled else ""
    logger.info(readiness.message() + given)


def _shared(
    scheduler: Any, reasons: list[str], problems: Sequence[str]
) -> tuple[list[str], Metrics]:
    """The reasons of all ranks, and the metrics, which one of them exports."""

    def labels() -> Any:
        counts = scheduler.metrics_reporter.enable_metrics and is_first_rank()
        return scheduler.metrics_collector.labels if counts else None

    if not problems:
        if joins_running_server():
            return [*reasons, "a rank that joins a running server"], Metrics(labels())
        return reasons_of_ranks(reasons), Metrics(labels())
    # What these read another SGLang may lack, and it serves without budgets all the same.
    told, _ = attempt("sgl_skipkv: ranks of this SGLang", partial(reasons_of_ranks, reasons))
    of_scheduler, _ = attempt("sgl_skipkv: metrics of this SGLang", labels)
    return reasons if told is None else told, Metrics(of_scheduler)


def _facts(scheduler: Any) -> ModelFacts:
    """Read them from the loaded model; only where eviction is supported."""
    runner = scheduler.tp_worker.model_runner
    layers = attention_layers(runner.model)
    thoughts = ThoughtTokens.of(tokenizer_of(scheduler))
    limits = ServerLimits(
        model_window_tokens(layers, runner.sliding_window_size),
        tuple(missing_for_reuse(scheduler)),
        without_rotation(runner.model),
        without_budget_reuse(scheduler),
        has_thoughts=thoughts is not None,
        prompt_is_elsewhere=is_prefill_server() or is_decode_server(),
    )
    return ModelFacts(
        *(limits, layers, thoughts),
        without_backups=_without_backups(scheduler),
        without_steering=SPECULATION if is_speculative(scheduler) else None,
    )


def _without_backups(scheduler: Any) -> str | None:
    return NO_BACKUPS if has_linear_states(scheduler.req_to_token_pool) else None


def _wrong_settings(config: ServerConfig, facts: ModelFacts) -> list[str]:
    """Defaults of the server that it cannot serve."""
    limits = facts.limits
    reasons = [*limits.without_reuse] if config.kv_reuse else []
    if config.kv_reuse == "budget" and limits.without_budget_reuse is not None:
        reasons.append(f"kv_reuse budget: {limits.without_budget_reuse}")
    if facts.without_backups and config.given().get("retraction_backup_bytes"):
        reasons.append(f"retraction_backup_bytes: expected 0, {facts.without_backups}")
    if facts.without_steering is not None:
        names = ("steering_vector", "steering_capture")
        given = [name for name in names if getattr(config, name) is not None]
        reasons += [f"{name}: {facts.without_steering}" for name in given]
    if config.kv_params.get("drop_thoughts") and facts.thoughts is None:
        reasons.append(f"kv_params.drop_thoughts: {NO_THOUGHTS}")
    if limits.without_rotation and policy_class(config.kv_policy).needs_rotation:
        reasons.append(f"kv_policy {config.kv_policy}: {limits.without_rotation}")
    for name, served in WITHOUT_PROMPT.items() if limits.prompt_is_elsewhere else ():
        if config.kv_params.get(name, served) is not served:
            reasons.append(f"kv_params.{name}: {PROMPT_IS_ELSEWHERE}")
    return reasons


def _measured_text(scheduler: Any, config: ServerConfig, reasons: list[str]) -> list[int]:
    """Its tokens; or none, and why not is added to ``reasons``, before ranks compare them: a rank
    that does not measure would keep the others waiting."""
    try:
        return text_ids(scheduler, config)
    except SettingError as error:
        reasons.append(str(error))
        return []


def _build(
    scheduler: Any,
    config: ServerConfig,
    facts: ModelFacts,
    measured_ids: list[int],
    trace: TraceWriter | None,
    metrics: Metrics,
    reasons: list[str],
) -> Runtime | None:
    """Measure the model and build the runtime; or None, and why not is added to ``reasons``."""
    side = model_side_of(scheduler.tp_worker.model_runner)
    if side is None and config.enabled:
        reasons.append("attention whose queries cannot be recorded (keys unlike values)")
        return None
    try:
        if side is None:
            side = build_model_side(config, scheduler)
            side.use_rows(scheduler.req_to_token_pool.req_to_token.shape[0])
        ranks = open_ranks(side.recorder.device)
        centres, reach = measure_model(scheduler, side, measured_ids, ranks)
        allocator = scheduler.token_to_kv_pool_allocator
        pool_tokens = scheduler.max_total_num_tokens
        if not scheduler.chunked_prefill_size:  # a prompt must fit the smaller of two pools
            pool_tokens = min(pool_tokens, allocator.size)
        token_bytes, window_token_bytes = (  # of this rank's layers
            sum(buffer[0].nbytes for buffer in buffers)
            for buffers in (row_buffers(scheduler), window_buffers(allocator))
        )
        return Runtime(
            config.model_copy(update=WITHOUT_BACKUPS) if facts.without_backups else config,
            recorder=side.recorder,
            scale=side.scale,
            pool_tokens=pool_tokens,
            page_tokens=scheduler.page_size,
            reserved_tokens=reserved_tokens(scheduler),
            boundary_tokens=boundary_tokens(scheduler),
            kv_token_bytes=token_bytes,
            windows_bytes=window_token_bytes * most_saved_tokens(scheduler.tree_cache),
            steerer=side.steerer,
            trace=trace,
            thoughts=facts.thoughts,
            centres=centres,
            reach=reach,
            ranks=ranks,
            metrics=metrics,
            recomputes=not is_decode_server(),
        )
    except (SettingError, AttentionMismatch, MemoryError, torch.OutOfMemoryError) as error:
        reasons.append(str(error))
        return None


def _measure_again(scheduler: Any, measured_ids: list[int]) -> str | None:
    """Measure new weights on an idle server; the reason why that did not work."""
    side, runtime = model_side_of(scheduler.tp_worker.model_runner), runtime_of(scheduler)
    assert side is not None and runtime is not None
    try:
        found = measure_model(scheduler, side, measured_ids, runtime.ranks, serving=True)
    except torch.OutOfMemoryError as error:
        if runtime.ranks.size > 1 or has_dp_attention():  # others wait in the model's own gathers
            raise RanksError("new weights could not be measured on all ranks") from error
        return str(error)
    except AttentionMismatch as error:
        return str(error)
    runtime.take_measurements(found.centres, found.reach)
    logger.info("sgl_skipkv: new weights measured")
    return None


def _has_no_gate(scheduler: Any) -> bool:
    """Whether no ``Engine`` receives this scheduler's report, which would refuse to start."""
    modes = ("smg_grpc_mode", "grpc_mode")
    grpc = any(getattr(scheduler.server_args, mode, False) for mode in modes)
    return grpc or getattr(scheduler, "rust_server", None) is not None


def _warm_up(binding: Binding, runtime: Runtime) -> None:
    """Compile the kernels of steps and compactions, before the server is ready."""
    if not uses_triton(runtime.recorder.device):
        return
    pool = binding.scheduler.req_to_token_pool
    allocator = binding.scheduler.token_to_kv_pool_allocator
    warm_up(
        runtime.recorder,
        paged_cache(pool, allocator),
        compiled_windows(binding.config),
        runtime.steerer,
        width=pool.req_to_token.shape[1],
        page_tokens=runtime.page_tokens,
        buffers=row_buffers(binding.scheduler),
        window_pool_tokens=binding.limits.model_window_tokens if window_buffers(allocator) else 0,
    )


def report(result: dict[str, Any], scheduler: Any) -> None:
    """AFTER ``Scheduler.get_init_info``: send the state to the main process in the handshake."""
    binding = binding_of(scheduler)
    if binding is not None:
        result["skipkv"] = {
            "settings": binding.config.given(),
            "reasons": list(binding.readiness.reasons),
            "limits": asdict(binding.limits),
        }
