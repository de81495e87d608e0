"""What policies may know of the model: how its queries are rotated, and what one forward pass
measures before a server is ready, and again behind new weights: their centres, and how far each
head looks."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.patches.engine.attention_layers import (
    attention_layers,
    scored_layers,
    with_rotary_part,
)
from sgl_skipkv.patches.engine.dp_attention import has_dp_attention
from sgl_skipkv.patches.engine.model_side import ModelSide
from sgl_skipkv.patches.engine.speculation import is_speculative
from sgl_skipkv.patches.engine.vocabulary import tokenizer_of
from sgl_skipkv.patches.startup.attention_check import AttentionCheck, AttentionMismatch
from sgl_skipkv.policy.inputs.head_reach import FIRST_QUERY, head_reach
from sgl_skipkv.policy.inputs.query_centres import (
    MOST_TOKENS,
    TEXT,
    Means,
    QueryCentres,
    Rotation,
    means,
)
from sgl_skipkv.ranks import ONE_RANK, Ranks
from sgl_skipkv.recording.recorder import Recorder, Recording

#: of a table in half precision against the formula
_TABLE_TOLERANCE = 0.02


class NoRotation(ValueError):
    """A rotary embedding whose turn does not follow from the position alone."""


class Measurements(NamedTuple):
    """What policies are told of the model.

    Attributes:
        centres: of its queries, and their rotation; None where it does not follow from the
            position.
        reach: float32 [layers, Hkv of all ranks], how far its heads look.
    """

    centres: QueryCentres | None
    reach: Tensor


def text_ids(scheduler: Any, config: ServerConfig) -> list[int]:
    """The tokens on which the model is measured, at start and after each change of its weights: the
    file may be gone by then.

    Raises:
        SettingError: ``query_text`` is no readable file, or too short.
    """
    try:
        text = Path(config.query_text or TEXT).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        expected = "a readable text file"
        choices = "a text like those that the model will write"
        raise SettingError("query_text", expected, f"{error}", choices) from error
    pool_tokens = scheduler.token_to_kv_pool_allocator.size  # of the smaller pool, if there are two
    room = min(pool_tokens, int(scheduler.model_config.context_len)) - 8
    if has_dp_attention() and scheduler.chunked_prefill_size:
        # All groups prefill it at once, and SGLang has planned for a chunk of each.
        room = min(room, max(scheduler.chunked_prefill_size, 4 * FIRST_QUERY))
    ids: list[int] = tokenizer_of(scheduler).encode(text)[: min(MOST_TOKENS, room)]
    if len(ids) <= FIRST_QUERY:
        expected = f"more than {FIRST_QUERY} tokens that this server has room for"
        raise SettingError("query_text", expected, len(ids), "a longer text, or a larger pool")
    return ids


def measure_model(
    scheduler: Any,
    side: ModelSide,
    ids: list[int],
    ranks: Ranks = ONE_RANK,
    *,
    serving: bool = False,
) -> Measurements:
    """Prefill a text once and record each head's mean query and its reach, and whether the
    attention is that of what is recorded and cached.

    Runs when pools and model exist and no request has come: all memory is free, and is again.

    Args:
        ids: of ``text_ids``.
        serving: whether requests have come. None of them has a row now, but the radix tree may hold
            KV.

    Raises:
        AttentionMismatch: scores would not be of what the model's attention does.
    """
    model = scheduler.tp_worker.model_runner.model
    rotation = None if without_rotation(model) else rotation_of(model)
    check = AttentionCheck(scheduler, side.scale, len(ids))
    centres, reach = _seen(scheduler, side, rotation, ids, check, serving)
    check.conclude(ranks)
    return Measurements(
        None if rotation is None else QueryCentres.of_means(rotation, centres),
        torch.cat(ranks.gathered(torch.stack(reach)).unbind(), dim=1),
    )


def _seen(
    scheduler: Any,
    side: ModelSide,
    rotation: Rotation | None,
    ids: list[int],
    check: AttentionCheck,
    serving: bool,
) -> tuple[list[Means], list[Tensor]]:
    """Of every layer the mean queries, if their rotation is known, and the reach of its heads."""
    runner, head_dim = scheduler.tp_worker.model_runner, side.recorder.shape.head_dim
    centres, reach = dict[int, Means](), dict[int, Tensor]()

    def remember(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        both = (
            with_rotary_part(args[0], kwargs.get("q_rope")),
            with_rotary_part(args[1], kwargs.get("k_rope")),
        )
        # DP attention pads a step.
        queries, keys = (part.detach()[: len(ids)].view(len(ids), -1, head_dim) for part in both)
        reach[layer.layer_id] = head_reach(queries, keys, side.scale, kwargs.get("sinks"))
        if rotation is not None:
            centres[layer.layer_id] = means(rotation, queries)

    layers = attention_layers(runner.model)
    scored = scored_layers(layers)
    hooks = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in scored]
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(check.before, with_kwargs=True))
        hooks.append(layer.register_forward_hook(check.after, with_kwargs=True))
    try:
        _prefill(scheduler, ids, side.recorder, serving)
    finally:
        for hook in hooks:
            hook.remove()
    order = [layer.layer_id for layer in scored]
    if not reach.keys() >= {*order}:
        seeded = "--enable-deterministic-inference"  # which is refused with drafts
        others = "no flag, with drafts" if is_speculative(scheduler) else seeded
        raise AttentionMismatch(
            "prefills that attend to keys of every head instead of the cached latents, so the "
            "queries of a prompt cannot be recorded (flashinfer: "
            f"--flashinfer-mla-disable-ragged; fa3, triton: {others})"
        )
    return [centres[i] for i in order if i in centres], [reach[i] for i in order]


def _prefill(scheduler: Any, ids: list[int], recorder: Recorder, serving: bool) -> None:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.common import release_kv_cache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampling_params import SamplingParams

    runner, pages = scheduler.tp_worker.model_runner, scheduler.req_to_token_pool
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    params = SamplingParams(max_new_tokens=1, temperature=0)
    params.normalize(None)
    vocab_size = scheduler.model_config.vocab_size
    name = "skipkv query centres"  # of a namespace of its own, too: nothing of it is cached
    req = Req(name, "", array("q", ids), params, vocab_size=vocab_size, extra_key=name)
    req.init_next_round_input(tree)
    req.extend_end, req.logprob_start_len = len(ids), -1
    batch = ScheduleBatch.init_new(
        *([req], pages, allocator, tree, scheduler.model_config, False, scheduler.spec_algorithm)
    )
    try:
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
        with torch.no_grad():  # as SGLang: what is created here may be written to later
            inputs = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
            empty = torch.zeros(0, dtype=torch.int64, device=recorder.device)
            # Nothing is recorded, but no graph runs: in a replay no hook of a layer is called.
            recorder.current = Recording(empty, empty, tokens=empty)
            runner.forward(inputs)
    finally:  # where eviction is not enabled, the server continues without us: all slots are free
        recorder.current = None
        if not serving:
            tree.reset()
            pages.clear()
            allocator.clear()
            pages.req_to_token.zero_()
        elif req.kv.holds_kv:
            release_kv_cache(req, tree, checkpoint=False)


def without_rotation(model: Any) -> str | None:
    """Why policies cannot know how the model's queries are rotated; None: they can."""
    try:
        rotation_of(model)
    except NoRotation as error:
        return str(error)
    return None


def rotation_of(model: Any) -> Rotation:
    """The one rotary embedding of all scored attention layers.

    Raises:
        NoRotation: there is none, there are several, or it is of another kind.
    """
    scored = scored_layers(attention_layers(model))
    names = [name for name, one in model.named_modules() if one in scored]
    if any(name.endswith(".attn_mqa") for name in names):
        raise NoRotation("MLA: queries are turned in part, behind their latent part")
    parents = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    embeddings = [getattr(parent, "rotary_emb", None) for parent in parents]
    rotations = {id(one): _rotation(one) for one in embeddings}
    first, *others = rotations.values()
    if any(not torch.equal(one.frequencies, first.frequencies) for one in others):
        raise NoRotation("layers with different rotary embeddings")
    for name, one in model.named_modules():
        # Gemma 3 rotates all layers with one of the model's own, which knows more scalings.
        own = name.endswith("model.rotary_emb") and hasattr(one, "inv_freq")
        if own and not _turns_as(one, first):
            raise NoRotation(f"{type(one).__name__}: not the rotary embedding of its layers")
    return first


def _turns_as(embedding: Any, rotation: Rotation) -> bool:
    """Whether a model's own rotary embedding is that of its layers."""
    frequencies = embedding.inv_freq.double().cpu()
    expected = rotation.frequencies[: len(frequencies)]
    return embedding.attention_scaling == rotation.scale and torch.allclose(frequencies, expected)


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
