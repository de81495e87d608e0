"""Host memory for copies of device tensors: equal chunks, used again, within a limit that holds.

PyTorch rounds each pinned allocation up to a power of two and keeps it, when it is freed, for later
ones of that size only. Copies of all sizes would take up to twice their bytes, and once more for
every new size, for ever. So all memory here is taken in chunks of one power of two, and what a dead
copy leaves is lent to the next.

Nothing here waits for a device, so a chunk may change hands while a copy from or to it still runs.
That is safe as long as only device copies write and read chunks, in stream order: whoever adds a
tensor does so behind all reads of what was dropped before (``patches/engine/backup.py``).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

#: one copy of this size keeps a bus busy far longer than it takes to launch
_CHUNK_BYTES = 4 << 20
#: in a small limit chunks are smaller, so that it is divided among several requests
_FEWEST_CHUNKS = 16


class HostMemory:
    """Chunks of host memory, never more than fit in the limit.

    What was taken once is kept for later copies, not given back to the system.

    Args:
        limit_bytes: of all chunks together; with 0 nothing can be copied. On a GPU 64 KiB or more,
            because pinned memory comes in pages of 4 KiB.
        pinned: whether copies come from a device that is not the CPU. It copies without waiting
            into pinned memory only.

    Attributes:
        chunk_bytes: of one chunk, a power of two.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.limit_bytes = limit_bytes
        largest_bytes = max(limit_bytes // _FEWEST_CHUNKS, 1)
        self.chunk_bytes = min(_CHUNK_BYTES, 1 << (largest_bytes.bit_length() - 1))
        self._pinned = pinned
        self._taken_chunks = 0
        self._free: list[Tensor] = []

    @property
    def taken_bytes(self) -> int:
        """What all chunks take of the host's memory, lent or not; it never shrinks."""
        return self._taken_chunks * self.chunk_bytes

    @property
    def used_bytes(self) -> int:
        """What the chunks that are lent take now."""
        return self.taken_bytes - len(self._free) * self.chunk_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether there are chunks for one more ``HostCopies`` of this size."""
        chunks = -(-nbytes // self.chunk_bytes)
        return self.used_bytes + chunks * self.chunk_bytes <= self.limit_bytes

    def lend(self) -> Tensor:
        """uint8 [chunk_bytes], a chunk that nobody else has until ``take_back``.

        Raises:
            MemoryError: all that fit in the limit are lent; ``fits`` would have said so.
        """
        if self._free:
            return self._free.pop()
        if self.taken_bytes + self.chunk_bytes > self.limit_bytes:
            raise MemoryError(
                f"host memory for copies: expected at most {self.limit_bytes} bytes, got one more "
                f"chunk of {self.chunk_bytes} beside {self.taken_bytes}"
            )
        chunk = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._taken_chunks += 1
        return chunk

    def take_back(self, chunks: list[Tensor]) -> None:
        """These chunks may be lent again."""
        self._free += chunks


class HostCopies:
    """Tensors that are copied together and packed into chunks of their own, end to end.

    The chunks go back when neither it nor one of its copies exists any more, however that comes.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._chunks: list[Tensor] = []
        self._room = torch.empty(0, dtype=torch.uint8)  # what is left of the last chunk
        weakref.finalize(self, memory.take_back, self._chunks)

    def add(self, tensor: Tensor) -> HostCopy:
        """A copy of the tensor as it is on the current stream; waits for nothing.

        Args:
            tensor: any dtype, any shape, any device.

        Raises:
            MemoryError: there is no chunk left for it.
        """
        data, pieces = _bytes_of(tensor.contiguous()), []
        while data.numel():
            if not self._room.numel():
                self._room = self._memory.lend()
                self._chunks.append(self._room)
            piece = self._room[: data.numel()]
            piece.copy_(data[: piece.numel()], non_blocking=True)
            pieces.append(piece)
            data, self._room = data[piece.numel() :], self._room[piece.numel() :]
        return HostCopy(tensor, pieces, self)


class HostCopy:
    """One copied tensor.

    Args:
        tensor: it has the shape and dtype of this one, which is not held.
        pieces: uint8 [bytes] each, its bytes in chunks, in order.
        copies: whose chunks those are.
    """

    def __init__(self, tensor: Tensor, pieces: list[Tensor], copies: HostCopies) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._pieces = pieces
        self._copies = copies  # the chunks are its own for as long as it can be read

    def to(self, device: torch.device, *, first_row: int = 0) -> Tensor:
        """dtype [rows - first_row, ...], a new tensor, by copies on the current stream.

        Args:
            first_row: how many entries of the first dimension are left out.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        if first_row:  # a number has no dimension to leave out of
            tensor = tensor[first_row:]
        data = _bytes_of(tensor)
        at = data.numel() - sum(piece.numel() for piece in self._pieces)  # below 0: left out
        for piece in self._pieces:
            stop = at + piece.numel()
            if stop > 0:
                data[max(at, 0) : stop].copy_(piece[max(-at, 0) :], non_blocking=True)
            at = stop
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes], the same memory. tensor: contiguous."""
    return tensor.view(-1).view(torch.uint8)
