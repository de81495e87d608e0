"""Whether a model is supported, from its config.json alone: ``skipkv doctor --model``.

SGLang's own ``ModelConfig`` reads the file, so heads and the kind of attention are what a server
would see. A server still looks at the real pool and layers when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_skipkv.config import ServerConfig, SettingError, Unabridged
from sgl_skipkv.patches.engine.tested_models import FAMILIES
from sgl_skipkv.patches.startup.capabilities import CAPABILITIES, STATES
from sgl_skipkv.patches.startup.setting_kinds import generates_images
from sgl_skipkv.policy import policy_class, with_params

#: rotations whose turn follows from the position: see ``rotation_of`` in measurements.py
_ROTATIONS = ("default", "llama3", "yarn", "linear")
#: SGLang's models of these types have no windows, whatever the file says
_WITH_WINDOWS = {"Olmo2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"}
_WITHOUT_WINDOWS = FAMILIES.keys() - _WITH_WINDOWS


@dataclass(frozen=True)
class ModelReport:
    """What is known of a model before it is loaded.

    Attributes:
        architecture, model_type: as in the file.
        layers: with attention, so with KV.
        state_layers: with a state (linear attention, Mamba, short convolutions).
        kv_heads, head_dim: of a layer; with MLA of what is cached, one latent with its rotary key.
        tested: whether the type is one of ``FAMILIES``.
        reasons: why eviction cannot work; none: nothing in the file is against it.
        steered: whether steering is supported.
        rotation: of queries and keys, by its name in the file; ``mrope``: by three axes.
        measures_queries: whether ``triattention`` and ``expected`` are supported.
        window_tokens: the largest window of its layers; 0: they have none.
    """

    architecture: str
    model_type: str
    attention: str
    layers: int
    state_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tested: bool
    reasons: tuple[str, ...]
    steered: bool
    rotation: str
    window_tokens: int

    @property
    def least_budget_tokens(self) -> int:
        """Of the default policy with its default parameters."""
        default = policy_class(ServerConfig().kv_policy)
        return with_params(default, {}, self.window_tokens).min_budget_tokens

    @property
    def measures_queries(self) -> bool:
        # Gemma 3 turns its queries by an embedding that its layers know without its scaling.
        known = ("default",) if self.architecture.startswith("Gemma3") else _ROTATIONS
        return self.attention != "MLA" and self.rotation in known


def check_model(path: Path) -> ModelReport:
    """Read a model's config.json; ``path`` is the file or its folder. Nothing else is loaded.

    Raises:
        SettingError: no such file, or SGLang does not take it for a model.
    """
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    folder = path.parent if path.name == "config.json" else path
    expected = "the folder of a model, or its config.json"
    if not (folder / "config.json").is_file():
        got, choices = _no_config(path)
        raise SettingError("model", expected, Unabridged(got), choices)
    try:
        config = ModelConfig(str(folder), trust_remote_code=False)
        layers, state_layers = _layers(config)
    # No JSON, no known type, no architecture, no field that SGLang reads.
    except (OSError, ValueError, TypeError, AttributeError) as error:
        got = Unabridged(f"{path} ({str(error).strip().partition(chr(10))[0]})")
        choices = "a config.json with model_type and architectures that SGLang knows"
        raise SettingError("model", expected, got, choices) from error
    text, architecture = config.hf_text_config, config.hf_config.architectures[0]
    rope = getattr(text, "rope_parameters", None) or {}
    latent = config.attention_arch == AttentionArch.MLA
    return ModelReport(
        architecture=architecture,
        model_type=config.hf_config.model_type,
        attention="MLA" if latent else "heads",
        layers=layers,
        state_layers=state_layers,
        query_heads=config.get_total_num_attention_heads(),
        kv_heads=1 if latent else config.get_total_num_kv_heads(),
        head_dim=config.kv_lora_rank + config.qk_rope_head_dim if latent else config.head_dim,
        tested=architecture in FAMILIES,
        reasons=tuple(
            f"{name} ({seen}): {_why(name)}" for name, seen in _refusals(config, architecture)
        ),
        steered=FAMILIES.get(architecture) is not None,
        # Of layers that see everything, where a file has one for each kind.
        rotation="mrope"
        if config.model_is_mrope
        else str(rope.get("full_attention", rope).get("rope_type", "default")),
        window_tokens=int(config.sliding_window_size or 0) if _windows(config) else 0,
    )


def _no_config(path: Path) -> tuple[str, str]:
    """What is at a path without a config.json, and what would help."""
    if path.is_file():
        return f"{path}, a file of another name", "the same file, named config.json"
    if path.is_dir():
        return f"{path}, a folder without one", "a folder that has a config.json"
    choices = "a local folder that has a config.json; a model of a hub is downloaded first"
    return f"{path}, which is not there", choices


def _layers(config: Any) -> tuple[int, int]:
    """How many layers have KV, and how many have a state; a layer may have both, or neither."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    hybrid = mambaish_config(config)
    if hybrid is None:
        return int(config.num_hidden_layers), 0
    lists = (getattr(hybrid, name, None) for name in ("linear_layer_ids", "mamba_layer_ids"))
    with_state = next((one for one in lists if one is not None), range(config.num_hidden_layers))
    return len(hybrid.full_attention_layer_ids), len(with_state)


def _windows(config: Any) -> int:
    """How many layers have a window in SGLang's model."""
    kinds = [*(getattr(config.hf_text_config, "layer_types", None) or ())]
    if config.hf_config.architectures[0] in _WITHOUT_WINDOWS:
        return 0
    return kinds.count("sliding_attention")


def _why(name: str) -> str:
    (row,) = (row for row in CAPABILITIES if row.name == name)
    return row.why


def _refusals(config: Any, architecture: str) -> list[tuple[str, str]]:
    """Rows of the capability matrix that refuse this model, and what was seen in its file."""
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    text, windows = config.hf_text_config, _windows(config)
    layers, state_layers = _layers(config)
    latent = config.attention_arch == AttentionArch.MLA  # its keys are wider than its values
    seen = f"{windows} of {config.num_hidden_layers} layers, window {config.sliding_window_size}"
    cap, chunks = getattr(text, "attn_logit_softcapping", None), config.attention_chunk_size
    kv_heads = getattr(text, "num_key_value_heads", None)
    found = (
        ("sparse attention", "an indexer beside the latents", is_deepseek_dsa(config.hf_config)),
        (STATES, "MLA in the other layers", latent and state_layers > 0),
        (STATES, "no layer with KV", layers == 0),
        ("full attention", seen, 0 < windows == config.num_hidden_layers),
        ("chunked attention", f"chunks of {config.attention_chunk_size}", chunks),
        ("capped attention logits", f"at {cap}", cap),
        (
            "layers of different shapes",
            "heads or their sizes differ",
            isinstance(kv_heads, list | tuple) or (config.has_asymmetric_kv and not latent),
        ),
        ("routers by modality", architecture, config.requires_mm_token_modalities),
        ("generated images", architecture, generates_images(config.hf_config)),
        ("n-gram embeddings", architecture, config.use_ngram_embedding),
        ("engram layers", architecture, config.use_engram),
        ("encoder-decoder", architecture, config.is_encoder_decoder),
        ("embedding models", architecture, not config.is_generation),
    )
    return [(name, seen) for name, seen, holds in found if holds]
