"""Small random models of four families, and a tokenizer in which a quarter of the tokens end
lines.

Sharp attention and small embeddings make every argmax depend on what is cached: hiding 30 of 160
tokens changes most of the next ones, so a wrong mask shows at once. Many newline tokens make many
sentences.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3", "thinking", "qwen3_moe")
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
# Gains on the usual initialisation, by the first part of a name that matches.
_GAINS = {
    **{"q_norm": 3.0, "k_norm": 3.0, "q_proj": 20.0, "k_proj": 20.0, "v_proj": 60.0},
    **{"o_proj": 60.0, "mlp": 4.0, "lm_head": 4.0, "": 1.0},
}


def build_tokenizer(pieces: Sequence[str] = PIECES) -> PreTrainedTokenizerFast:
    """One token per character, plus the line ends, and the thinking tokens if they are pieces."""
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    whole = (*LINE_ENDS, *(piece for piece in THOUGHTS if piece in pieces))
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
    extra: dict[str, Any] = {"head_dim": 16} if family.startswith("qwen3") else {}
    if family == "qwen3_moe":
        extra |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    pieces = PIECES + THOUGHTS if family == "thinking" else PIECES
    kind = "llama" if family == "thinking" else family
    torch.manual_seed(FAMILIES.index(family))
    sizes = {**_SIZES, **extra, "vocab_size": len(pieces)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(next(by for part, by in _GAINS.items() if part in name))
        if family == "thinking":  # most outputs have one, and an answer behind it
            model.lm_head.weight[THINK_END] *= 1.3
    model.save_pretrained(folder)
    build_tokenizer(pieces).save_pretrained(folder)
    return folder
