"""Copies in host memory: to the bit, in chunks that are lent again, within the limit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import HEAD_DIM, KV_HEADS, SyntheticServer, served
from torch import Tensor
from triton_tools import DEVICES

from sgl_skipkv.offload.host_memory import HostCopies, HostCopy, HostMemory

REPEATABLE = settings(deadline=None, derandomize=True)
CHUNK_BYTES, CHUNKS = 256, 20
LIMIT_BYTES = CHUNK_BYTES * CHUNKS + 100  # the last 100 are not enough for a chunk
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64)
SHAPES = st.one_of(
    st.lists(st.integers(0, 7), max_size=3),  # numbers and empty tensors among them
    st.lists(st.integers(1, 900), min_size=1, max_size=1),  # longer than a chunk
)
KINDS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=5)
#: what is copied next, or which of the copies goes
ACTIONS = st.lists(st.one_of(KINDS, st.integers(0, 10**6)), max_size=40)

on_devices = pytest.mark.parametrize("device", [torch.device(name) for name in DEVICES], ids=str)


def drawn(dtype: torch.dtype, shape: Sequence[int], draw: torch.Generator) -> Tensor:
    """Any bits at all, NaN among them; a bool is 0 or 1."""
    nbytes = torch.empty(*shape, dtype=dtype).nbytes if shape else dtype.itemsize
    values = 2 if dtype is torch.bool else 256
    data = torch.randint(values, (nbytes,), dtype=torch.uint8, generator=draw)
    return data.view(dtype).view(*shape) if shape else data.view(dtype)[0]


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    flat = [side.cpu().contiguous().view(-1).view(torch.uint8) for side in (found, expected)]
    assert torch.equal(*flat)


def assert_back(*alive: tuple[Sequence[HostCopy], Sequence[Tensor]]) -> None:
    for copies, tensors in alive:
        for copy, tensor in zip(copies, tensors, strict=True):
            assert_same(copy.to(tensor.device), tensor)


def copied(memory: HostMemory, tensors: Sequence[Tensor]) -> list[HostCopy]:
    copies = HostCopies(memory)
    return [copies.add(tensor) for tensor in tensors]


def memory_for(device: torch.device, limit_bytes: int = LIMIT_BYTES) -> HostMemory:
    return HostMemory(limit_bytes, pinned=device.type != "cpu")


def chunks_of(tensors: Sequence[Tensor]) -> int:
    return -(-sum(tensor.nbytes for tensor in tensors) // CHUNK_BYTES)


@on_devices
@settings(REPEATABLE, max_examples=300)
@given(ACTIONS, st.integers(0, 1000))
def test_copies_come_back_whatever_came_and_went(
    device: torch.device, actions: list[Any], seed: int
) -> None:
    """Nothing is taken beyond the most that was ever lent, so all that goes is lent again."""
    memory, draw = memory_for(device), torch.Generator().manual_seed(seed)
    assert memory.chunk_bytes == CHUNK_BYTES
    alive: list[tuple[list[HostCopy], list[Tensor]]] = []
    lent_chunks = most_chunks = 0
    for action in actions:
        if isinstance(action, int):
            if alive:
                lent_chunks -= chunks_of(alive.pop(action % len(alive))[1])
        else:
            tensors = [drawn(*kind, draw).to(device) for kind in action]
            fits = lent_chunks + chunks_of(tensors) <= CHUNKS
            assert memory.fits(sum(tensor.nbytes for tensor in tensors)) == fits
            if fits:
                alive.append((copied(memory, tensors), tensors))
                lent_chunks += chunks_of(tensors)
                most_chunks = max(most_chunks, lent_chunks)
            else:
                with pytest.raises(MemoryError, match="5220 bytes, got one more chunk of 256 "):
                    copied(memory, tensors)
                most_chunks = CHUNKS
        assert memory.used_bytes == lent_chunks * CHUNK_BYTES
        assert memory.taken_bytes == most_chunks * CHUNK_BYTES <= LIMIT_BYTES
        assert_back(*alive)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_row", [0, 1, 16, 40, 99, 100])
def test_rows_that_are_there_already_are_left_out(
    device: torch.device, dtype: torch.dtype, first_row: int
) -> None:
    """The copies begin in the middle of a chunk, and go on into others."""
    tensor = drawn(dtype, [100, 1, 5], torch.Generator().manual_seed(1)).to(device)
    _, copy = copied(memory_for(device), [torch.zeros(37, dtype=torch.uint8), tensor])
    assert_same(copy.to(device, first_row=first_row), tensor[first_row:])


@on_devices
def test_a_tensor_may_lie_in_memory_in_any_way(device: torch.device) -> None:
    rings = torch.arange(4 * 6 * 5.0, device=device).view(4, 6, 5)
    parts = [rings[:, 2], rings.transpose(0, 2), rings[0, 1, 3], rings[:0, 1]]
    assert_back((copied(memory_for(device), parts), parts))


def test_a_copy_is_not_the_tensor() -> None:
    """Also where both are in the host's memory."""
    tensor = torch.ones(3)
    (copy,) = copied(memory_for(tensor.device), [tensor])
    tensor.zero_()
    copy.to(tensor.device).zero_()
    assert copy.to(tensor.device).tolist() == [1.0] * 3


def test_chunks_stay_lent_while_one_copy_is_left() -> None:
    """Whoever still reads one of them must not find another request's KV there."""
    memory = memory_for(torch.device("cpu"))
    copies = copied(memory, [torch.ones(100, dtype=torch.uint8)] * 8)
    last = copies.pop()
    copies.clear()
    assert memory.used_bytes == 4 * CHUNK_BYTES
    others = copied(memory, [torch.zeros(16 * CHUNK_BYTES, dtype=torch.uint8)])
    assert not memory.fits(1) and last.to(torch.device("cpu")).tolist() == [1] * 100
    del last
    assert memory.used_bytes == 16 * CHUNK_BYTES and len(others) == 1


@settings(REPEATABLE, max_examples=300)
@given(st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 60)))
def test_chunks_are_of_one_power_of_two_and_several_fit(limit_bytes: int) -> None:
    memory = HostMemory(limit_bytes, pinned=False)
    chunk_bytes = memory.chunk_bytes
    assert chunk_bytes & (chunk_bytes - 1) == 0 and 1 <= chunk_bytes <= 4 << 20
    assert limit_bytes < 16 or limit_bytes // chunk_bytes >= 16
    assert chunk_bytes == 4 << 20 or limit_bytes // chunk_bytes <= 32
    assert memory.fits(limit_bytes // chunk_bytes * chunk_bytes)
    assert not memory.fits(limit_bytes // chunk_bytes * chunk_bytes + 1)


def test_without_a_limit_to_fill_nothing_is_copied() -> None:
    memory = HostMemory(0, pinned=False)
    assert not memory.fits(1)
    with pytest.raises(MemoryError):
        copied(memory, [torch.ones(1)])
    assert not memory.taken_bytes


def test_beside_a_gpu_all_that_is_allocated_is_pinned_and_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch gives exactly a power of two, so the sum is what the host loses."""
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def spied(size: Any, *, pin_memory: bool = False, **how: Any) -> Tensor:
        made = empty(size, **how)  # pinned only where there is a device
        if pin_memory:
            asked.append((made.nbytes, pin_memory))
        return made

    monkeypatch.setattr(torch, "empty", spied)
    memory = HostMemory(LIMIT_BYTES, pinned=True)
    for nbytes in (1, 300, 5000, 5120, 7):
        assert len(copied(memory, [torch.ones(nbytes, dtype=torch.uint8)])) == 1
    assert asked == [(CHUNK_BYTES, True)] * CHUNKS


# -- what a request held


def test_a_backup_makes_one_tensor_at_a_time() -> None:
    """A request is retracted because the pool is full: its row is not laid out twice at once."""
    server = SyntheticServer()
    call, seen = served(server), list[weakref.ref[Tensor]]()

    def kv() -> Iterator[Tensor]:
        for number in range(4):
            assert all(tensor() is None for tensor in seen)
            tensor = torch.full((9, KV_HEADS, HEAD_DIM), float(number))
            seen.append(weakref.ref(tensor))
            yield tensor
            del tensor

    server.runtime.back_up(call.state, kv(), recorded_tokens=10)
    backup = call.state.offloaded.backup
    assert backup is not None and backup.row_tokens == 9 and len(seen) == 4
    assert [int(copy.to(server.device)[8, 1, 3]) for copy in backup.kv] == [0, 1, 2, 3]


def test_what_was_recorded_moves_to_another_track() -> None:
    """Through host memory, of which it takes what it said that it would."""
    server = SyntheticServer(max_sentences=8)
    first, second = (served(server, seed=seed) for seed in (1, 2))
    server.run(first, 30)
    recorder, memory = server.recorder, HostMemory(1 << 14, pinned=False)
    here, there = first.state.held.track_id, second.state.held.track_id
    assert here and there and here != there
    saved = recorder.save(here, HostCopies(memory))
    chunks = -(-recorder.request_bytes() // memory.chunk_bytes)
    assert memory.used_bytes == chunks * memory.chunk_bytes and chunks > 5
    before = [table[here].clone() for table in recorder.sentences.tables().values()]
    ring = recorder.queries.data[:, here].clone()
    recorder.sentences.reset(here, 0)
    recorder.queries.data[:, here] = 0
    recorder.restore(there, saved)
    for table, expected in zip(recorder.sentences.tables().values(), before, strict=True):
        assert torch.equal(table[there], expected)
    assert torch.equal(recorder.queries.data[:, there], ring) and ring.any()
