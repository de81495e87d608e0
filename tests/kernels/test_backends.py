"""What attention backends make of a compacted row: exactly the tokens that stayed.

A backend plans on the page table and runs; what it should find is computed from the tokens' own
keys and values in float64, without the page table. Freed slots are poisoned, and new tokens come
after the compaction. FlashInfer needs a GPU; SGLang's Triton kernel runs interpreted elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from row_rewrites import select
from torch import Tensor
from triton_tools import assert_as_close, interpreted

from bench.decode import attention
from sgl_skipkv.eviction.page_table import RowRewrite

ROW_TOKENS, KEPT, NEW = [70, 33, 130], [40, 20, 64], 3
SLOTS = 400


def cases() -> Iterator[Any]:
    gpu = torch.cuda.is_available()
    yield pytest.param("torch", "cpu", torch.float32, id="torch")
    yield pytest.param("sglang-triton", "cpu", torch.float32, id="triton, interpreted")
    for name, package in (("sglang-triton", "sglang"), ("flashinfer", "flashinfer")):
        reason = f"needs a CUDA GPU and {package}"
        missing = pytest.mark.skipif(not gpu or find_spec(package) is None, reason=reason)
        yield pytest.param(name, "cuda", torch.bfloat16, id=f"{name} on a GPU", marks=missing)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 [Hq, d] of q [Hq, d] and a request's own k, v [n, Hkv, d]."""
    groups = q.shape[0] // k.shape[1]
    keys = k.double().repeat_interleave(groups, dim=1)
    values = v.double().repeat_interleave(groups, dim=1)
    logits = torch.einsum("hd,nhd->hn", q.double(), keys) * q.shape[1] ** -0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(dim=-1), values)


@pytest.mark.parametrize(("name", "where", "dtype"), cases())
def test_a_compacted_row_is_read_as_it_is(name: str, where: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    device, heads = torch.device(where), attention.Heads(8, 2, 64)
    k, v = (torch.randn(SLOTS + 1, heads.kv, heads.dim).to(device, dtype) for _ in range(2))
    table = torch.zeros(len(ROW_TOKENS) + 1, 200, dtype=torch.int32, device=device)
    order = (torch.randperm(SLOTS) + 1).tolist()
    rows, taken = [2, 0, 3], 0
    own: list[list[int]] = []  # slots of each request's tokens that are there, by our own books
    for row, tokens in zip(rows, ROW_TOKENS, strict=True):
        own.append(order[taken : taken + tokens])
        table[row, :tokens] = torch.tensor(own[-1], dtype=torch.int32)
        taken += tokens
    keys = [(k[slots].clone(), v[slots].clone()) for slots in own]

    selections = [
        select(torch.randn(tokens, device=device), [(0, 4), (tokens - 4, tokens)], kept)
        for tokens, kept in zip(ROW_TOKENS, KEPT, strict=True)
    ]
    positions = [torch.arange(tokens, device=device) for tokens in ROW_TOKENS]
    rewrite = RowRewrite(table, rows, selections, positions)
    rewrite.write()
    for freed in rewrite.vacated:
        k[freed], v[freed] = float("nan"), float("nan")
    lengths = [0] * table.shape[0]
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    for row, kept, selection, (own_k, own_v) in zip(rows, KEPT, selections, keys, strict=True):
        new = order[taken : taken + NEW]
        taken += NEW
        table[row, kept : kept + NEW] = torch.tensor(new, dtype=torch.int32)
        lengths[row] = kept + NEW
        stays = selection.kept
        expected[row] = torch.cat([own_k[stays], k[new]]), torch.cat([own_v[stays], v[new]])
    lengths[1] = 1  # a padded row reads slot 0
    q = torch.randn(len(lengths), heads.query, heads.dim).to(device, dtype)

    kernels: Any = nullcontext()
    if name == "sglang-triton" and where == "cpu":
        from sglang.kernels.ops.attention import decode_attention, metadata

        kernels = interpreted(decode_attention, metadata)
    found = []
    with kernels:
        for backend in (attention.BACKENDS[name], attention.TorchDecode):
            made = backend(table, heads, dtype, SLOTS)
            made.plan(lengths)
            found.append(made.run(q, k, v))
    for row, (own_k, own_v) in expected.items():
        assert_as_close(found[0][row], found[1][row], exact(q[row], own_k, own_v))
