"""Small random models of many families, and a tokenizer in which a quarter of the tokens end lines.

Sharp attention and small embeddings make every argmax depend on what is cached: hiding 30 of 160
tokens changes most of the next ones, so a wrong mask shows at once. Many newline tokens make many
sentences.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_vision import processor, vision_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

#: a family's place is its seed
FAMILIES = ("llama", "qwen2", "qwen3", "thinking", "qwen3_moe")
FAMILIES += ("mistral", "glm4", "glm4_moe", "olmo2", "granite", "phi3", "gemma", "gemma3")
FAMILIES += ("deepseek_v3", "gpt_oss", "for_a_gpu", "qwen2_5_vl", "qwen3_vl", "for_four_ranks")
FAMILIES += ("lfm2", "qwen3_next")
#: that read images
WITH_VISION = ("qwen2_5_vl", "qwen3_vl")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
LINE_ENDS = (
    *("\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n", ":\n", ",\n", "?\n", "!\n", ";\n", "]\n\n"),
)
PIECES = ("<pad>", "<s>", "</s>", " ", *LETTERS, *LINE_ENDS)
VOCAB_SIZE = len(PIECES)
LINE_END_IDS = frozenset(map(PIECES.index, LINE_ENDS))
NEWLINE = PIECES.index("\n")
BLANKS = frozenset(map(PIECES.index, (" ", "\n", "\n\n")))
#: of the family "thinking" only, a Llama
THOUGHTS = ("<think>", "</think>")
THINK_START, THINK_END = VOCAB_SIZE, VOCAB_SIZE + 1
#: of models that read images
MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = range(VOCAB_SIZE, VOCAB_SIZE + len(MEDIA))
_MEDIA_IDS = {
    **{"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END},
    **{"image_token_id": IMAGE, "video_token_id": VIDEO},
}


def prompt_ids(seed: int | str, tokens: int) -> list[int]:
    """So many tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(tokens)]


_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 32768, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
_HEADS_OF_16: dict[str, Any] = {"head_dim": 16, "pad_token_id": 0}
#: of gemma3 and gpt_oss: config.json's, so a query sees itself and 31 tokens before it
WINDOW = 32
# What a family has beside the sizes: no window but in these two, and factors other than 1 where it
# has factors.
_EXTRA: dict[str, dict[str, Any]] = {
    # Heads as FlashInfer reads them. Attention is less sharp, because a GPU's server has 16 bits.
    "for_a_gpu": {
        **{"hidden_size": 256, "intermediate_size": 512},
        **{"num_attention_heads": 4, "num_key_value_heads": 1},
    },
    "qwen3": {"head_dim": 16},
    # Positions on three axes, in sections of a head's frequencies, and interleaved.
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {
        "head_dim": 16,
        "rope_parameters": {
            **{"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
            "rope_theta": 10000.0,
        },
    },
    "qwen3_moe": {
        **{"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 64},
    },
    # SGLang on a CPU shares KV heads out as if all ranks were of one attention group.
    "for_four_ranks": {
        **{"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    },
    "mistral": {"sliding_window": None},
    "glm4": _HEADS_OF_16,
    "glm4_moe": {
        **_HEADS_OF_16,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        **{"use_qk_norm": True, "first_k_dense_replace": 1},
    },
    "olmo2": {"pad_token_id": 0},
    "granite": {
        **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0},
        **{"residual_multiplier": 0.5, "logits_scaling": 0.5},
    },
    "phi3": {"pad_token_id": 0},
    # SGLang's Gemma has the exact GELU, by this name in transformers; its embedding is tied.
    # MLA: a latent of 24 numbers and 8 rotated ones per token. No experts: torch would compile
    # their router first, for a minute.
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
        **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "num_mtp_layers": 0},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        # SGLang has no other rotation on a CPU; its factor on the logits is not 1, either.
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
            "original_max_position_embeddings": 8192,
        },
        "pad_token_id": 0,
    },
    "gemma": {**_HEADS_OF_16, "hidden_act": "gelu_python", "tie_word_embeddings": True},
    "gemma3": {
        **{**_HEADS_OF_16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW},
        **{"num_hidden_layers": 4, "tie_word_embeddings": True},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        **{**_HEADS_OF_16, "num_hidden_layers": 4, "sliding_window": WINDOW},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
        # Its embedding multiplies queries and keys, too.
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False},
            **{"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 8192},
        },
    },
    # Every other layer is a short convolution, which has a state instead of KV.
    "lfm2": {
        **{"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
        **{"conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "pad_token_id": 0},
        "tie_word_embeddings": True,
    },
    # Every other layer is linear attention, with three value heads for a key head.
    "qwen3_next": {
        **{"head_dim": 16, "pad_token_id": 0, "num_hidden_layers": 4, "full_attention_interval": 2},
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    },
}
#: of gpt_oss, one per query head, as large as logits are here: without them other tokens win
SINKS = (12.0, 16.0, 20.0, 24.0)
#: what a server needs to run one, as the real one with a pool of their own for window layers
_AS_EXTERNAL = {
    "architectures": ["GptOssOnCpuForCausalLM"],
    **{"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]},
}
TWO_POOLS = ("--json-model-override-args", json.dumps(_AS_EXTERNAL))
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "gpt_oss": (*TWO_POOLS, "--disable-hybrid-swa-memory"),
    "lfm2": ("--max-mamba-cache-size", "200"),  # slots for states
    "qwen3_next": ("--max-mamba-cache-size", "300"),
}
#: of lfm2, which SGLang lets by the name of another model (``hybrid_models/lfm2_on_cpu.py``); in
#: pages, because it takes a length in front of a multiple of one token for the multiple
STATES_COPIED = (
    *("--json-model-override-args", json.dumps({"architectures": ["FalconH1ForCausalLM"]})),
    *("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "32"),
)
_HERE = Path(__file__).parent
_EXTERNAL_MODELS = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "external_models",
    "PYTHONPATH": os.pathsep.join([str(_HERE), str(_HERE / "quick_starts")]),
}
_HYBRID = {
    **_EXTERNAL_MODELS,
    **{"SGLANG_EXTERNAL_MODEL_PACKAGE": "hybrid_models", "SGLANG_MAMBA_CONV_DTYPE": "float32"},
}
#: without a compiled router, which would take a minute
DRAFT_MODELS = {
    **_EXTERNAL_MODELS,
    **{"SGLANG_EXTERNAL_MODEL_PACKAGE": "draft_models", "TORCHDYNAMO_DISABLE": "1"},
}
ENVIRONMENT = {"gpt_oss": _EXTERNAL_MODELS, "lfm2": _HYBRID, "qwen3_next": _HYBRID}
_NORM_GAIN = 3.0
_SHARP_NORMS = ("q_norm", "k_norm", "post_attention_layernorm")  # of gemma3
# Gains on the usual initialisation, by the first part of a name that matches.
_GAINS = {
    **{"q_b_proj": 20.0, "kv_a_proj": 20.0, "kv_b_proj": 20.0},
    **{"q_norm": _NORM_GAIN, "k_norm": _NORM_GAIN},
    **{"q_layernorm": _NORM_GAIN, "k_layernorm": _NORM_GAIN},
    **{"self_attn.out_proj": 60.0, "conv.conv": 20.0, "conv.": 10.0, "feed_forward": 4.0},
    **{"linear_attn.norm": 1.0, "dt_bias": 1.0, "linear_attn.": 20.0},
    **{"qkv_proj": 20.0, "q_proj": 20.0, "k_proj": 20.0},
    **{"v_proj": 60.0, "o_proj": 60.0, "post_mlp_layernorm": 1.0, "mlp": 4.0, "lm_head": 4.0},
    **{"": 1.0},
}
#: on top, where values are the last rows of one matrix, and where logits come from embeddings
_VALUE_ROWS, _PHI3_VALUES, _TIED_EMBEDDINGS = 32, 3.0, 4.0
#: and on every projection, so that rounding to float16 is far less than what a wrong mask changes
_FOR_16_BITS = 0.5

#: of LoRA adapters: the projections of Llama, Qwen2 and Qwen3
_ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_RANK, _ALPHA = 4, 8


def build_tokenizer(pieces: Sequence[str] = PIECES) -> PreTrainedTokenizerFast:
    """One token per character, plus the line ends, and the thinking tokens if they are pieces."""
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    whole = (*LINE_ENDS, *(piece for piece in (*THOUGHTS, *MEDIA) if piece in pieces))
    longest_first = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{longest_first}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def save_model(family: str, folder: Path) -> Path:
    """Write one random model with its tokenizer; the same weights every time."""
    sees = family in WITH_VISION
    pieces = PIECES + (THOUGHTS if family == "thinking" else MEDIA if sees else ())
    kinds = {"thinking": "llama", "gemma3": "gemma3_text", "for_a_gpu": "qwen2"}
    kinds["for_four_ranks"] = "qwen3_moe"
    kind = kinds.get(family, family)
    torch.manual_seed(FAMILIES.index(family))
    sizes = {**_SIZES, **_EXTRA.get(family, {}), "vocab_size": len(pieces)}
    if sees:
        model = vision_model(family, sizes, _MEDIA_IDS)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".visual." in name:
                continue
            parameter.mul_(next(by for part, by in _GAINS.items() if part in name))
            if family == "for_a_gpu" and "proj" in name:
                parameter.mul_(_FOR_16_BITS)
            if "qkv_proj" in name:
                parameter[-_VALUE_ROWS:].mul_(_PHI3_VALUES)
            if family in ("gemma", "gemma3", "lfm2") and "embed_tokens" in name:
                parameter.mul_(_TIED_EMBEDDINGS)
            if family == "gemma3" and any(norm in name for norm in _SHARP_NORMS):
                parameter.fill_(_NORM_GAIN - 1.0)  # Gemma's norms multiply with 1 + weight
            if family == "qwen3_next" and ("q_norm" in name or "k_norm" in name):
                parameter.fill_(_NORM_GAIN - 1.0)  # as Gemma's
            if "A_log" in name:
                parameter.fill_(-3.0)  # a state that forgets slowly
            if "sinks" in name:
                parameter.copy_(torch.tensor(SINKS))
        if family == "thinking":  # most outputs have one, and an answer behind it
            model.lm_head.weight[THINK_END] *= 1.3
        if sees:
            model.lm_head.weight[VOCAB_SIZE:] = 0.0  # it generates text
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(pieces)
    (processor(family, tokenizer) if sees else tokenizer).save_pretrained(folder)
    return folder


def save_adapter(model: Path, name: str) -> Path:
    """Write a random LoRA adapter of a saved model as PEFT does, and the two merged, at
    ``merged``; the same weights for the same name."""
    folder, weights = model / "adapters" / name, load_file(model / "model.safetensors")
    draw, adapter = torch.Generator().manual_seed(zlib.crc32(name.encode())), {}
    for weight_name, weight in weights.items():
        module = weight_name.removesuffix(".weight")
        if module.rpartition(".")[2] not in _ADAPTED:
            continue
        rows, columns = weight.shape
        a = torch.randn(_RANK, columns, generator=draw) / columns**0.5
        b = torch.randn(rows, _RANK, generator=draw) * weight.std()
        adapter[f"base_model.model.{module}.lora_A.weight"] = a
        adapter[f"base_model.model.{module}.lora_B.weight"] = b
        weights[weight_name] = weight + _ALPHA / _RANK * b @ a
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": _ADAPTED}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapter, folder / "adapter_model.safetensors")
    copied = shutil.ignore_patterns("adapters", "merged", "model.safetensors")
    shutil.copytree(model, merged(model, name), ignore=copied)
    save_file(weights, merged(model, name) / "model.safetensors", metadata={"format": "pt"})
    return folder


def merged(model: Path, adapter: str) -> Path:
    """The folder of a model with one of its saved adapters."""
    return model / "merged" / adapter
