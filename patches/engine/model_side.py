"""Recording, steering and capture hooks on the model, and the buffers that they write to.

If eviction or steering is enabled at start, they are built before SGLang sizes its KV pool, so the
pool leaves room for the buffers, and before CUDA graphs are captured, so the graphs include the
hooks. Otherwise they are built at the end of startup, and the large buffers are allocated with the
first request that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.kernels.on_device import TRITON_NAMES
from sgl_skipkv.patches.engine.attention_layers import attention_layers, scored_layers
from sgl_skipkv.patches.engine.binding import KVScale
from sgl_skipkv.patches.engine.dp_attention import has_dp_attention
from sgl_skipkv.patches.engine.hidden_capture import HiddenCapture
from sgl_skipkv.patches.engine.speculation import chain_tokens
from sgl_skipkv.patches.engine.steering import attach_steering, decoder_layers
from sgl_skipkv.patches.engine.vocabulary import tokenizer_of
from sgl_skipkv.recording.recorder import ModelShape, Recorder
from sgl_skipkv.recording.sentences import Delimiters, newline_tokens
from sgl_skipkv.steering.steerer import Steerer, TokenClasses
from sgl_skipkv.steering.vector import FIELD, SteeringVector


@dataclass(frozen=True)
class ModelSide:
    """The hooks on the model of one scheduler process.

    Attributes:
        scale: the model's factor on attention logits.
        steerer: None without a vector.
        capture: None unless ``steering_capture`` is set.
    """

    scale: float
    recorder: Recorder
    steerer: Steerer | None
    capture: HiddenCapture | None

    def use_rows(self, rows: int) -> None:
        """Allocate the buffers indexed by page-table row, once the page table exists."""
        self.recorder.use_rows(rows)
        if self.steerer is not None:
            self.steerer.use_rows(rows)

    @property
    def records_prefill(self) -> bool:
        """Whether the prefill being launched records or steers, so it must run eagerly."""
        return (
            self.recorder.current is not None
            or (self.steerer is not None and self.steerer.steers_prefill)
            or (self.capture is not None and self.capture.pending)
        )


def build_model_side(
    config: ServerConfig, scheduler: Any, vector: SteeringVector | None = None
) -> ModelSide:
    """Build the buffers and hooks and attach them to the model.

    Raises:
        SettingError: the vector does not fit this model, or layers may be offloaded.
        torch.OutOfMemoryError: the device has no memory for the buffers.
    """
    runner = scheduler.tp_worker.model_runner
    layers = scored_layers(attention_layers(runner.model))
    device = torch.device(runner.device)
    shape = ModelShape(
        layers=len(layers),
        query_heads=layers[0].tp_q_head_num,
        head_dim=layers[0].head_dim,
        hidden_size=runner.model_config.hidden_size,
    )
    newlines = newline_tokens(tokenizer_of(scheduler))
    delimiters = Delimiters(newlines, runner.model_config.vocab_size)
    steerer = capture = None
    if vector is not None:
        _refuse_offloaded_layers(FIELD)
        steerer = _build_steerer(vector, config.steering_gamma, scheduler, delimiters)
    recorder = Recorder(
        shape,
        track_count=_track_count(config, scheduler.server_args.max_running_requests),
        query_window=config.query_window,
        max_sentences=config.max_sentences,
        delimiters=delimiters,
        dtype=_recorded_dtype(runner),
        device=device,
        chain_tokens=chain_tokens(scheduler),
    )
    if config.enabled:
        recorder.reserve()
    attach(runner.model, recorder)
    if config.steering_capture is not None:
        _refuse_offloaded_layers("steering_capture")
        _refuse_attention_groups("steering_capture")
        capture = HiddenCapture(
            runner.model, config.steering_capture, delimiters, config.delimiters
        )
    runner.skipkv = side = ModelSide(layers[0].scaling, recorder, steerer, capture)
    return side


def attach(model: Any, recorder: Recorder) -> None:
    """Give the scored attention layers and the logits layer a reference to the recorder.

    It cannot be an attribute of the forward batch: a runner may copy that before the model sees it.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessor

    for place, layer in enumerate(scored_layers(attention_layers(model))):
        layer.skipkv, layer.skipkv_layer = recorder, place
    for module in model.modules():
        if isinstance(module, LogitsProcessor):
            module.skipkv = recorder


def _track_count(config: ServerConfig, max_running_requests: int | None) -> int:
    """No more than requests that run at once, of which an attention group has its share."""
    from sglang.srt.runtime_context import get_parallel

    if max_running_requests is None:
        return config.max_tracked_requests
    of_group = max(1, max_running_requests // int(get_parallel().attn_dp_size))
    return min(config.max_tracked_requests, of_group)


def _recorded_dtype(runner: Any) -> torch.dtype:
    """Recorded queries have the type of the cached keys, or the model's if keys are quantised."""
    keys: torch.dtype = runner.kv_cache_dtype
    return keys if keys in TRITON_NAMES else runner.dtype


def kv_scales_of(runner: Any) -> tuple[KVScale | None, KVScale | None]:
    """``Binding.kv_scales`` of this runner.

    Every backend but torch_native divides keys and values by the checkpoint's ``k_scale`` and
    ``v_scale`` when it caches them in another type than the model's. Weight updates can change
    these, so they are read at each use.
    """
    from sglang.srt.runtime_context import get_exec

    if runner.kv_cache_dtype == runner.dtype:
        return None, None
    kernel = get_exec().kernel
    if (kernel.decode_attention_backend or kernel.attention_backend) == "torch_native":
        return (lambda layer: 1.0,) * 2
    layers = attention_layers(runner.model)
    return (
        lambda layer: layers[layer].k_scale_float or 1.0,
        lambda layer: layers[layer].v_scale_float or 1.0,
    )


def _build_steerer(
    vector: SteeringVector, gamma: float, scheduler: Any, delimiters: Delimiters
) -> Steerer:
    """The operator's vector, checked against the model and attached to its layer."""
    runner = scheduler.tp_worker.model_runner
    layers = decoder_layers(runner.model)
    vector.check_model(runner.model_config.hidden_size, len(layers))
    preset, keywords = vector.origin.delimiters, vector.origin.keywords.split(",")
    classes = TokenClasses(tokenizer_of(scheduler), delimiters, preset, keywords)
    steerer = Steerer(vector, classes, gamma, device=torch.device(runner.device))
    attach_steering(layers, steerer)
    return steerer


def _refuse_offloaded_layers(field: str) -> None:
    """Refuse a setting that hooks decoder layers where some may be offloaded.

    SGLang calls a layer inside the ``forward`` of its offloaded form, so a vector would be added
    twice, and a hidden state captured twice.

    Raises:
        SettingError: layers may be offloaded.
    """
    from sglang.srt.runtime_context import get_exec

    offloaded_gb = get_exec().offload.cpu_offload_gb
    if offloaded_gb > 0:
        expected = "no --cpu-offload-gb beside it"
        raise SettingError(field, expected, offloaded_gb, "one of the two; budgets work")


def _refuse_attention_groups(field: str) -> None:
    """Refuse a setting that reads whole hidden states between layers: with DP attention that is a
    step of all ranks, and the other groups would not take part.

    Raises:
        SettingError: there are several attention groups.
    """
    if has_dp_attention():
        expected = "no DP attention beside it (--attn-dp-size)"
        raise SettingError(field, expected, "DP attention", "one of the two; budgets work")


def model_side_of(runner: Any) -> ModelSide | None:
    """The ``ModelSide`` of a model runner."""
    side: ModelSide | None = getattr(runner, "skipkv", None)
    return side


def run_recorded_prefill_eagerly(
    original: Callable[..., bool], graph_runner: Any, forward_batch: Any
) -> bool:
    """AROUND ``PrefillCudaGraphRunner.can_run_graph``.

    Which tokens are recorded, and which are steered after a retraction, differs from batch to
    batch, so a graph cannot replay such a prefill. All other prefills are replayed.
    """
    side = model_side_of(graph_runner.model_runner)
    if side is not None and side.records_prefill:
        return False
    return bool(original(graph_runner, forward_batch))
