"""KV moved in place by the kernel: exactly what plain torch does with a copy of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from kv_bytes import counted_bytes
from torch import Tensor
from triton_tools import device_fixture, far_tensor, forbid_launches, interpreted

from sgl_skipkv.eviction.kv_move import KVMove
from sgl_skipkv.eviction.select import Selection
from sgl_skipkv.kernels import kv_move as module
from sgl_skipkv.kernels.kv_move import SlotBuffers, move_kv
from sgl_skipkv.request.pages import page_ceil

device = device_fixture(module)


def paged_rows(lengths: Sequence[int], page: int) -> tuple[Tensor, int]:
    """A page table whose rows have whole pages in any order, and how many slots there are."""
    width = page_ceil(max(lengths), page)
    pages = 1 + torch.randperm(len(lengths) * width // page)
    table = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
    slots = (pages[:, None] * page + torch.arange(page)).view(len(lengths), width)
    for row, n in enumerate(lengths):
        table[row + 1, :n] = slots[row, :n]
    return table, (len(pages) + 1) * page


def partition(n: int, head: int, keep: Tensor) -> Selection:
    keep = keep.clone()
    keep[:head] = True
    return Selection(torch.arange(n)[keep], torch.arange(n)[~keep])


def moved(
    device: torch.device,
    buffers: Sequence[Tensor],
    table: Tensor,
    selections: Sequence[Selection],
    firsts: Sequence[int],
) -> list[Tensor]:
    """The kernel's work on copies of these buffers."""
    rows, kept = [*range(1, len(selections) + 1)], [one.kept for one in selections]
    found = [buffer.clone().to(device) for buffer in buffers]
    offsets = [0, *accumulate(map(len, kept))]
    at, first, kept_at = (torch.tensor(one, device=device) for one in (rows, firsts, offsets))
    alike = SlotBuffers.of(found, device)
    move_kv(alike, table.to(device), at, first, torch.cat(kept).to(device), kept_at)
    return [buffer.cpu() for buffer in found]


def expected(
    buffers: Sequence[Tensor], table: Tensor, selections: Sequence[Selection]
) -> list[Tensor]:
    """From copies, entry by entry."""
    found = [buffer.clone() for buffer in buffers]
    for row, (kept, _) in enumerate(selections, start=1):
        for j, entry in enumerate(kept.tolist()):
            for buffer, old in zip(found, buffers, strict=True):
                buffer[table[row, j]] = old[table[row, entry]]
    return found


def assert_as_from_copies(
    device: torch.device,
    buffers: Sequence[Tensor],
    table: Tensor,
    selections: Sequence[Selection],
    firsts: Sequence[int],
) -> None:
    truth = expected(buffers, table, selections)
    found = moved(device, buffers, table, selections, firsts)
    plain = [buffer.clone() for buffer in buffers]
    KVMove(plain, table, range(1, len(selections) + 1), selections, firsts).apply()
    for one, other, own in zip(found, plain, truth, strict=True):
        assert torch.equal(one.view(torch.uint8), own.view(torch.uint8))
        assert torch.equal(other.view(torch.uint8), own.view(torch.uint8))


@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("tile", [16, 128])
def test_every_kind_of_selection(
    device: torch.device, page: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources and targets overlap within a tile and across tiles: all entries move by one, by many,
    none moves, none stays, a prompt stays in front."""
    monkeypatch.setattr(module, "_TILE", tile)
    torch.manual_seed(page)
    n = torch.arange(300)
    selections = [
        partition(300, 0, n > 0),
        partition(300, 37, n > 37),
        partition(131, 0, n[:131] >= 70),
        partition(97, 0, n[:97] < 33),
        partition(64, 0, n[:64] < 0),
        partition(65, 65, n[:65] < 0),
        partition(250, 20, torch.rand(250) < 0.4),
        partition(257, 4, n[:257] % 2 == 1),
    ]
    firsts = [0, 37, 0, 0, 0, 65, 20, 4]
    lengths = [len(one.kept) + len(one.evicted) for one in selections]
    table, slots = paged_rows(lengths, page)
    buffers = [torch.randn(slots, 2, 16).to(torch.float16) for _ in range(4)]
    assert_as_from_copies(device, buffers, table, selections, firsts)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"),
    [(torch.float32, 1, 64), (torch.bfloat16, 3, 24), (torch.float8_e5m2, 2, 10),
     (torch.uint8, 1, 4), (torch.uint8, 1, 7)],
)  # fmt: skip
def test_slots_of_any_size(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    """Words of 8, 4, 2 and 1 bytes; keys and values of different sizes are two launches."""
    torch.manual_seed(heads)
    selection = partition(90, 5, torch.rand(90) < 0.5)
    table, slots = paged_rows([90], 16)
    shapes = [(slots, heads, head_dim)] * 2 + [(slots, heads, 2 * head_dim)] * 2
    buffers = [torch.randint(0, 256, (*shape, dtype.itemsize)).byte() for shape in shapes]
    raw = [buffer.view(dtype)[..., 0] for buffer in buffers]
    assert len(SlotBuffers.of([one.contiguous() for one in raw], torch.device("cpu"))) == 2
    assert_as_from_copies(
        device, [one.contiguous().view(torch.uint8) for one in raw], table, [selection], [5]
    )


def test_slots_beyond_int32(device: torch.device) -> None:
    far = 2**31 // 64 + 32
    buffer = far_tensor((far, 1, 64), torch.float32, device)
    table = torch.arange(far - 16, far, dtype=torch.int32)[None].to(device)
    buffer[-16:, 0, 0] = torch.arange(16.0, device=device)
    kept = torch.tensor([0, 3, 9], device=device)
    ends = [torch.tensor(one, device=device) for one in ([0], [0], [0, 3])]
    move_kv(SlotBuffers.of([buffer], device), table, *ends[:2], kept, ends[2])
    assert buffer[-16:, 0, 0].tolist() == [0.0, 3.0, 9.0, *map(float, range(3, 16))]


def test_a_survivor_is_read_once_and_written_once() -> None:
    """Counted where the interpreter loads and stores: at most 2.2 times the survivors' KV."""
    torch.manual_seed(4)
    selections = [
        partition(400, 50, torch.rand(400) < 0.6),
        partition(257, 0, torch.rand(257) < 0.5),
    ]
    table, slots = paged_rows([400, 257], 16)
    buffers, kept = [torch.randn(slots, 2, 16) for _ in range(4)], [one.kept for one in selections]
    ends = [0, *accumulate(map(len, kept))]
    at, first, kept_at = map(torch.tensor, ([1, 2], [50, 0], ends))
    alike = SlotBuffers.of(buffers, torch.device("cpu"))
    with interpreted(module), counted_bytes(buffers) as counted:
        move_kv(alike, table, at, first, torch.cat(kept), kept_at)
    slot_bytes = sum(buffer[0].nbytes for buffer in buffers)
    assert counted["read"] == counted["written"] == (ends[-1] - 50) * slot_bytes
    assert counted.total() <= 2.2 * ends[-1] * slot_bytes


def test_what_does_not_fit_is_refused_and_an_empty_batch_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_launches(monkeypatch)
    cpu, one, none = torch.device("cpu"), torch.zeros(1, dtype=torch.int64), torch.zeros(0).long()
    table, ends = torch.ones(2, 8, dtype=torch.int32), torch.tensor([0, 2])
    alike = SlotBuffers.of([torch.zeros(9, 1, 4)], cpu)
    move_kv(alike, table, none, none, none, one)
    with pytest.raises(ValueError, match=r"expected 1, 1 \+ 1 and 1, got 0, 1 \+ 1 and 1"):
        move_kv(alike, table, one, none, ends, ends)
    with pytest.raises(ValueError, match=r"expected 1, 1 \+ 1 and 1, got 1, 1 \+ 1 and 2"):
        move_kv(alike, table.t().contiguous().t(), one, one, ends, ends)
    with pytest.raises(ValueError, match=r"^buffers: expected contiguous slots"):
        SlotBuffers.of([torch.zeros(9, 4, 2).transpose(1, 2)], cpu)
    with pytest.raises(ValueError, match=r"^buffers: .* 4 bytes behind one"):
        SlotBuffers.of([torch.zeros(9)[1:].view(8, 1)], cpu)
