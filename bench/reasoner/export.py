"""Write a trained model as a folder that Transformers and SGLang load, and read it back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench.reasoner.conversations import heldout_conversation
from bench.reasoner.families.base import SIZES
from bench.reasoner.families.registry import FAMILIES, HELDOUT, heldout_task
from bench.reasoner.model import Block, Reasoner, Shape
from bench.reasoner.problems import LEVELS, heldout_problem, solution_text
from bench.reasoner.vocabulary import (
    END_OF_TEXT,
    TURN_END,
    prompt_text,
    save_tokenizer,
    token_id,
)

MAX_BYTES = 10_000_000
HELDOUT_PER_LEVEL = 200
HELDOUT_CONVERSATIONS = 200


def save_model(model: Reasoner, folder: Path, tokenizer: Tokenizer) -> None:
    """Write weights, configuration and tokenizer; then check them against Transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    end = token_id(tokenizer, TURN_END)
    pad = token_id(tokenizer, END_OF_TEXT)
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    save_tokenizer(folder, tokenizer)
    _write_json(folder / "config.json", model.shape.hf_config(end, pad, "float32"))
    _write_json(folder / "generation_config.json", generation)
    weights = folder / "model.safetensors"
    partial = weights.with_suffix(".partial")
    save_file(model.to_hf_state(), partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(weights)
    assert weights.stat().st_size <= MAX_BYTES, f"{weights.stat().st_size} > {MAX_BYTES} bytes"
    check_against_transformers(model, folder, tokenizer)


def load_model(folder: Path) -> Reasoner:
    """Read an exported folder into the lean model, fp32."""
    config = json.loads((folder / "config.json").read_text())
    model = Reasoner(Shape.from_hf_config(config))
    model.load_hf_state(load_file(folder / "model.safetensors"))
    return model.eval()


def start_model(folder: Path, shape: Shape, tokenizer: Tokenizer) -> Reasoner:
    """A model of this shape and vocabulary that starts as the exported one.

    Rows of the embedding are taken over by the text of their tokens; tokens that are new start
    like the others on average. Layers that are new write nothing at first.
    """
    trained = load_model(folder)
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    ours = tokenizer.get_vocab()
    model = Reasoner(shape)
    rows = trained.embed.weight
    with torch.no_grad():
        for block, start in zip(model.blocks, trained.blocks, strict=False):
            block.load_state_dict(start.state_dict())
        for block in [*model.blocks][len(trained.blocks) :]:
            assert isinstance(block, Block)
            block.out.weight.zero_()
            block.down.weight.zero_()
        model.norm_out.load_state_dict(trained.norm_out.state_dict())
        known = rows[[theirs[text] for text in ours if text in theirs]]
        new = torch.randn(shape.vocab, shape.hidden) * known.std(0) + known.mean(0)
        model.embed.weight.copy_(new)
        for text, index in ours.items():
            if text in theirs:
                model.embed.weight[index] = rows[theirs[text]]
    return model


def check_against_transformers(model: Reasoner, folder: Path, tokenizer: Tokenizer) -> None:
    """The exported folder computes the same logits in `LlamaForCausalLM`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    their_tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    problem = heldout_problem("medium", 0)
    text = prompt_text(problem.prompt) + solution_text(problem)
    ids = tokenizer.encode(text).ids
    assert their_tokenizer.encode(text) == ids, "the tokenizer reads back differently"
    chat = [{"role": "user", "content": problem.prompt}]
    rendered = their_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt_text(problem.prompt), "the chat template renders differently"
    with torch.inference_mode():
        mine = model.float().cpu()(torch.tensor([ids]))
        gap = float((theirs(torch.tensor([ids])).logits - mine).abs().max())
    assert gap < 1e-3, f"logits differ by {gap} from Transformers"


def write_heldout(path: Path, learned: Literal["problems", "conversations", "families"]) -> None:
    """Write what to evaluate with, one JSON object per line."""
    records = {
        "problems": heldout_problems,
        "conversations": _heldout_conversations,
        "families": _heldout_tasks,
    }[learned]()
    partial = path.with_suffix(".partial")
    text = "".join(json.dumps(record) + "\n" for record in records)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def heldout_problems(first: int = 0) -> Iterator[dict[str, Any]]:
    """Of each level ``HELDOUT_PER_LEVEL`` from this index on, as lines of a problem file."""
    for level in LEVELS:
        for index in range(first, first + HELDOUT_PER_LEVEL):
            problem = heldout_problem(level, index)
            yield {
                "id": f"{level}-{index:03d}",
                "level": level,
                "prompt": problem.prompt,
                "answer": problem.answer,
            }


def _heldout_conversations() -> Iterator[dict[str, Any]]:
    for index in range(HELDOUT_CONVERSATIONS):
        turns = [turn.record() for turn in heldout_conversation(index)]
        yield {"id": f"conversation-{index:03d}", "turns": turns}


def _heldout_tasks() -> Iterator[dict[str, Any]]:
    for family in FAMILIES:
        for size in SIZES:
            for index in range(HELDOUT):
                task = heldout_task(family, size, index)
                yield {
                    "id": f"{family}-{size}-{index:03d}",
                    "family": family,
                    "level": size,
                    "prompt": task.prompt,
                    "answer": task.answer,
                }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file in one step."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
