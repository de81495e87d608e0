"""Steering inside the model: the residual stream after one decoder layer.

SGLang keeps a layer's output in two parts: the residual so far, and the layer's contribution, which
the next layer's norm adds (with tensor parallelism it is first reduced over the ranks). The
residual is complete and the same on every rank, so the vector is added to it in place: exactly
once. ``ResidualStream.check`` would refuse a replaced output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_skipkv.config import SettingError
from sgl_skipkv.eviction.runtime import Runtime
from sgl_skipkv.kernels.on_device import device_tensor
from sgl_skipkv.patches.engine.mixed_chunks import decoding_rows
from sgl_skipkv.patches.engine.tested_models import STEERED_LAYERS, STEERED_TYPES
from sgl_skipkv.request.state import RequestState
from sgl_skipkv.steering.steerer import Steerer
from sgl_skipkv.steering.vector import FIELD


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a model that steering was tested on.

    Raises:
        SettingError: the model's layers are others: their residual may have another form.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    kinds = {type(layer).__name__ for layer in layers or ()}
    if not kinds or not kinds <= STEERED_LAYERS:
        got = f"{type(model).__name__} ({', '.join(sorted(kinds)) or 'no model.layers'})"
        expected = f"a model whose layers steering was tested on ({STEERED_TYPES})"
        raise SettingError(FIELD, expected, got, "no steering for this model; budgets work")
    return layers


def attach_steering(layers: Any, steerer: Steerer) -> None:
    """Hook the vector's decoder layer: add the vector to the residual that the next layer reads."""

    def steer(layer: Any, args: tuple[Any, ...], output: Any) -> None:
        _, _, forward_batch = args
        if forward_batch.forward_mode.is_decode():
            if steerer.steered_requests or is_capturing():
                rows, tokens = forward_batch.req_pool_indices, forward_batch.input_ids
                steerer.decode(residual_of(forward_batch), rows.long(), tokens.long())
            return
        if steerer.factors is not None:
            count = len(steerer.factors)  # DP attention pads a step
            steerer.prefill(residual_of(forward_batch)[:count])
        if steerer.decoding is not None:
            of_rows, of_tokens = steerer.decoding
            # Copies: of a view at another alignment Triton would compile the kernel anew.
            rows, tokens = (
                part.to(torch.int64, copy=True)
                for part in (
                    forward_batch.req_pool_indices[of_rows],
                    forward_batch.input_ids[of_tokens],
                )
            )
            steerer.decode(residual_of(forward_batch)[of_tokens], rows, tokens)

    layers[steerer.layer].register_forward_hook(steer)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured. A captured pass must include all that replays do."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def residual_of(forward_batch: Any) -> Tensor:
    """float [tokens, D], the residual to which the layer that just ran adds its output."""
    from sglang.srt.layers.layer_boundary.residual.batch import stream_of

    residual: Tensor | None = stream_of(forward_batch).residual
    tokens = forward_batch.input_ids.shape[0]
    assert residual is not None and residual.shape[0] == tokens, "residual rows are tokens"
    return residual


def prepare_prefill(
    runtime: Runtime, batch: Any, states: Sequence[RequestState | None], firsts: Sequence[int]
) -> None:
    """Prepare every steered row for decoding, and set the vector's factors for this prefill.

    Prompts are not steered. After a retraction the prefill recomputes generated tokens, with the
    factors they had when they were decoded. Rows that decode are steered as in a decode step.

    Args:
        firsts: logical position of each request's first token in this prefill.
    """
    steerer = runtime.steerer
    if steerer is None or not steerer.steered_requests:
        return
    factors: list[float] = []
    rows = len(states)
    prefilled = rows - decoding_rows(batch)
    of_prefills = zip(
        *(part[:prefilled] for part in (batch.reqs, states, firsts, batch.extend_lens)), strict=True
    )
    for req, state, first, count in of_prefills:
        of_request = [0.0] * count
        if state is not None and state.schedule is not None:
            schedule = state.schedule.copy()
            generated = first + count - state.prompt.tokens
            decoded = schedule.feed(req.output_ids[: max(generated, 0)])[-count:]
            of_request[count - len(decoded) :] = decoded
            steerer.start(state.row, schedule)
        factors.extend(of_request)
    if any(state is not None and state.schedule is not None for state in states[prefilled:]):
        tokens = len(factors) + rows - prefilled
        steerer.decoding = slice(prefilled, rows), slice(len(factors), tokens)
    if any(factors):
        steerer.factors = device_tensor(factors, runtime.recorder.device, torch.float32)
