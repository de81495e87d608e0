"""What eviction would say to a model, from its config.json alone: ``skipkv doctor --model``.

SGLang's own ``ModelConfig`` reads the file, so heads and the kind of attention are what a server
would see. A server still looks at the real pool and layers when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_skipkv.config import SettingError
from sgl_skipkv.patches.engine.families import FAMILIES
from sgl_skipkv.patches.startup.capabilities import CAPABILITIES

#: rotations whose turn follows from the position: see ``rotation_of`` in measurements.py
_ROTATIONS = ("default", "llama3", "yarn", "linear")
#: SGLang's models of these types have no windows, whatever the file says
_WITHOUT_WINDOWS = FAMILIES.keys() - {"Olmo2ForCausalLM"}


@dataclass(frozen=True)
class ModelReport:
    """What is known of a model before it is loaded.

    Attributes:
        architecture, model_type: as in the file.
        kv_heads, head_dim: of a layer; with MLA of what is cached, one latent with its rotary key.
        tested: whether the type is one of ``FAMILIES``.
        reasons: why eviction cannot work; none: nothing in the file is against it.
        steered: whether steering is supported.
        rotation: of queries and keys, by its name in the file.
        measures_queries: whether ``triattention`` and ``expected`` are supported.
    """

    architecture: str
    model_type: str
    attention: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tested: bool
    reasons: tuple[str, ...]
    steered: bool
    rotation: str

    @property
    def measures_queries(self) -> bool:
        return self.attention != "MLA" and self.rotation in _ROTATIONS


def check_model(path: Path) -> ModelReport:
    """Read a model's config.json; ``path`` is the file or its folder. Nothing else is loaded.

    Raises:
        SettingError: no such file, or SGLang does not take it for a model.
    """
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    folder = path.parent if path.name == "config.json" else path
    expected = "the folder of a model, or its config.json"
    if not (folder / "config.json").is_file():
        raise SettingError("model", expected, str(path), "a folder that has a config.json")
    try:
        config = ModelConfig(str(folder), trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:  # no JSON, no known type, no architecture
        got = f"{path} ({str(error).strip().partition(chr(10))[0]})"
        choices = "a config.json with model_type and architectures that SGLang knows"
        raise SettingError("model", expected, got, choices) from error
    text, architecture = config.hf_text_config, config.hf_config.architectures[0]
    rope = getattr(text, "rope_parameters", None) or {}
    latent = config.attention_arch == AttentionArch.MLA
    return ModelReport(
        architecture=architecture,
        model_type=config.hf_config.model_type,
        attention="MLA" if latent else "heads",
        layers=config.num_hidden_layers,
        query_heads=config.get_total_num_attention_heads(),
        kv_heads=1 if latent else config.get_total_num_kv_heads(),
        head_dim=config.kv_lora_rank + config.qk_rope_head_dim if latent else config.head_dim,
        tested=architecture in FAMILIES,
        reasons=tuple(
            f"{name} ({seen}): {_why(name)}" for name, seen in _against(config, architecture)
        ),
        steered=FAMILIES.get(architecture) is not None,
        rotation=str(rope.get("rope_type", "default")),
    )


def _why(name: str) -> str:
    (row,) = (row for row in CAPABILITIES if row.name == name)
    return row.why


def _against(config: Any, architecture: str) -> list[tuple[str, str]]:
    """Rows of the capability matrix that refuse this model, and what was seen in its file."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    text = config.hf_text_config
    latent = config.attention_arch == AttentionArch.MLA  # its keys are wider than its values
    kinds = [*(getattr(text, "layer_types", None) or ())]
    windows = kinds.count("sliding_attention")
    kv_heads = getattr(text, "num_key_value_heads", None)
    found = (
        ("sparse attention", "an indexer beside the latents", is_deepseek_dsa(config.hf_config)),
        ("hybrid / mamba", "layers without a KV cache", mambaish_config(config) is not None),
        (
            "sliding window",
            f"{windows} of {len(kinds)} layers, window {config.sliding_window_size}",
            config.is_hybrid_swa or (windows and architecture not in _WITHOUT_WINDOWS),
        ),
        ("sliding window", f"chunks of {config.attention_chunk_size}", config.attention_chunk_size),
        ("attention sinks", "learned, one per head", config.has_attention_sinks),
        (
            "layers of different shapes",
            "heads or their sizes differ",
            isinstance(kv_heads, list | tuple) or (config.has_asymmetric_kv and not latent),
        ),
        ("multimodal rotary positions", "mrope_section", config.model_is_mrope),
        ("encoder-decoder", architecture, config.is_encoder_decoder),
        ("embedding models", architecture, not config.is_generation),
    )
    return [(name, seen) for name, seen, holds in found if holds]
