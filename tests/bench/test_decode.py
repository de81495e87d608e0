"""Decode loops: their floors, their rows, and what they run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_on_cpu import KERNELS
from triton_tools import interpreted

from bench.decode import __main__ as decode
from bench.decode import attention, compactor
from bench.decode import figure as decode_figure
from bench.decode import floors as decode_floors
from bench.lib import device_clock, record
from bench.report import device_tables
from sgl_skipkv.eviction import page_table
from sgl_skipkv.kernels import on_device
from sgl_skipkv.recording import recorder

CPU = torch.device("cpu")
DEVICES = ("x86_64 CPU", "NVIDIA H100 80GB HBM3")


def test_what_a_request_holds_after_so_many_tokens() -> None:
    """Against a request that grows token by token."""
    shape = compactor.RequestShape(24, 100, 8, 16, "rkv")
    own = 0
    for generated in range(1, 100):
        own += 1
        assert shape.budgeted_tokens(generated) == own <= shape.peak_tokens - 8 - 1
        if own == 24 + 16:
            own = 24
    assert compactor.RequestShape(None, 100, 8, 16, "rkv").budgeted_tokens(77) == 77


def test_floors_of_a_decode_loop(rows_of: Any) -> None:
    """By hand, at 1 TB/s and 500 TFLOP/s: 100 tokens generated from 8, 3 requests, budget 24."""
    rates = ("--copy-tb-per-s", "1", "--bf16-tflop-per-s", "500", "--batches", "3", "6")
    flags = ("--size", "tiny", "--lengths", "100", "--kv-budgets", "24", "--interval", "16")
    full, ours = rows_of(decode_floors, "decode_floors", *rates, *flags, "--prompt-tokens", "8")
    assert float(full["row_tokens"]) == 8 + 99 / 2
    shape = compactor.RequestShape(24, 100, 8, 16, "rkv")
    held = [shape.budgeted_tokens(generated) for generated in range(100)]
    assert float(ours["row_tokens"]) == round(8 + sum(held) / 100, 1)
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128) + 160 * 64
    kv_bytes = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes
    size = decode.SIZES["tiny"]
    assert (size.weights, size.kv_bytes_per_token(torch.bfloat16)) == (weights, kv_bytes)
    ceilings = device_clock.Ceilings(1e12, {torch.bfloat16: 500e12}, 0.0)
    step_ms = decode_floors.floors(size, shape, 6, ceilings)
    assert step_ms["weights"] == pytest.approx(1e3 * 2 * weights / 1e12)
    cached = 6 * decode_floors.mean_row_tokens(shape)
    assert step_ms["attention"] == pytest.approx(1e3 * int(cached * kv_bytes) / 1e12)
    times = sum(a > b for a, b in pairwise(held))  # where it shrinks
    assert decode_floors.compactions(shape) == times == 4
    assert 0 < step_ms["compactions"] < step_ms["attention"]
    rate = 6e3 / sum(step_ms.values())
    assert float(ours["tokens_per_s"]) == pytest.approx(rate, rel=1e-6)
    assert full["compactions_ms"] == "0.0" and full["over_full_cache"] == "1.0"
    assert float(ours["over_full_cache"]) == pytest.approx(rate / float(full["tokens_per_s"]), 1e-3)


def test_attention_over_ragged_rows() -> None:
    lengths = [3, 7, 1]
    torch.manual_seed(0)
    row, column = attention.entries(lengths, CPU)
    expected = [(b, i) for b, n in enumerate(lengths) for i in range(n)]
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == expected
    table = torch.randperm(30).view(3, 10).int()
    q, k, v = torch.randn(3, 4, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    paged = attention.TorchDecode(table, attention.Heads(4, 2, 8), torch.float32, 30)
    paged.plan(lengths)
    found = paged.run(q, k, v)
    for b, n in enumerate(lengths):
        for head in range(4):
            keys, values = (part[table[b, :n].long(), head // 2] for part in (k, v))
            weights = (keys @ q[b, head] / 8**0.5).softmax(0)
            torch.testing.assert_close(found[b, head], weights @ values)


@pytest.mark.parametrize("policy", ["distinct", "rkv", "skipkv"])
def test_decode_rows_on_a_cpu(rows_of: Any, policy: str) -> None:
    flags = ("--measurements", "2", "--policy", policy, "--lengths", "96")
    full, budgeted = rows_of(decode, "decode", "--device", "cpu", "--memory-gib", "0.0004", *flags)
    assert (full["kv_budget"], full["compactions"], full["policy"]) == ("", "0", "")
    assert (budgeted["kv_budget"], budgeted["policy"]) == ("24", policy)
    # The second look comes when all have compacted before: once more each, in one interval.
    assert int(budgeted["compactions"]) >= int(budgeted["batch"]) > 1
    assert 0 < float(budgeted["compaction_share"]) < 1 and float(full["compaction_share"]) == 0
    assert float(budgeted["row_tokens"]) < float(full["row_tokens"])
    for row in (full, budgeted):
        assert (row["step"], row["steps"]) == ("eager", "32")
        assert row["attention"] == f"torch {torch.__version__.split('+')[0]}"
        rate, share = float(row["tokens_per_s"]), 1 - float(row["compaction_share"])
        mean_step_s = int(row["batch"]) * share / rate
        assert 0.3 < 1e3 * mean_step_s / float(row["step_ms_p50"]) < 30  # a mean, a busy machine
    first, second = device_tables.decode([budgeted, full, budgeted]).splitlines()[2:4]
    ratio = float(budgeted["tokens_per_s"]) / float(full["tokens_per_s"])
    assert first.startswith("| 96 | 24 |") and first.endswith(f"| {ratio:.2f} |")
    assert second.startswith("| 96 | none |") and second.endswith("| 1.00 |")


def test_only_a_gpus_rows_are_in_the_tables_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(record.FOLDER, str(tmp_path))
    assert device_tables.on_gpu("decode") == []
    (tmp_path / "decode.csv").write_text("\n".join(["device", *DEVICES]))
    assert device_tables.on_gpu("decode") == [{"device": "NVIDIA H100 80GB HBM3"}]


@pytest.mark.parametrize(
    "policy",
    ["distinct", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rkv", "skipkv"))],
)
def test_the_loop_with_kernels_is_the_loop_without(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """What a GPU runs beside its attention, interpreted here: the same rows, keys and tokens."""

    def decoded() -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = decode.DecodeModel(decode.SIZES["tiny"], torch.float32, CPU)
        shape = compactor.RequestShape(24, 64, 8, 8, policy)
        loop = decode.PagedLoop(model, attention.TorchDecode, shape, 3)
        found = loop.measure_interval(48)
        return found.compactions, [loop.req_to_token, *loop.pool.k, loop.sampled]

    expected = decoded()
    for module in (page_table, recorder, on_device):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)
    with interpreted(*KERNELS):
        found = decoded()
    assert found[0] == expected[0] == 3
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_decode_figure_is_drawn_from_the_rows(drawn: Any) -> None:
    """The same rows give the same file, another number another one; an older row is not drawn."""
    common = {"device": "H100", "size": "7b"}
    common |= {"dtype": "bfloat16", "attention": "flashinfer", "generated_tokens": "16384"}
    common["command"] = "python -m bench.decode"
    full = {**common, "policy": "", "kv_budget": "", "tokens_per_s": "500.0"}
    ours = {**common, "policy": "rkv", "kv_budget": "1024", "tokens_per_s": "4000.0"}
    older = {**ours, "tokens_per_s": "1.0"}
    elsewhere = {**ours, "device": "A100", "tokens_per_s": "2.0"}
    fewer = {**ours, "command": "python -m bench.decode --batch 64", "tokens_per_s": "3.0"}
    changed = {**ours, "tokens_per_s": "4001.0"}
    several = [full, ours], [elsewhere, older, full, ours, fewer], [full, changed]
    files = drawn(decode_figure.draw, *map(decode_figure.last_decode_rows, several))
    assert files[0] == files[1] != files[2]


def test_the_largest_batch() -> None:
    size = decode.SIZES["r1-qwen-7b"]
    full = compactor.RequestShape(None, 16384, 128, 128, "rkv")
    assert size.kv_bytes_per_token(torch.bfloat16) == 56 * 1024
    token_bytes = 56 * 1024 + compactor.BOOKKEEPING_BYTES
    assert compactor.largest_batch(10 * 16513 * token_bytes, full, size, torch.bfloat16) == 10
    assert compactor.largest_batch(10 * 16513 * token_bytes - 1, full, size, torch.bfloat16) == 9
    with pytest.raises(ValueError, match=r"memory: expected \d+ bytes or more, got 7"):
        compactor.largest_batch(7, full, size, torch.bfloat16)
