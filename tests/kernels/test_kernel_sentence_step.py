"""Sentence vectors by the kernel: the counts and sums of the reference, close means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_tools import FLOATS, assert_as_close, device_fixture, far_tensor, forbid_launches

from sgl_skipkv.kernels import reference
from sgl_skipkv.kernels import sentence_step as module
from sgl_skipkv.kernels.sentence_step import sentence_step

device = device_fixture(module)
TRACKS, CAPACITY = 6, 3
# token id -> presets under which it closes a sentence
BITS = [0, 0, 1, 2, 3, 0]
SMALL = ("length", "index", "after_delimiter")


def tables(
    width: int, device: torch.device, capacity: int = CAPACITY, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """As ``SentenceTable`` has them, new, but with a vector table full of NaN."""
    rows = TRACKS + 1
    return {
        "total": torch.zeros(rows, width, device=device),
        "length": torch.zeros(rows, device=device),
        "index": torch.zeros(rows, dtype=torch.int64, device=device),
        "after_delimiter": torch.zeros(rows, dtype=torch.bool, device=device),
        "vectors": torch.full((rows, capacity, width), float("nan"), dtype=dtype, device=device),
    }


def classes(device: torch.device) -> dict[str, Tensor]:
    return {
        "bits": torch.tensor(BITS, dtype=torch.uint8, device=device),
        "preset": torch.tensor([1, 1, 2, 1, 2, 2, 1], dtype=torch.uint8, device=device),
    }


def truth_step(hidden: Tensor, tracks: Tensor, ids: Tensor, names: Any) -> None:
    of = classes(hidden.device)
    reference.sentence_step(hidden, tracks, (of["bits"][ids] & of["preset"][tracks]) != 0, **names)


class InFull:
    """One request's sentences in float64: every hidden state of the open one, every closed mean."""

    def __init__(self) -> None:
        self.open: list[Tensor] = []
        self.closed: list[Tensor] = []
        self.after_delimiter = False

    def feed(self, hidden: Tensor, is_delimiter: bool) -> None:
        if self.after_delimiter and not is_delimiter:
            self.open = []
        elif self.after_delimiter:
            self.closed.pop()
        self.open.append(hidden.double())
        self.after_delimiter = is_delimiter
        if is_delimiter:
            mean = torch.stack(self.open).mean(dim=0)
            self.closed.append(mean / mean.norm())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 100, 700])
def test_many_steps(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Slots in any order, presets mixed, delimiters in a row, tables that overflow."""
    torch.manual_seed(width)
    truth, found = (tables(width, device, dtype=dtype) for _ in range(2))
    in_any_order = torch.tensor([4, 1, 6, 2, 5], device=device)
    requests = {track: InFull() for track in in_any_order.tolist()}
    of = classes(device)
    for number in range(30):
        tracks = in_any_order.roll(number)
        ids = torch.randint(0, len(BITS), (5,), device=device)
        hidden = (torch.randn(5, width, device=device) + 0.3).to(dtype)
        truth_step(hidden, tracks, ids, truth)
        sentence_step(hidden, tracks, ids, **of, **found)
        for b, track in enumerate(tracks.tolist()):
            closes = bool(of["bits"][ids[b]] & of["preset"][track])
            requests[track].feed(hidden[b], closes)
    for name in ("total", *SMALL):
        assert torch.equal(found[name], truth[name]), name
    assert any(len(one.closed) > CAPACITY for one in requests.values())
    for track, one in requests.items():
        stored = [*one.closed[: CAPACITY - 1], *one.closed[CAPACITY - 1 :][-1:]]
        count = len(stored)
        exact = torch.stack(stored)
        assert_as_close(found["vectors"][track, :count], truth["vectors"][track, :count], exact)
        if dtype == torch.float32:  # the reference itself
            assert (truth["vectors"][track, :count].double() - exact).abs().max() < 2e-6
        assert found["vectors"][track, count:].isnan().all()
    assert found["vectors"][[0, 3]].isnan().all()


def test_tokens_without_a_track_write_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untracked requests, padding, several of each, and an empty batch; the reference writes the
    scratch of track 0."""
    names = tables(40, device)
    before = {name: table.clone() for name, table in names.items()}
    tracks = torch.zeros(4, dtype=torch.int32, device=device)
    ids = torch.tensor([4, 4, 1, 1], dtype=torch.int32, device=device)
    hidden = torch.randn(4, 40, device=device)
    sentence_step(hidden, tracks, ids, **classes(device), **names)
    forbid_launches(monkeypatch)
    sentence_step(hidden[:0], tracks[:0], ids[:0], **classes(device), **names)
    for name, table in names.items():
        assert torch.equal(table.nan_to_num(9.0), before[name].nan_to_num(9.0)), name


def test_a_zero_mean_has_a_zero_vector(device: torch.device) -> None:
    zero, track, ids = torch.zeros(1, 16, device=device), torch.tensor([3]), torch.tensor([2])
    names, others = tables(16, device), tables(16, device)
    sentence_step(zero, track.to(device), ids.to(device), **classes(device), **names)
    truth_step(zero, track.to(device), ids.to(device), others)
    assert not names["vectors"][3, 0].any() and not others["vectors"][3, 0].any()


def test_a_row_gets_the_same_bits_alone_and_in_a_batch(device: torch.device) -> None:
    together, apart = tables(130, device), tables(130, device)
    tracks = torch.tensor([5, 1, 4], device=device)
    for ids in ([1, 1, 0], [3, 4, 4]):
        hidden = torch.randn(3, 130, device=device).bfloat16()
        token_ids = torch.tensor(ids, device=device)
        sentence_step(hidden, tracks, token_ids, **classes(device), **together)
        for b in (slice(2, 3), slice(0, 1), slice(1, 2)):
            sentence_step(hidden[b], tracks[b], token_ids[b], **classes(device), **apart)
    assert not together["vectors"][tracks, 0].isnan().any()
    for name in together:
        assert torch.equal(
            together[name][tracks].nan_to_num(9.0), apart[name][tracks].nan_to_num(9.0)
        )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_several_tokens_of_a_track_are_as_many_steps(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Bit for bit, as a prefill computes them that brings generated tokens back."""
    torch.manual_seed(1)
    width, steps, of = 130, 40, classes(device)
    together, apart = (tables(width, device, dtype=dtype) for _ in range(2))
    tracks = torch.tensor([5, 0, 2], device=device)
    ids = torch.randint(0, len(BITS), (3, steps), device=device)
    hidden = torch.randn(3, steps, width, device=device).to(dtype)
    sentence_step(hidden.flatten(0, 1), tracks, ids.flatten(), **of, **together)
    for step in range(steps):
        sentence_step(hidden[:, step], tracks, ids[:, step].contiguous(), **of, **apart)
    assert together["index"][2] >= CAPACITY, "sentences have closed, and the table is full"
    for name in together:
        assert torch.equal(together[name].nan_to_num(9.0), apart[name].nan_to_num(9.0)), name


def test_offsets_beyond_int32(device: torch.device) -> None:
    """In the vectors of a late track, in the sums, and in hidden states that lie far apart."""
    width, rows = 512, 2**21 + 2
    names = {
        "total": far_tensor((2**22 + 2, width), torch.float32, device),
        "length": torch.zeros(2**22 + 2, device=device),
        "index": torch.zeros(2**22 + 2, dtype=torch.int64, device=device),
        "after_delimiter": torch.zeros(2**22 + 2, dtype=torch.bool, device=device),
        "vectors": far_tensor((rows, 2, width), torch.float32, device),
    }
    bits = torch.tensor([0, 1], dtype=torch.uint8, device=device)
    preset = torch.ones(2**22 + 2, dtype=torch.uint8, device=device)
    hidden = far_tensor((3, 2**30 + 64), torch.bfloat16, device)[:, :width]
    hidden[2] = 2.0
    for track, token in ((rows - 1, 1), (2**22 + 1, 0)):
        where = torch.tensor([0, 0, track], device=device)
        ids = torch.tensor([0, 0, token], device=device)
        sentence_step(hidden, where, ids, bits=bits, preset=preset, **names)
        assert (names["total"][track] == 2.0).all() and not names["total"][1].any()
    assert torch.allclose(names["vectors"][rows - 1, 0], torch.tensor(width**-0.5, device=device))
    assert not names["vectors"][rows - 1, 1].any() and not names["vectors"][1].any()


def test_what_does_not_fit_is_refused() -> None:
    cpu, one = torch.device("cpu"), torch.ones(1, dtype=torch.int64)
    for hidden in (torch.zeros(1, 9), torch.zeros(8, 2).t()[:1]):
        with pytest.raises(ValueError, match=r"^hidden: expected contiguous rows of D numbers"):
            sentence_step(hidden, one, one, **classes(cpu), **tables(8, cpu))
    for hidden, tracks in ((torch.zeros(3, 8), one), (torch.zeros(1, 8), one[:0])):
        with pytest.raises(ValueError, match=r"^token_ids: expected one per hidden state"):
            sentence_step(hidden, tracks, one, **classes(cpu), **tables(8, cpu))
    apart = {**tables(8, cpu), "vectors": torch.zeros(TRACKS + 1, 2, 16)[..., ::2]}
    with pytest.raises(ValueError, match=r"^vectors: expected a contiguous tensor"):
        sentence_step(torch.zeros(1, 8), one, one, **classes(cpu), **apart)
