"""Every kernel compiles for every architecture it is meant for, and fits into its registers.

What the machine code must have and no interpreter can show is asserted here as well.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from triton_tools import KERNELS, compile_report

from bench.kernels import compile as compiler
from bench.kernels.compile_case import COMPILED
from bench.kernels.compile_cases import CASES
from bench.lib.record import recorded as rows_on_record

pytestmark = pytest.mark.slow  # three minutes, where Triton has not compiled them before


def test_no_variant_spills() -> None:
    assert not [row for row in compile_report() if row["spilled_bytes"]]


def test_the_recorded_rows_are_of_these_kernels() -> None:
    """All variants, three architectures each; what is compiled here is what was recorded."""
    recorded = rows_on_record("compile")
    assert not [row for row in recorded if int(row["spilled_bytes"])]
    names = ("kernel", "case", "architecture", "registers", "shared_bytes")
    on_h100 = [row for row in recorded if row["architecture"] == "sm_90"]
    assert {tuple(row[name] for name in names) for row in on_h100} == {
        tuple(str(row[name]) for name in names) for row in compile_report()
    }
    variants = {(row["kernel"], row["case"]) for row in on_h100}
    assert {(row["kernel"], row["case"], row["architecture"]) for row in recorded} == {
        (*variant, architecture)
        for variant in variants
        for architecture in ("sm_80", "sm_90", "sm_100")
    }


def test_a_spill_is_seen() -> None:
    case = CASES["sentence_redundancy"]()[0]
    cramped = dataclasses.replace(case, options={"maxnreg": 32})
    assert compiler.resources("sentence_redundancy", cramped, 90)["spilled_bytes"] > 0


def test_every_kernel_is_compiled() -> None:
    """A kernel that nobody compiles would only fail on a user's GPU."""
    code = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    launched = set(re.findall(r"\n@triton\.jit.*\ndef (\w+_kernel)\(", code))
    assert launched and launched == set(re.findall(r"(\w+_kernel)\[", code))
    assert launched == {row["function"] for row in compile_report()}


def test_shared_memory_of_one_block_fits() -> None:
    """227 KiB on sm_90. What sm_80 takes is taken on its smaller kin and on sm_120, too: 99 KiB."""
    assert max(row["shared_bytes"] for row in compile_report()) <= 227 * 1024
    on_sm_80 = [row for row in rows_on_record("compile") if row["architecture"] == "sm_80"]
    assert max(int(row["shared_bytes"]) for row in on_sm_80) <= 99 * 1024


@pytest.mark.parametrize(("kernel", "variants"), [("last_similar", 8), ("window_attention", 12)])
def test_two_programs_share_a_multiprocessor_of_an_h100(kernel: str, variants: int) -> None:
    """One loads or decides while the other multiplies. 64 Ki registers and 227 KiB each. Not
    float32."""
    rows = [row for row in compile_report() if row["kernel"] == kernel and row["case"] != "pool"]
    rows = [row for row in rows if not row["case"].startswith("fp32")]
    assert len(rows) == variants
    for row in rows:
        assert 2 * 32 * row["warps"] * row["registers"] <= 64 * 1024
        assert 2 * row["shared_bytes"] <= 227 * 1024


def test_logits_are_stored_to_stay_in_l2() -> None:
    """Else the keys of all programs, which stream by before they are read, push them out."""
    for case in CASES["window_attention"]():
        if case.name != "pool":
            code = compiler.compiled(case, 90).asm["ptx"]
            policies = re.findall(r"createpolicy\.fractional\.L2::(\w+)\.", code)
            stores = ["cache_hint" in one for one in re.findall(r"st\.global[^;]+;", code)]
            assert set(policies) == {"evict_last"} and sum(stores) == len(policies), case.name
            assert stores == sorted(stores, reverse=True)  # the means, which come last, go by


@pytest.mark.parametrize("kernel", ["last_similar", "window_attention"])
def test_keys_are_multiplied_by_tensor_cores_and_loaded_ahead(kernel: str) -> None:
    """16-bit keys: their loads are in flight while others are multiplied, and no thread waits."""
    cases = [case for case in CASES[kernel]() if case.name.startswith(("fp16", "bf16"))]
    assert cases
    for case in cases:
        code = compiler.compiled(case, 90).asm["ptx"]
        _, product, after = code.partition("mma.sync" if "mma.sync" in code else "wgmma.mma_async")
        assert product and "cp.async.cg.shared.global" in after


def test_the_search_uses_the_tensor_cores_as_hopper_means_it() -> None:
    """The one kernel that they bind."""
    cases = [one for one in CASES["last_similar"]() if not one.name.startswith("fp32")]
    assert all("wgmma.mma_async" in compiler.compiled(one, 90).asm["ptx"] for one in cases)


@pytest.mark.parametrize("kernel", ["steering_add", "sentence_step"])
def test_a_row_is_read_by_all_before_one_writes_it(kernel: str) -> None:
    """All warps read the row's entries, one thread writes them."""
    code = compiler.compiled(CASES[kernel]()[0], 90).asm["ptx"]
    loads, _, rest = code.partition("bar.sync")
    assert "ld.global" in loads and "st.global" not in loads and "st.global" in rest


def test_a_token_is_stored_by_all_before_the_next_is_added() -> None:
    """A sum is not loaded by the thread that has stored it."""
    (case, *_) = [one for one in CASES["sentence_step"]() if one.name.endswith("-several")]
    code = compiler.compiled(case, 90).asm["ttgir"]
    names = re.findall(r"tt\.load|tt\.store|\.barrier", code)
    assert names.count(".barrier") == 2 and names[-1] == ".barrier"


def test_a_block_is_read_by_all_before_one_writes_it() -> None:
    """Loads and stores of page-table entries, which are the 4-byte ones, and barriers: evicted
    entries, kept entries, then the stores."""
    case = CASES["row_compaction"]()[0]
    code = compiler.compiled(case, 90).asm["ptx"]
    found = re.findall(r"(ld\.global\.b32|st\.global\.b32|bar\.sync)", code)
    assert re.fullmatch("l+bl+bs+", "".join(name[0] for name in found))


def test_a_tile_of_kv_is_read_by_all_before_one_writes_it() -> None:
    """Whatever is loaded before the barrier, no KV is stored there, and none is loaded behind."""
    for case in CASES["kv_move"]():
        code = compiler.compiled(case, 90).asm["ttgir"]
        found = re.findall(r"tt\.load|tt\.store|\.barrier", code)
        names = "".join({"d": "l", "e": "s", "r": "b"}[name[-1]] for name in found)
        assert re.fullmatch("l+bs", names), names


@pytest.mark.parametrize(
    ("kernel", "order"), [("window_attention", "store barrier load store barrier"),
                          ("key_redundancy", "add add barrier load store")],
)  # fmt: skip
def test_a_program_reads_what_its_other_threads_wrote(kernel: str, order: str) -> None:
    """Scratch goes through memory: it is complete before it is read, past the cache of one
    multiprocessor, and is read to its end before the next task overwrites it."""
    names = {"tt.store": "store", "tt.atomic_rmw": "add", "cg": "load", ".barrier": "barrier"}
    through_memory = 0
    for case in CASES[kernel]():
        code = compiler.compiled(case, 90).asm["ttir"]
        if "cacheModifier = cg" in code:
            found = re.findall(r"tt\.store|tt\.atomic_rmw|(?<=cacheModifier = )cg|\.barrier", code)
            assert " ".join(names[one] for one in found) == order, case.name
            through_memory += 1
    assert through_memory >= len(COMPILED)


def test_steering_rounds_like_torch() -> None:
    """A fused product and sum would be rounded once where torch rounds twice."""
    for case in CASES["steering_add"]():
        assert "fma" not in compiler.compiled(case, 90).asm["ptx"]
