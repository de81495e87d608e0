"""The model types whose every token was held to the masking oracle: docs/models.md.

Eviction does not ask for the type: what is refused depends on pool, allocator and layers
(``patches/startup/capabilities.py``). Steering does, because it writes to the residual stream.
"""

from __future__ import annotations

from typing import Final

#: architecture of a config.json -> the decoder layer that steering was tested on; None where the
#: layers keep their residual in another form than SGLang's residual stream, which steering needs
FAMILIES: Final[dict[str, str | None]] = {
    "LlamaForCausalLM": "LlamaDecoderLayer",
    "Qwen2ForCausalLM": "Qwen2DecoderLayer",
    "Qwen3ForCausalLM": "Qwen3DecoderLayer",
    "Qwen3MoeForCausalLM": "Qwen3MoeDecoderLayer",
    "MistralForCausalLM": "LlamaDecoderLayer",
    "Phi3ForCausalLM": "LlamaDecoderLayer",
    "Glm4ForCausalLM": "Glm4DecoderLayer",
    "Glm4MoeForCausalLM": "Glm4MoeDecoderLayer",
    "Olmo2ForCausalLM": None,
    "GraniteForCausalLM": None,
    "GemmaForCausalLM": None,
    "Gemma3ForCausalLM": None,
    "GptOssForCausalLM": "GptOssDecoderLayer",
    "DeepseekV3ForCausalLM": None,
    "Lfm2ForCausalLM": None,
    "Qwen3NextForCausalLM": None,
    "Qwen2_5_VLForConditionalGeneration": "Qwen2DecoderLayer",
    "Qwen3VLForConditionalGeneration": "Qwen3DecoderLayer",
}
STEERED_LAYERS: Final = frozenset(layer for layer in FAMILIES.values() if layer is not None)
STEERED_TYPES: Final = (
    "Llama, Qwen2, Qwen3, Qwen3-MoE, Qwen2.5-VL, Qwen3-VL, Mistral, Phi-3, GLM-4, GLM-4-MoE and "
    "gpt-oss types"
)
