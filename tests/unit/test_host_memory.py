"""Copies in host memory: to the bit, in chunks of one slab that are lent again."""

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

CHUNK_BYTES, CHUNKS = 256, 16
LIMIT_BYTES = CHUNK_BYTES * CHUNKS + 1000  # what is beyond a power of two is not taken
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
    memory = HostMemory(limit_bytes, pinned=device.type != "cpu")
    memory.reserve()
    return memory


def chunks_of(tensors: Sequence[Tensor]) -> int:
    return -(-sum(tensor.nbytes for tensor in tensors) // CHUNK_BYTES)


@on_devices
@settings(max_examples=300)
@given(ACTIONS, st.integers(0, 1000))
def test_copies_come_back_whatever_came_and_went(
    device: torch.device, actions: list[Any], seed: int
) -> None:
    memory, draw = memory_for(device), torch.Generator().manual_seed(seed)
    assert memory.chunk_bytes == CHUNK_BYTES
    alive: list[tuple[list[HostCopy], list[Tensor]]] = []
    lent_chunks = 0
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
            else:
                with pytest.raises(
                    MemoryError, match="chunk of 256 bytes, got 4096 of 4096 in use"
                ):
                    copied(memory, tensors)
        assert memory.used_bytes == lent_chunks * CHUNK_BYTES <= LIMIT_BYTES
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
    others = copied(memory, [torch.zeros(12 * CHUNK_BYTES, dtype=torch.uint8)])
    assert not memory.fits(1) and last.to(torch.device("cpu")).tolist() == [1] * 100
    del last
    assert memory.used_bytes == 12 * CHUNK_BYTES and len(others) == 1


@settings(max_examples=300)
@given(st.one_of(st.integers(0, 1 << 20), st.integers(0, 1 << 60)))
def test_the_slab_is_a_power_of_two_within_the_limit(limit_bytes: int) -> None:
    """PyTorch would round a pinned one up, beyond the limit."""
    memory = HostMemory(limit_bytes, pinned=False)
    slab_bytes, chunk_bytes = memory.slab_bytes, memory.chunk_bytes
    assert slab_bytes & (slab_bytes - 1) == 0 and slab_bytes <= limit_bytes < max(2 * slab_bytes, 1)
    assert chunk_bytes & (chunk_bytes - 1) == 0 and 1 <= chunk_bytes <= 4 << 20
    assert slab_bytes < 16 or slab_bytes // chunk_bytes >= 16
    assert chunk_bytes == 4 << 20 or slab_bytes // chunk_bytes <= 16


@pytest.mark.parametrize("limit_bytes", [0, LIMIT_BYTES])
def test_without_a_slab_nothing_is_copied(limit_bytes: int) -> None:
    memory = HostMemory(limit_bytes, pinned=False)
    if not limit_bytes:
        memory.reserve()  # of nothing
    assert not memory.fits(1) and memory.fits(0) and not memory.used_bytes
    with pytest.raises(MemoryError):
        copied(memory, [torch.ones(1)])


class Allocations:
    """What is asked of ``torch.empty`` in bytes of the host, and how often it has no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failures: str) -> None:
        self.asked: list[tuple[int, bool]] = []
        self._failures = [*failures]
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self._spied)

    def _spied(self, size: Any, *, pin_memory: bool = False, **how: Any) -> Tensor:
        if how.get("dtype") is not torch.uint8 or not size or "device" in how:
            return self._empty(size, **how)
        self.asked.append((size, pin_memory))
        if self._failures:
            raise RuntimeError(self._failures.pop(0))
        return self._empty(size, **how)  # pinned only where there is a device


def test_the_slab_is_all_that_is_ever_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = Allocations(monkeypatch)
    memory = HostMemory(LIMIT_BYTES, pinned=True)
    for nbytes in (1, 300, 4000, 4096, 7):
        memory.reserve()
        assert len(copied(memory, [torch.ones(nbytes, dtype=torch.uint8)])) == 1
    assert allocations.asked == [(CHUNKS * CHUNK_BYTES, True)]


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCompile with ...",
        "DefaultCPUAllocator: can't allocate memory: 9",
    ],
)
def test_no_room_for_the_slab(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied then; with room the next one takes it."""
    allocations = Allocations(monkeypatch, message, message)
    memory = HostMemory(LIMIT_BYTES, pinned=True)
    for _ in range(2):
        with pytest.raises(MemoryError, match=rf"^4096 bytes of host memory \({message[:12]}.*\)$"):
            memory.reserve()
        assert not memory.fits(1) and not memory.used_bytes
    memory.reserve()
    assert memory.fits(4096) and len(allocations.asked) == 3


def test_a_fault_of_the_device_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocations(monkeypatch, "CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        HostMemory(LIMIT_BYTES, pinned=True).reserve()


def test_only_a_request_that_evicts_takes_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one; a request that could not be backed up needs none."""
    allocations = Allocations(monkeypatch)
    server = SyntheticServer(retraction_backup_bytes=10_000)
    server.open([5] * 20, kv_policy="full")
    assert not allocations.asked
    for _ in range(2):
        server.open([5] * 20, kv_budget=64)
        assert allocations.asked == [(8192, False)]


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
    recorder, memory = server.recorder, memory_for(server.device, 1 << 14)
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
