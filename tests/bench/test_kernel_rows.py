"""Kernels: their floors, their rows, and what they are timed against."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_on_cpu import KERNELS
from triton_tools import interpreted

from bench.kernels import __main__ as kernels
from bench.kernels import cases, floors
from bench.lib import device_clock
from bench.report import device_tables

ROOT = Path(__file__).resolve().parents[2]
UNTRIED = sorted((ROOT / "bench" / "kernels" / "untried").glob("*.patch"))
CPU = torch.device("cpu")
TIMES = ("time_us_p50", "floor_us", "ratio_to_floor")


def test_a_floor_by_hand() -> None:
    ceilings = device_clock.Ceilings(
        bytes_per_s=1e12, operations_per_s={torch.float32: 2e12, torch.bfloat16: 8e12}, launch_us=1
    )
    assert ceilings.floor(3_000_000, 4_000_000, torch.float32) == (3.0, "memory")
    assert ceilings.floor(3_000_000, 8_000_000, torch.float32) == (4.0, "compute")
    assert ceilings.floor(3_000_000, 8_000_000, torch.bfloat16) == (3.0, "memory")
    found = device_clock.times_of([float(us) for us in range(1, 12)], "by hand")
    assert found == (6.0, 2.0, 10.0, 11, "by hand")
    work = floors.Work(0, {"all": 3_000_000}, 8_000_000, torch.float32)
    columns = kernels.against_floors(found, work, ceilings)
    assert (columns["floor_us"], columns["binds"], columns["ratio_to_floor"]) == (4, "compute", 1.5)
    assert (columns["copy_gb_per_s"], columns["tflop_per_s"]) == (1000.0, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_works_are_the_formulas_of_the_docstrings(dtype: Any) -> None:
    works = floors.works(floors.SHAPES["tiny"], dtype)
    b, n, m, layers, hq, hkv, d, hidden, w, s = 2, 96, 32, 2, 4, 2, 32, 64, 8, 12
    size, full = dtype.itemsize, n + m
    c = b * (n - w)
    importance = c * (layers * hkv * (d * size + 8) + 8) + layers * b * w * hq * d * size
    redundancy = layers * hkv * b * full * d * size + 8 * b * full
    assert {name: work.bytes for name, work in works.items()} == {
        "window_attention": importance,
        "step_attention": b
        * (n * (layers * hkv * d * size + 4 + 4 * w) + layers * w * hq * d * size),
        "key_redundancy": redundancy,
        "distinct_values": redundancy + 4 * b * full,
        "sentence_redundancy": b * (s * (hidden * size + 8) + 16),
        "sentence_scores": b * (20 * full + 20 * s),
        "selection": b * (12 * full + 41),
        "row_compaction": b * (32 * n + 24 * m + 40),
        "kv_move": b * (n * (4 * layers * hkv * d * size + 16) + 24),
        "ring_write": b * (hq * d * 2 * size + 16),
        "sentence_step": b * (hidden * (size + 8) + 44) + hidden * size,
        "steering_add": (9 + 25) * b + 2 * hidden * size + 4 * hidden,
    }
    assert {name: work.operations for name, work in works.items() if work.operations} == {
        "window_attention": 2 * layers * hq * w * d * c,
        "step_attention": 2 * layers * hq * d * b * sum(n - t for t in range(w)),
        "key_redundancy": 2 * layers * hkv * d * b * full**2,
        "distinct_values": layers // 2 * hkv * d * b * full * (full - 1),
        "sentence_redundancy": b * s * (s - 1) * hidden,
        "sentence_step": 2 * b * hidden + 5 * hidden,
        "steering_add": 2 * hidden,
    }
    in_products = {name for name, work in works.items() if work.arithmetic == dtype}
    assert dtype == torch.float32 or in_products == {
        *("window_attention", "step_attention", "key_redundancy", "sentence_redundancy"),
        "distinct_values",
    }


def test_kernel_rows_on_a_cpu(rows_of: Any) -> None:
    rows = rows_of(kernels, "kernels", "--device", "cpu", "--shapes", "tiny", "--repeats", "2")
    works = floors.works(floors.SHAPES["tiny"], torch.float32)
    assert [row["kernel"] for row in rows] == list(works) == list(kernels.CASES)
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
            assert float(row["ratio_to_floor"]) == pytest.approx(ratio, rel=0.02, abs=1e-3)
        assert bool(row["decode_attention_us_p50"]) == bool(row["cached_tokens"])
        assert row["command"].startswith("python ") and row["torch"] and row["triton"]
    written = device_tables.kernels([*rows, dict(rows[0], time_us_p50="1234567.891")])
    first, second = written.splitlines()[2:4]  # the newest row of a kernel stands in its place
    time_us, floor_us, ratio = (rows[1][name] for name in TIMES)
    assert "| 2 x 96 x 2 | random, float32 | 1,234,567.89 |" in first
    assert f"| {float(time_us):,.2f} | {float(floor_us):,.2f} | {float(ratio):.2f} |" in second


def test_the_kernels_do_what_they_are_timed_against() -> None:
    """Launches, interpreted here, write what the plain references write on the same inputs."""
    shape = floors.Shape(2, 40, 8, 2, 4, 2, 16, 32, window=4, sentences=5)
    for name, make in kernels.CASES.items():
        written = []
        for which in (0, 1):
            torch.manual_seed(0)
            with interpreted(*KERNELS):
                cache = cases.Cache(shape, torch.float32, CPU, clustered=True)
                case = make(cache)
                runs = (case.launches, case.references)[which]
                assert len(runs) == (shape.layers if case.graph_safe else 1)
                written.append(runs[-1]())
        for found, expected in zip(*written, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=name)


def test_floors_of_another_device(rows_of: Any) -> None:
    rates = ("--copy-tb-per-s", "2", "--bf16-tflop-per-s", "500", "--fp32-tflop-per-s", "50")
    rows = {row["kernel"]: row for row in rows_of(floors, "kernel_floors", *rates)}
    scratch, importance = rows["key_redundancy"], rows["window_attention"]
    assert (scratch["binds"], importance["binds"]) == ("compute", "memory")
    assert float(scratch["compute_us"]) == pytest.approx(int(scratch["operations"]) / 500e6, abs=1)
    assert float(importance["memory_us"]) == pytest.approx(int(importance["bytes"]) / 2e6, abs=1)
    assert rows["sentence_redundancy"]["tflop_per_s"] == "500.0"
    assert rows["sentence_step"]["tflop_per_s"] == "50.0"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
@pytest.mark.parametrize("patch", UNTRIED, ids=lambda path: path.stem)
def test_a_change_that_waits_for_a_gpu_applies(patch: Path) -> None:
    """Time on a GPU is short."""
    command = ["git", "apply", "--check", str(patch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
