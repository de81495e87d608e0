"""``skipkv report``: published numbers from the same inputs, any other input, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_skipkv.cli.main import main
from sgl_skipkv.cli.report_estimates import (
    kv_bytes_per_token,
    padding,
    read_prompt_tokens,
    recorded_bytes,
)
from sgl_skipkv.config import ServerConfig, SettingError
from sgl_skipkv.recording.recorder import ModelShape, Recorder
from sgl_skipkv.recording.sentences import Delimiters

REASONER = Path(__file__).resolve().parents[2] / "examples" / "reasoner"
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
LLAMA_8B = dict(zip(SIZES, (32, 32, 8, 4096), strict=True))
QWEN_7B = dict(zip(SIZES, (28, 28, 4, 3584), strict=True))
# R-KV (arXiv 2505.24133), table 3: budget -> largest batch, one A100-80G, 8K and 16K outputs.
RKV_8K = {1024: 402, 1536: 287, 3072: 150, 819: 479, 2785: 167, 4423: 105}
RKV_16K = {1024: 402, 1536: 287, 3072: 150, 1638: 271, 5570: 82, 8847: 46}


def test_skipkv_table_3(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight cells, to the integer."""
    found = padding(
        read_prompt_tokens(shared_data / "math500_prompt_tokens.json", None, "problem"), 10
    )
    assert (round(found.unsorted_tokens, 2), round(found.sorted_tokens, 2)) == (137.88, 9.04)
    cells = [found.valid_budgets(kv_budget) for kv_budget in (768, 1024, 1260, 1536)]
    assert cells == [(630, 759), (886, 1015), (1122, 1251), (1398, 1527)]
    assert main(["report", "padding", str(shared_data / "math500_prompt_tokens.json")]) == 0
    shown = capsys.readouterr().out
    assert "500 prompts" in shown
    assert all(str(cell) in shown for pair in cells for cell in pair)


def test_rkv_largest_batches() -> None:
    """Within 3% in 11 of 12 rows, with the 59.8 GiB and 66 prompt tokens that fit all of them."""
    pool_tokens = int(59.8 * 2**30) // kv_bytes_per_token(LLAMA_8B, 2)
    rows = [*RKV_8K.items(), *RKV_16K.items()]
    found = [pool_tokens // (66 + kv_budget + 128 + 1) for kv_budget, _ in rows]
    close = [abs(ours / theirs - 1) <= 0.03 for ours, (_, theirs) in zip(found, rows, strict=True)]
    assert close.count(True) == 11 and not close[-1]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 12))
def test_sorting_never_pads_more(tokens: list[int], batch: int) -> None:
    found = padding(tokens, batch)
    assert 0 <= found.sorted_tokens <= found.unsorted_tokens or len(tokens) % batch
    assert padding(tokens, 1).unsorted_tokens == 0
    assert padding([7] * 20, batch).unsorted_tokens == 0


def test_any_prompts_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": "7 " * n}) + "\n" for n in (1, 3, 5, 9)))
    command = ["report", "padding", str(path), "--tokenizer", str(REASONER), "--field", "text"]
    assert main([*command, "--batch", "2", "--kv-budget", "100"]) == 0
    lengths = read_prompt_tokens(path, str(REASONER), "text")
    assert len(set(lengths)) == 4 and lengths == sorted(lengths)
    left = round(100 - padding(lengths, 2).unsorted_tokens)
    assert f"{left}" in capsys.readouterr().out
    assert main([*command, "--batch", "2", "--kv-budget", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["batch"]) == (4, 2)
    assert found["budgets"] == [
        {"kv_budget": 100, "file_order": left, "sorted": left, "paged": 100}
    ]


def test_capacity_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model: 4 layers, 2 KV heads of 64, so 2,048 bytes per token in bfloat16."""
    command = ["report", "capacity", "--model", str(REASONER), "--kv-memory-gib", "1"]
    assert main([*command, "--kv-budget", "128", "--interval", "32"]) == 0
    shown = capsys.readouterr().out
    assert "524,288 KV tokens of 2,048 bytes" in shown
    assert f"{524288 // 161:,}" in shown and f"{524288 // 16384}" in shown
    config = json.loads((REASONER / "config.json").read_text())
    held = sum(recorded_bytes(config, 524288 // 161, ServerConfig(), 2).values())
    assert f"{held / 2**20:,.0f}" in shown and f"{held / 2**30:.1%}" in shown
    assert main([*command, "--kv-budget", "128", "--interval", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["pool_tokens"], found["token_bytes"]) == (524288, 2048)
    budgeted, plain = found["budgets"]
    assert budgeted == {
        **{"kv_budget": 128, "kv_tokens": 161, "requests": 524288 // 161},
        **{"recorded_bytes": held, "share": held / 2**30},
    }
    assert plain["kv_budget"] is None and plain["requests"] == 524288 // 16384


def test_recorded_bytes_are_those_of_the_buffers() -> None:
    """Every tensor that a recorder makes, but for the delimiters of the vocabulary."""
    config = {**dict(zip(SIZES, (3, 4, 2, 40), strict=True)), "head_dim": 16}
    for calls, settings in ((5, ServerConfig()), (130, ServerConfig(query_window=5))):
        recorder = Recorder(
            ModelShape(3, 4, 16, 40),
            track_count=calls,
            query_window=settings.query_window,
            max_sentences=settings.max_sentences,
            delimiters=Delimiters([], 4),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        kinds = recorded_bytes(config, calls, settings, 2)
        for kind, holder in (("queries", recorder.queries), ("sentences", recorder.sentences)):
            tensors = [value for name, value in vars(holder).items() if name != "bits"]
            held = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
            assert kinds[kind] == held, kind


@pytest.mark.parametrize(("name", "limit"), [("qwen", 0.033), ("llama", 0.04)])
def test_little_is_held_beside_the_pool(name: str, limit: float) -> None:
    """512 running requests of a 7B and an 8B model on an 80 GB device, 85% of it for weights and
    pool, at budgets that fill the pool."""
    config, weights = {"qwen": (QWEN_7B, 15.2e9), "llama": (LLAMA_8B, 16.1e9)}[name]
    pool = 0.85 * 80 * 2**30 - weights
    kv_budget = int(pool) // kv_bytes_per_token(config, 2) // 512 - 128 - 1
    kinds = recorded_bytes(config, 512, ServerConfig(max_tracked_requests=512), 2)
    assert 600 < kv_budget < 2000 and min(kinds.values()) > 0
    assert sum(kinds.values()) / pool <= limit


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({}, 32),
        ({"full_attention_interval": 4, "layer_types": ["linear_attention"] * 32}, 8),
        ({"hybrid_override_pattern": "M-M*" * 8}, 8),
        ({"layer_types": ["conv", "full_attention"] * 16}, 16),
        ({"full_attn_idxs": [2, 5, 8]}, 3),
        ({"layer_types": ["mamba", "attention"] * 16}, 16),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, 32),
    ],
)
def test_layers_with_a_state_have_no_kv(more: dict[str, Any], layers: int) -> None:
    assert kv_bytes_per_token(LLAMA_8B | more, 2) == layers * 2 * 8 * 128 * 2


def test_latents_and_their_queries() -> None:
    """DeepSeek R1: 576 cached numbers per layer, and 128 heads that ask 576 each."""
    config = {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
    config |= {"hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes_per_token(config, 2) == 61 * 576 * 2
    rings = [recorded_bytes(config, calls, ServerConfig(), 2)["queries"] for calls in (1, 2)]
    assert rings[1] - rings[0] == 61 * 8 * 128 * 576 * 2  # 72 MB


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        *(("a.json", text, "file") for text in ('{"a": 1}', "[1, true]", "[", "[]", "\udcff")),
        *(("a.jsonl", '{"problem": "x"}', "tokenizer"), ("none.json", None, "file")),
    ],
)
def test_wrong_files(
    name: str, text: str | None, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit) as ended:
        main(["report", "padding", str(tmp_path / name)])
    assert ended.value.code == 2
    assert f"{field}: expected " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("kv-memory-gib", value) for value in ("0", "-1", "nan", "inf")),
        *(("kv-budget", "0"), ("interval", "-1")),
    ],
)
def test_capacity_of_nothing(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"model": str(REASONER), "kv-memory-gib": "1", "kv-budget": "64", name: value}
    with pytest.raises(SystemExit) as ended:
        main(["report", "capacity", *(f"--{one}={given}" for one, given in asked.items())])
    assert ended.value.code == 2
    assert f"{name}: expected " in capsys.readouterr().err


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": 4}])
def test_a_config_without_sizes(config: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"model: expected a config\.json"):
        kv_bytes_per_token(config, 2)


def test_a_batch_of_none() -> None:
    with pytest.raises(SettingError, match="batch: expected an integer of at least 1"):
        padding([1, 2], 0)
