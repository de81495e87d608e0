"""The measurements of kernels and decoding: their floors, their rows, and what they run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_modules import bench_module
from kernels_on_cpu import KERNELS
from triton_tools import interpreted

from sgl_skipkv.eviction import page_table
from sgl_skipkv.kernels import on_device
from sgl_skipkv.recording import recorder

MODULES = (
    *(
        "lib.device_clock",
        "kernels.floors",
        "kernels.cases",
        "kernels.step_cases",
        "decode.attention",
    ),
    *(
        "decode.compactor",
        "decode.__main__",
        "decode.figure",
        "decode.floors",
        "lib.record",
        "lib.sweep",
    ),
    *("report.device_tables", "kernels.__main__"),
)
CPU = torch.device("cpu")
TIMES = ("time_us_p50", "floor_us", "ratio_to_floor")
DEVICES = ("x86_64 CPU, 2 cores", "NVIDIA H100 80GB HBM3")
Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    """The scripts, by name."""
    return {name: bench_module(name) for name in MODULES}


@pytest.fixture
def rows_of(
    bench: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Run a script with arguments on a small CPU, and read the rows it wrote."""
    monkeypatch.setattr(bench["lib.record"], "ROWS", tmp_path)
    monkeypatch.setattr(bench["lib.sweep"], "ROWS", tmp_path)
    monkeypatch.setitem(bench["lib.device_clock"].SIZES, "cpu", (1 << 20, 64))

    def run(name: str, rows: str, *arguments: str) -> Rows:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        bench[name].main()
        with (tmp_path / f"{rows}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    yield run


def test_a_floor_by_hand(bench: dict[str, Any]) -> None:
    ceilings = bench["lib.device_clock"].Ceilings(
        bytes_per_s=1e12, operations_per_s={torch.float32: 2e12, torch.bfloat16: 8e12}, launch_us=1
    )
    assert ceilings.floor(3_000_000, 4_000_000, torch.float32) == (3.0, "memory")
    assert ceilings.floor(3_000_000, 8_000_000, torch.float32) == (4.0, "compute")
    assert ceilings.floor(3_000_000, 8_000_000, torch.bfloat16) == (3.0, "memory")
    found = bench["lib.device_clock"].times_of([float(us) for us in range(1, 12)], "by hand")
    assert found == (6.0, 2.0, 10.0, 11, "by hand")
    work = bench["kernels.floors"].Work(0, 3_000_000, 8_000_000, torch.float32)
    columns = bench["kernels.__main__"].against_floors(found, work, ceilings)
    assert (columns["floor_us"], columns["binds"], columns["ratio_to_floor"]) == (4, "compute", 1.5)
    assert (columns["copy_gb_per_s"], columns["tflop_per_s"]) == (1000.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_works_are_the_formulas_of_the_docstrings(bench: dict[str, Any], dtype: Any) -> None:
    works = bench["kernels.floors"].works(bench["kernels.floors"].SHAPES["tiny"], dtype)
    b, n, m, layers, hq, hkv, d, hidden, w, s = 2, 96, 32, 2, 4, 2, 32, 64, 8, 12
    size, full = dtype.itemsize, n + m
    c = b * (n - w)
    importance = c * (layers * hkv * (d * size + 8) + 8) + layers * b * w * hq * d * size
    redundancy = layers * hkv * b * full * (d * size + 4) + 8 * b * full
    assert {name: work.bytes for name, work in works.items()} == {
        "window_attention": importance,
        "key_redundancy": redundancy,
        "key_redundancy_incremental": redundancy + 4 * layers * hkv * b * n,
        "sentence_redundancy": b * (s * (hidden * size + 8) + 16),
        "row_compaction": b * (32 * n + 24 * m + 40),
        "carried_columns": b * (8 * layers * hkv * n + 8 * n + 56),
        "ring_write": b * (hq * d * 2 * size + 16),
        "sentence_step": b * (hidden * (size + 8) + 44) + hidden * size,
        "steering_add": (9 + 25) * b + 2 * hidden * size + 4 * hidden,
    }
    assert {name: work.operations for name, work in works.items() if work.operations} == {
        "window_attention": 2 * layers * hq * w * d * c,
        "key_redundancy": 2 * layers * hkv * d * b * full**2,
        "key_redundancy_incremental": 2 * layers * hkv * d * b * (full**2 - n**2),
        "sentence_redundancy": b * s * (s - 1) * hidden,
        "sentence_step": 2 * b * hidden + 5 * hidden,
        "steering_add": 2 * hidden,
    }
    in_products = {name for name, work in works.items() if work.arithmetic == dtype}
    assert dtype == torch.float32 or in_products == {
        *("window_attention", "key_redundancy", "key_redundancy_incremental"),
        "sentence_redundancy",
    }


def test_kernel_rows_on_a_cpu(bench: dict[str, Any], rows_of: Any) -> None:
    rows = rows_of(
        "kernels.__main__", "kernels", "--device", "cpu", "--shapes", "tiny", "--repeats", "2"
    )
    works = bench["kernels.floors"].works(bench["kernels.floors"].SHAPES["tiny"], torch.float32)
    assert [row["kernel"] for row in rows] == list(works) == list(bench["kernels.__main__"].CASES)
    for row in rows:
        work = works[row["kernel"]]
        assert (int(row["bytes"]), int(row["operations"])) == (work.bytes, work.operations)
        assert (row["implementation"], row["timing"]) == ("torch", "host clock")
        floor = max(
            work.bytes / float(row["copy_gb_per_s"]) / 1e3,
            work.operations / float(row["tflop_per_s"]) / 1e6,
        )
        assert float(row["floor_us"]) > 0
        assert float(row["floor_us"]) == pytest.approx(floor, rel=0.02, abs=1e-3)
        p10, p50, p90 = (float(row[f"time_us_{name}"]) for name in ("p10", "p50", "p90"))
        assert 0 < p10 <= p50 <= p90
        if float(row["floor_us"]) > 0.05:  # it is rounded to nanoseconds
            ratio = p50 / float(row["floor_us"])
            assert float(row["ratio_to_floor"]) == pytest.approx(ratio, rel=0.02)
        assert bool(row["decode_attention_us_p50"]) == bool(row["cached_tokens"])
        assert row["command"].startswith("python ") and row["torch"] and row["triton"]
    written = bench["report.device_tables"].kernels(
        [*rows, dict(rows[0], time_us_p50="1234567.891")]
    )
    first, second = written.splitlines()[2:4]  # the newest row of a kernel stands in its place
    time_us, floor_us, ratio = (rows[1][name] for name in TIMES)
    assert "| 2 x 96 x 2 | random, float32 | 1,234,567.89 |" in first
    assert f"| {float(time_us):,.2f} | {float(floor_us):,.2f} | {float(ratio):.2f} |" in second


def test_the_kernels_do_what_they_are_timed_against(
    bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches, interpreted here, write what the plain references write on the same inputs."""
    shape = bench["kernels.floors"].Shape(2, 40, 8, 2, 4, 2, 16, 32, window=4, sentences=5)
    monkeypatch.setattr(bench["kernels.cases"], "uses_triton", lambda device: True)
    for name, make in bench["kernels.__main__"].CASES.items():
        written = []
        for which in (0, 1):
            torch.manual_seed(0)
            with interpreted(*KERNELS):
                cache = bench["kernels.cases"].Cache(shape, torch.float32, CPU, clustered=True)
                case = make(cache)
                runs = (case.launches, case.references)[which]
                assert len(runs) == (shape.layers if case.graph_safe else 1)
                written.append(runs[-1]())
        for found, expected in zip(*written, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=name)


def test_floors_of_another_device(rows_of: Any) -> None:
    rates = ("--copy-tb-per-s", "2", "--bf16-tflop-per-s", "500", "--fp32-tflop-per-s", "50")
    rows = {row["kernel"]: row for row in rows_of("kernels.floors", "kernel_floors", *rates)}
    scratch, importance = rows["key_redundancy"], rows["window_attention"]
    assert (scratch["binds"], importance["binds"]) == ("compute", "memory")
    assert float(scratch["compute_us"]) == pytest.approx(int(scratch["operations"]) / 500e6, abs=1)
    assert float(importance["memory_us"]) == pytest.approx(int(importance["bytes"]) / 2e6, abs=1)
    assert rows["sentence_redundancy"]["tflop_per_s"] == "500.0"
    assert rows["sentence_step"]["tflop_per_s"] == "50.0"


def test_what_a_call_holds_after_so_many_tokens(bench: dict[str, Any]) -> None:
    """Against a request that grows token by token."""
    for phase in (0, 5, 15):
        calls = bench["decode.compactor"].Calls(24, 100, 8, 16, "rkv", bool(phase))
        own, limit = 0, 24 + 16 - phase
        for generated in range(1, 100):
            own += 1
            assert calls.budgeted_tokens(generated, phase) == own <= calls.peak_tokens - 8 - 1
            if own >= limit:
                own, limit = 24, 24 + 16
    assert bench["decode.compactor"].Calls(None, 100, 8, 16, "rkv", False).budgeted_tokens(77) == 77


def test_floors_of_a_decode_loop(rows_of: Any, bench: dict[str, Any]) -> None:
    """By hand, at 1 TB/s and 500 TFLOP/s: 100 tokens generated from 8, 3 requests, budget 24."""
    rates = ("--copy-tb-per-s", "1", "--bf16-tflop-per-s", "500", "--batches", "3", "6")
    shape = ("--size", "tiny", "--lengths", "100", "--kv-budgets", "24", "--interval", "16")
    full, ours = rows_of("decode.floors", "decode_floors", *rates, *shape, "--prompt-tokens", "8")
    assert float(full["row_tokens"]) == 8 + 99 / 2
    calls = bench["decode.compactor"].Calls(24, 100, 8, 16, "rkv", False)
    held = [calls.budgeted_tokens(generated) for generated in range(100)]
    assert float(ours["row_tokens"]) == round(8 + sum(held) / 100, 1)
    weights = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128) + 160 * 64
    kv_bytes = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, numbers, bytes
    size = bench["decode.__main__"].SIZES["tiny"]
    assert (size.weights, size.kv_bytes_per_token(torch.bfloat16)) == (weights, kv_bytes)
    module = bench["decode.floors"]
    ceilings = bench["lib.device_clock"].Ceilings(1e12, {torch.bfloat16: 500e12}, 0.0)
    step_ms = module.floors(size, calls, 6, ceilings)
    assert step_ms["weights"] == pytest.approx(1e3 * 2 * weights / 1e12)
    cached = 6 * module.mean_row_tokens(calls)
    assert step_ms["attention"] == pytest.approx(1e3 * int(cached * kv_bytes) / 1e12)
    times = sum(a > b for a, b in pairwise(held))  # where it shrinks
    assert module.compactions(calls) == times == 4
    assert 0 < step_ms["compactions"] < step_ms["attention"]
    rate = 6e3 / sum(step_ms.values())
    assert float(ours["tokens_per_s"]) == pytest.approx(rate, rel=1e-6)
    assert full["compactions_ms"] == "0.0" and full["over_full_cache"] == "1.0"
    assert float(ours["over_full_cache"]) == pytest.approx(rate / float(full["tokens_per_s"]), 1e-3)


def test_attention_over_ragged_rows(bench: dict[str, Any]) -> None:
    module, lengths = bench["decode.attention"], [3, 7, 1]
    torch.manual_seed(0)
    row, column = module.entries(lengths, CPU)
    expected = [(b, i) for b, n in enumerate(lengths) for i in range(n)]
    assert list(zip(row.tolist(), column.tolist(), strict=True)) == expected
    table = torch.randperm(30).view(3, 10).int()
    q, k, v = torch.randn(3, 4, 8), torch.randn(30, 2, 8), torch.randn(30, 2, 8)
    attention = module.TorchDecode(table, module.Heads(4, 2, 8), torch.float32, 30)
    attention.plan(lengths)
    found = attention.run(q, k, v)
    for b, n in enumerate(lengths):
        for head in range(4):
            keys, values = (part[table[b, :n].long(), head // 2] for part in (k, v))
            weights = (keys @ q[b, head] / 8**0.5).softmax(0)
            torch.testing.assert_close(found[b, head], weights @ values)


@pytest.mark.parametrize("policy", ["rkv", "skipkv"])
def test_decode_rows_on_a_cpu(bench: dict[str, Any], rows_of: Any, policy: str) -> None:
    flags = ("--looks", "2", "--policy", policy, "--stagger", "--lengths", "96")
    full, budgeted = rows_of(
        "decode.__main__", "decode", "--device", "cpu", "--memory-gib", "0.0004", *flags
    )
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
    first, second = (
        bench["report.device_tables"].decode([budgeted, full, budgeted]).splitlines()[2:4]
    )
    ratio = float(budgeted["tokens_per_s"]) / float(full["tokens_per_s"])
    assert first.startswith("| 96 | 24 |") and first.endswith(f"| {ratio:.2f} |")
    assert second.startswith("| 96 | none |") and second.endswith("| 1.00 |")


def test_only_a_gpus_rows_are_in_the_tables_of_one(
    bench: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = bench["report.device_tables"]
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    monkeypatch.setattr(tables, "rows", lambda name: [{"device": d} for d in DEVICES])
    assert tables.on_gpu("decode") == []
    (tmp_path / "decode.csv").touch()
    assert tables.on_gpu("decode") == [{"device": "NVIDIA H100 80GB HBM3"}]


@pytest.mark.parametrize("policy", ["rkv", "skipkv"])
def test_the_loop_with_kernels_is_the_loop_without(
    bench: dict[str, Any], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """What a GPU runs beside its attention, interpreted here: the same rows, keys and tokens."""

    def decoded() -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = bench["decode.__main__"].DecodeModel(
            bench["decode.__main__"].SIZES["tiny"], torch.float32, CPU
        )
        calls = bench["decode.compactor"].Calls(24, 64, 8, 8, policy, True)
        loop = bench["decode.__main__"].PagedLoop(
            model, bench["decode.attention"].TorchDecode, calls, 3
        )
        found = loop.look(48)
        return found.compactions, [loop.req_to_token, *loop.pool.k, loop.sampled]

    expected = decoded()
    for module in (page_table, recorder, on_device):
        monkeypatch.setattr(module, "uses_triton", lambda device: True)
    with interpreted(*KERNELS):
        found = decoded()
    assert found[0] == expected[0] == 3
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_decode_figure_is_drawn_from_the_rows(bench: dict[str, Any], tmp_path: Path) -> None:
    """The same rows give the same file, another number another one; an older row is not drawn."""
    figure, common = bench["decode.figure"], {"device": "H100", "size": "7b", "stagger": "False"}
    common |= {"dtype": "bfloat16", "attention": "flashinfer", "generated_tokens": "16384"}
    common["command"] = "python -m bench.decode"
    full = {**common, "policy": "", "kv_budget": "", "tokens_per_s": "500.0"}
    ours = {**common, "policy": "rkv", "kv_budget": "1024", "tokens_per_s": "4000.0"}
    older = {**ours, "tokens_per_s": "1.0"}
    elsewhere = {**ours, "device": "A100", "tokens_per_s": "2.0"}
    fewer = {**ours, "command": "python -m bench.decode --batch 64", "tokens_per_s": "3.0"}
    drawn = []
    for number, rows in enumerate(
        (
            [full, ours],
            [elsewhere, older, full, ours, fewer],
            [full, {**ours, "tokens_per_s": "4001.0"}],
        )
    ):
        figure.plt.rcParams.update(figure.STYLE_PARAMETERS)
        figure.draw(figure.last_decode_rows(rows), tmp_path / f"{number}.svg")
        drawn.append((tmp_path / f"{number}.svg").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_largest_batch(bench: dict[str, Any]) -> None:
    decode, size = bench["decode.compactor"], bench["decode.__main__"].SIZES["r1-qwen-7b"]
    full = decode.Calls(None, 16384, 128, 128, "rkv", False)
    assert size.kv_bytes_per_token(torch.bfloat16) == 56 * 1024
    token_bytes = 56 * 1024 + decode.BOOKKEEPING_BYTES
    assert decode.largest_batch(10 * 16513 * token_bytes, full, size, torch.bfloat16) == 10
    assert decode.largest_batch(10 * 16513 * token_bytes - 1, full, size, torch.bfloat16) == 9
    with pytest.raises(ValueError, match=r"memory: expected \d+ bytes or more, got 7"):
        decode.largest_batch(7, full, size, torch.bfloat16)
