"""What policies may know of the model's queries: how they are rotated, and their centres, which one
forward pass measures before a server is ready."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import torch

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches.engine.model_side import ModelSide, attention_layers
from sgl_skipkv.policy import names, policy_class
from sgl_skipkv.policy.query_centres import (
    MOST_TOKENS,
    TEXT,
    Means,
    QueryCentres,
    Rotation,
    means,
)
from sgl_skipkv.recording.recorder import Recording

#: of a table in half precision against the formula
_TABLE_TOLERANCE = 0.02


class NoRotation(ValueError):
    """A rotary embedding whose turn does not follow from the position alone."""


def query_centres_of(
    scheduler: Any, side: ModelSide, config: ServerConfig
) -> tuple[QueryCentres | None, dict[str, str]]:
    """What there is for policies to know, and the policies that need more: name -> why.

    Raises:
        SettingError: ``query_text`` is no readable file.
    """
    classes = {name: policy_class(name) for name in names()}
    try:
        rotation = rotation_of(scheduler.tp_worker.model_runner.model)
    except NoRotation as error:
        return None, {n: str(error) for n, c in classes.items() if c.needs_rotation}
    asking = [name for name, policy in classes.items() if policy.needs_centres]
    if config.query_text is None and config.kv_policy not in asking:
        centres = QueryCentres.unmeasured(rotation, side.recorder.device)
        return centres, dict.fromkeys(asking, "started without query_text")
    try:
        text = Path(config.query_text or TEXT).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        expected = "a readable text file"
        choices = "a text like those that the model will write"
        raise SettingError("query_text", expected, f"{error}", choices) from error
    return _measured(scheduler, side, rotation, text), {}


def _measured(scheduler: Any, side: ModelSide, rotation: Rotation, text: str) -> QueryCentres:
    """Prefill the text once and take the mean of what every head asks.

    Runs when pools and model exist and no request has come: all memory is free, and is again.
    """
    runner = scheduler.tp_worker.model_runner
    room = min(scheduler.max_total_num_tokens, int(scheduler.model_config.context_len)) - 8
    ids = scheduler.tokenizer.encode(text)[: min(MOST_TOKENS, room)]
    seen: dict[int, Means] = {}
    heads, head_dim = side.recorder.shape.query_heads, side.recorder.shape.head_dim

    def remember(layer: Any, args: tuple[Any, ...]) -> None:
        seen[layer.layer_id] = means(rotation, args[0].detach().view(-1, heads, head_dim))

    layers = attention_layers(runner.model)
    hooks = [layer.register_forward_pre_hook(remember) for layer in layers]
    empty = torch.zeros(0, dtype=torch.int64, device=side.recorder.device)
    side.recorder.current = Recording(empty, empty, tokens=empty)  # nothing, but no graph runs
    try:
        _prefill(scheduler, ids)
    finally:
        side.recorder.current = None
        for hook in hooks:
            hook.remove()
    return QueryCentres.of_means(rotation, [seen[layer.layer_id] for layer in layers])


def _prefill(scheduler: Any, ids: list[int]) -> None:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampling_params import SamplingParams

    runner, pages = scheduler.tp_worker.model_runner, scheduler.req_to_token_pool
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    params = SamplingParams(max_new_tokens=1, temperature=0)
    params.normalize(None)
    vocab_size = scheduler.model_config.vocab_size
    req = Req("skipkv query centres", "", array("q", ids), params, vocab_size=vocab_size)
    req.init_next_round_input(tree)
    req.extend_end = len(ids)
    batch = ScheduleBatch.init_new(
        *([req], pages, allocator, tree, scheduler.model_config, False, scheduler.spec_algorithm)
    )
    batch.prepare_for_extend()
    batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
    with torch.inference_mode():
        runner.forward(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))
    tree.reset()
    pages.clear()
    allocator.clear()
    pages.req_to_token.zero_()


def rotation_of(model: Any) -> Rotation:
    """The one rotary embedding of all attention layers.

    Raises:
        NoRotation: there is none, there are several, or it is of another kind.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    names = [name for name, one in model.named_modules() if isinstance(one, RadixAttention)]
    parents = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    embeddings = [getattr(parent, "rotary_emb", None) for parent in parents]
    rotations = {id(one): _rotation(one) for one in embeddings}
    first, *others = rotations.values()
    if any(not torch.equal(one.frequencies, first.frequencies) for one in others):
        raise NoRotation("layers with different rotary embeddings")
    return first


def _rotation(embedding: Any) -> Rotation:
    """Its frequencies, checked against the table that the server rotates with."""
    name = type(embedding).__name__
    if embedding is None:
        raise NoRotation("an attention layer without a rotary embedding")
    factor = scale = 1.0
    argument = getattr(embedding, "base", None)
    if name == "YaRNScalingRotaryEmbedding":
        argument, scale = embedding.scaling_factor, float(embedding.mscale)
    elif name == "LinearScalingRotaryEmbedding" and len(embedding.scaling_factors) == 1:
        factor = float(embedding.scaling_factors[0])
    elif name not in ("RotaryEmbedding", "Llama3RotaryEmbedding"):
        raise NoRotation(f"{name}: its turn does not follow from the position alone")
    frequencies = embedding._compute_inv_freq(argument).double().cpu() / factor
    table = embedding.cos_sin_cache
    for position in (1, min(100, len(table) - 1)):
        angles = position * frequencies
        expected = scale * torch.cat([angles.cos(), angles.sin()])
        if (table[position].double().cpu() - expected).abs().max() > _TABLE_TOLERANCE * scale:
            raise NoRotation(f"{name}: its table is not that of its frequencies")
    return Rotation.of(
        frequencies, embedding.head_size, scale=scale, halves=embedding.is_neox_style
    )
