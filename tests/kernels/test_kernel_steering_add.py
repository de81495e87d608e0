"""Steering by the kernel: the counts and every bit of the residual are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_tools import FLOATS, device_fixture, far_tensor, forbid_launches

from sgl_skipkv.kernels import steering_add as module
from sgl_skipkv.kernels.reference import DELIMITER, KEYWORD, THINK_END, THINK_START, steering_step
from sgl_skipkv.kernels.steering_add import steering_add

device = device_fixture(module)
GAMMA = 0.02
# token id -> class; a delimiter is drawn often, and one token is everything at once
BITS = [0, DELIMITER, DELIMITER, KEYWORD, THINK_START, THINK_END, DELIMITER | KEYWORD, 15]
TABLE_ROWS = 9


def tables(device: torch.device) -> dict[str, Tensor]:
    """Row 0 and three more are nobody's; the others are somewhere in their lives."""
    steered = torch.zeros(TABLE_ROWS, dtype=torch.bool, device=device)
    steered[[2, 3, 5, 6, 8]] = True
    return {
        "steered": steered,
        "alpha_0": torch.rand(TABLE_ROWS, device=device) + 0.5,
        "nonexecution": torch.randint(0, 9, (TABLE_ROWS,), dtype=torch.int32, device=device),
        "keyword_seen": torch.rand(TABLE_ROWS, device=device) < 0.5,
        "thinking": torch.rand(TABLE_ROWS, device=device) < 0.7,
    }


def copied(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: table.clone() for name, table in values.items()}


def step(residual: Tensor, vector: Tensor, rows: Tensor, ids: Tensor, names: Any) -> None:
    bits = torch.tensor(BITS, dtype=torch.uint8, device=residual.device)
    steering_add(residual, vector, rows, ids, bits=bits, gamma=GAMMA, **names)


def truth_step(residual: Tensor, vector: Tensor, rows: Tensor, ids: Tensor, names: Any) -> None:
    bits = torch.tensor(BITS, dtype=torch.uint8, device=residual.device)
    steering_step(residual, vector, rows.long(), bits[ids.long()], gamma=GAMMA, **names)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 100, 1500])
def test_many_steps_are_the_references(
    device: torch.device, dtype: torch.dtype, width: int
) -> None:
    torch.manual_seed(width)  # everything is drawn on the CPU: a GPU draws other numbers
    vector = torch.randn(width).to(device)
    start = tables(device)
    truth, found = copied(start), copied(start)
    alone = start["steered"].logical_not()
    moved = 0
    for number in range(24):
        rows = torch.tensor([6, 2, 4, 8, 1, 5, 3], device=device).roll(number)
        ids = torch.randint(0, len(BITS), (7,)).to(device)
        one = torch.randn(7, width).to(device, dtype)
        other = one.clone()
        truth_step(one, vector, rows, ids, truth)
        before = other.clone()
        step(other, vector, rows, ids, found)
        assert torch.equal(one, other)
        moved += int((other != before).any(dim=1).sum())
    assert moved > 10
    for name in found:
        assert torch.equal(found[name][~alone], truth[name][~alone]), name
        assert torch.equal(found[name][alone], start[name][alone]), name
    counts = found["nonexecution"][~alone], start["nonexecution"][~alone]
    assert (counts[0] > counts[1]).all()


def test_a_sentence_that_closes_with_its_keyword_counts_for_itself(device: torch.device) -> None:
    names = tables(device)
    names["nonexecution"][2], names["thinking"][2], names["keyword_seen"][2] = 4, True, False
    vector = torch.ones(3, device=device)
    residual = torch.zeros(1, 3, device=device)
    step(
        residual, vector, torch.tensor([2], device=device), torch.tensor([6], device=device), names
    )
    expected = names["alpha_0"][2] + torch.tensor(GAMMA, device=device) * 5
    assert torch.equal(residual, expected.expand(1, 3))
    assert names["nonexecution"][2] == 5 and not names["keyword_seen"][2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_who_is_not_steered_keeps_every_bit(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN payloads, -0.0 and denormals, in padding that repeats row 0 and beside a steered row.
    An empty batch launches nothing."""
    names = tables(device)
    names["thinking"][5] = True
    start = copied(names)
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    bits = torch.iinfo(whole)
    residual = torch.randint(bits.min, bits.max, (6, 33), dtype=whole, device=device).view(dtype)
    residual[2] = 1.0
    before = residual.clone()
    rows = torch.tensor([0, 7, 5, 0, 0, 0], dtype=torch.int32, device=device)
    ids = torch.tensor([1, 6, 1, 1, 6, 7], dtype=torch.int32, device=device)
    step(residual, torch.ones(33, device=device), rows, ids, names)
    forbid_launches(monkeypatch)
    step(residual[:0], torch.ones(33, device=device), rows[:0], ids[:0], names)
    untouched = [0, 1, 3, 4, 5]
    assert torch.equal(residual[untouched].view(whole), before[untouched].view(whole))
    assert (residual[2] > 1.0).all()
    for name, table in names.items():
        table[5] = start[name][5]
        assert torch.equal(table, start[name]), name


def test_offsets_beyond_int32(device: torch.device) -> None:
    names = tables(device)
    names["thinking"].fill_(True)
    residual = far_tensor((3, 2**30 + 64), torch.float16, device)[:, :20]
    rows, ids = torch.tensor([0, 0, 3], device=device), torch.tensor([1, 1, 1], device=device)
    step(residual, torch.ones(20, device=device), rows, ids, names)
    assert residual[2].all() and not residual[:2].any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    one, names = torch.ones(1, dtype=torch.int64), tables(torch.device("cpu"))
    shapes = ((torch.zeros(1, 8), torch.zeros(9)), (torch.zeros(8, 2).t()[:1], torch.zeros(8)))
    for residual, vector in shapes:
        with pytest.raises(ValueError, match=r"^residual, vector: expected contiguous rows"):
            step(residual, vector, one, one, names)
