"""What ``skipkv report`` estimates: padding of static batches, and requests that fit in a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_skipkv.cli.files import load_tokenizer, read_json, read_lines
from sgl_skipkv.config import ServerConfig, SettingError


@dataclass(frozen=True)
class Padding:
    """Padding of prompts in static batches, tokens per prompt, in file order and sorted."""

    prompts: int
    unsorted_tokens: float
    sorted_tokens: float

    def valid_budgets(self, kv_budget: int) -> tuple[int, int]:
        """The budget left after mean padding: in file order, and sorted."""
        return round(kv_budget - self.unsorted_tokens), round(kv_budget - self.sorted_tokens)


def padding(prompt_tokens: Sequence[int], batch: int) -> Padding:
    """Mean padding of static batches.

    ``pad = max over the batch of Np - Np``; sorting by length before cutting into batches is the
    paper's batch grouping. A paged engine pads nothing, so its requests keep the whole budget.

    Source: SkipKV (arXiv 2512.07993) section 4.3, eq. 12 and table 3.

    Raises:
        SettingError: no prompts, or a batch below 1.
    """
    if not prompt_tokens:
        raise SettingError("file", "at least one prompt", 0, "a file with prompts")
    if batch < 1:
        raise SettingError("batch", "an integer of at least 1", batch, "10, as in the paper")

    def mean(lengths: Sequence[int]) -> float:
        batches = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
        return sum(max(part) * len(part) - sum(part) for part in batches) / len(lengths)

    return Padding(len(prompt_tokens), mean(prompt_tokens), mean(sorted(prompt_tokens)))


def read_prompt_tokens(path: Path, tokenizer: str | None, field: str) -> list[int]:
    """Prompt lengths from ``.json`` with a list of counts, or from ``.jsonl`` with one object per
    prompt, which is its ``field``, and a tokenizer (folder or name).

    Raises:
        SettingError: neither kind of file, a missing field, or no tokenizer for text.
    """
    if path.suffix == ".json":
        counts: list[int] = read_json("file", path, list, "a JSON list of token counts")
        if any(type(count) is not int for count in counts):
            raise SettingError("file", "a JSON list of token counts", counts, "a .jsonl file")
        return counts
    lines = read_lines("file", path, field)
    if tokenizer is None:
        choices = "a folder or name that Transformers loads"
        raise SettingError("tokenizer", "a tokenizer, because the file holds text", None, choices)
    encode = load_tokenizer("tokenizer", tokenizer).encode
    return [len(encode(line.record[field])) for line in lines]


def kv_bytes_per_token(config: dict[str, Any], value_bytes: int) -> int:
    """Keys and values of one token in all layers that have KV: ``2 * layers * Hkv * d *
    value_bytes``; with MLA its latent and its rotary key, ``layers * (r + rotary) * value_bytes``.

    Args:
        config: a model's ``config.json``.
        value_bytes: of one cached value; 2 for float16 and bfloat16, 1 for float8.

    Raises:
        SettingError: the configuration lacks a size.
    """
    layers, _, kv_heads, head_dim, _ = _sizes(config)
    numbers = head_dim if _is_latent(config) else 2 * kv_heads * head_dim
    return layers * numbers * value_bytes


def recorded_bytes(
    config: dict[str, Any], requests: int, settings: ServerConfig, value_bytes: int
) -> dict[str, int]:
    """Device memory of the plugin beside the KV pool, by kind.

    ``queries = layers * (requests + 1) * window * Hq * d * value_bytes``, the most recent queries
    of each, with MLA ``d = r + rotary``; ``sentences = (requests + 1) * D * (S * value_bytes + 4)``
    and a few bytes, the tables of sentence vectors; ``workspace = compaction_work_bytes`` on a GPU,
    for one compaction.

    Args:
        config: a model's ``config.json``.
        requests: tracked requests that run at once.
        settings: ``query_window``, ``max_sentences`` and ``compaction_work_bytes`` are used.
        value_bytes: of a recorded value: of the KV cache's type, or the model's if that is float8.

    Raises:
        SettingError: the configuration lacks a size.
    """
    (layers, heads, _, head_dim, hidden), tracks = _sizes(config), requests + 1
    ring = layers * settings.query_window * heads * head_dim * value_bytes
    stored = settings.max_sentences * hidden * value_bytes
    return {
        "queries": tracks * ring,
        # 14: index, length, flag and preset of the open sentence.
        "sentences": tracks * (stored + 4 * hidden + 14),
        "workspace": settings.compaction_work_bytes,
    }


def _is_latent(config: dict[str, Any]) -> bool:
    return config.get("kv_lora_rank") is not None


def _layers_with_kv(config: dict[str, Any]) -> int:
    """All but those that have a state instead (hybrid models), as their files tell them apart."""
    layers = int(config["num_hidden_layers"])
    if interval := config.get("full_attention_interval"):  # Qwen3-Next, Qwen3.5
        return layers // int(interval)
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        return str(pattern).count("*")
    if indices := config.get("full_attn_idxs"):  # LFM2
        return len(indices)
    kinds = config.get("layer_types") or ()
    return sum("attention" in kind and "linear" not in kind for kind in kinds) or layers


def _sizes(config: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Layers with KV, query heads, KV heads, head size and hidden size; with MLA one KV head of
    latents."""
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        if _is_latent(config):
            kv_heads = 1
            head_dim = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
        return _layers_with_kv(config), heads, kv_heads, head_dim, hidden
    except KeyError as error:
        got = f"one without {error.args[0]}"
        raise SettingError("model", "a config.json of a decoder", got, "another model") from error
