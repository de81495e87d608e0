"""A public model: the folder made of its file, the texts, and what is computed of them."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.public import forced as measured
from bench.public import model as public_model
from bench.public import texts

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 2, 48, 3, 1, 64
#: text of the tokens that stand for none
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def learned() -> Tokenizer:
    """Byte-level BPE with single digits, learned from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=[*CONTROL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts.topics.values()], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def original(learned: Tokenizer) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=learned.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def packaged_tensor(name: str, values: np.ndarray[Any, Any]) -> tuple[str, Any]:
    """Its name and rows in a GGUF file: row 2i of a head turns with row 2i + 1."""
    outside = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
    if name in outside:
        return f"{outside[name]}.weight", values
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    (short,) = (gguf for gguf, ours in public_model.LAYER.items() if f"{ours}.weight" == part)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
    if heads:
        half = len(values) // heads // 2
        starts = [2 * half * head + i for head in range(heads) for i in range(half)]
        values = values[[row for start in starts for row in (start, start + half)]]
    return f"blk.{layer}.{short}.weight", values


@pytest.fixture(scope="module")
def folder(original: Any, learned: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes of a GGUF file with the original's weights."""
    packaged = tmp_path_factory.mktemp("public")
    writer = GGUFWriter(packaged / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(original.config.rms_norm_eps)
    writer.add_rope_freq_base(original.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(original.config.vocab_size)
    vocabulary = learned.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    merges = json.loads(learned.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, weight in original.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(*packaged_tensor(name, weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = packaged / "written"
    command = ["model", "--gguf", str(packaged / "model.gguf"), "--output", str(written)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", command)
        public_model.main()
    return written


def test_the_written_folder_is_the_packaged_model(
    folder: Path, original: Any, learned: Tokenizer
) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, original.config.vocab_size, (1, 40))
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, original(ids).logits)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = texts.topics["types"][:2000] + " 4711"
    assert tokenizer.encode(text) == learned.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "so"}], tokenize=False)
    assert chat == "<|im_start|>so" and tokenizer.encode(chat)[0] == 1
    assert tokenizer.eos_token_id == 2


def test_what_is_asked_was_said_long_before_and_once(learned: Tokenizer) -> None:
    seen = [*texts.recall(learned)]
    assert len(seen) == len(texts.FILLER)
    for text in seen:
        pieces = [learned.decode([token]) for token in text.ids]
        starts = [0, *accumulate(map(len, pieces))]
        whole, names = "".join(pieces), []
        for group in text.scored:
            asked = whole[starts[group[0]] : starts[group[-1] + 1]]
            fact = whole[whole.rindex("\n", 0, starts[group[0]]) : starts[group[-1] + 1]] + "."
            assert asked.isdigit() and len(asked) == len(group) == 4
            assert whole.count(fact) == 2 and whole.count(fact.split(" has")[0]) == 2
            first = starts.index(whole.index(fact))
            assert first > texts.PROMPT_TOKENS and group[0] - first > 700
            names.append(fact.split()[3])
        assert sorted(names) == sorted(texts.NAMES)


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_the_second_half_is_scored_token_by_token(kind: str, learned: Tokenizer) -> None:
    for text in texts.KINDS[kind](learned):
        assert len(text.ids) == 2 * len(text.scored) == texts.TOKENS
        assert text.scored[0] == [texts.FIRST_SCORED] and text.scored[-1] == [texts.TOKENS - 1]


def test_a_budget_that_holds_all_costs_nothing(folder: Path) -> None:
    """Forced and without a budget agree, and eviction does cost this model something."""
    cells = {
        budget: measured.run(
            folder, measured.Cell("written", "recall", "streaming", budget, '{"interval": 64}')
        )
        for budget in (10_000, 64)
    }
    ample, small = cells[10_000], cells[64]
    assert ample["nats"] == pytest.approx(ample["full_nats"], abs=2e-4)
    assert ample["right"] == ample["full_right"] and ample["groups"] == 64
    assert -1e-4 <= ample["least_over_full"] <= ample["most_over_full"] <= 1e-4
    assert 64 < small["mean_kv_tokens"] < 64 + 65 and abs(small["most_over_full"]) > 0.01
    assert small["full_nats"] == ample["full_nats"]
