"""Host memory for copies of device tensors: one slab, taken once and divided into equal chunks.

A copy is needed when the KV pool is full, often because memory is short everywhere, so nothing is
allocated then. PyTorch rounds a pinned allocation up to a power of two, so the slab is the largest
one within its limit. What a dead copy leaves is lent to the next.

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
#: a small slab has smaller chunks, so that it is divided among several requests
_FEWEST_CHUNKS = 16
#: what PyTorch says of a CUDA or HIP device's pinned memory, and of the CPU's
_NO_MEMORY = ("out of memory", "can't allocate memory")


class HostMemory:
    """A slab of host memory in chunks; nothing can be copied before ``reserve``.

    Args:
        limit_bytes: of the slab; with 0 nothing can be copied.
        pinned: whether copies come from a device that is not the CPU. It copies without waiting
            into pinned memory only.

    Attributes:
        slab_bytes: the largest power of two within the limit.
        chunk_bytes: of one chunk, a power of two.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.slab_bytes = 1 << (limit_bytes.bit_length() - 1) if limit_bytes else 0
        self.chunk_bytes = max(min(_CHUNK_BYTES, self.slab_bytes // _FEWEST_CHUNKS), 1)
        self._pinned = pinned
        self._reserved = False
        self._free: list[Tensor] = []

    @property
    def used_bytes(self) -> int:
        """What the chunks that are lent take now."""
        free_bytes = len(self._free) * self.chunk_bytes
        return self.slab_bytes - free_bytes if self._reserved else 0

    def reserve(self) -> None:
        """Take the slab, unless it was taken before.

        Raises:
            MemoryError: the host has no room for it.
        """
        if self._reserved:
            return
        try:
            slab = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if not any(text in reason for text in _NO_MEMORY):
                raise
            raise MemoryError(f"{self.slab_bytes} bytes of host memory ({reason})") from error
        self._free += torch.split(slab, self.chunk_bytes) if self.slab_bytes else ()
        self._reserved = True

    def fits(self, nbytes: int) -> bool:
        """Whether there are chunks for one more ``HostCopies`` of this size."""
        return nbytes <= len(self._free) * self.chunk_bytes

    def lend(self) -> Tensor:
        """uint8 [chunk_bytes], a chunk that nobody else has until ``take_back``.

        Raises:
            MemoryError: all chunks are lent; ``fits`` would have said so.
        """
        if not self._free:
            raise MemoryError(
                f"host memory for copies: expected a free chunk of {self.chunk_bytes} bytes, got "
                f"{self.used_bytes} of {self.slab_bytes} lent"
            )
        return self._free.pop()

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
