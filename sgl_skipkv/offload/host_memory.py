"""Host memory for copies of device tensors: one slab, allocated once and divided into equal chunks.

A copy is needed when the KV pool is full, often when all memory is short, so the slab is allocated
before. PyTorch rounds a pinned allocation up to a power of two, so the slab's size is the largest
power of two within the limit. Chunks of a dropped copy are reused.

Nothing here waits for a device, so a chunk may be reused while a copy from or to it still runs.
That is safe if only device copies write and read chunks, in stream order: a tensor must be added
behind all reads of copies that were dropped before (``patches/engine/backup.py``).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

#: a copy of this size takes far longer than its launch
_CHUNK_BYTES = 4 << 20
#: a small slab has smaller chunks, so that several requests can share it
_FEWEST_CHUNKS = 16
#: in PyTorch's errors, for pinned memory of a CUDA or HIP device and for CPU memory
_NO_MEMORY = ("out of memory", "can't allocate memory")


class HostMemory:
    """A slab of host memory in chunks, allocated by ``reserve``.

    Args:
        limit_bytes: of the slab; 0: nothing can be copied.
        pinned: whether copies come from a device other than the CPU; its asynchronous copies need
            pinned memory.

    Attributes:
        slab_bytes: the largest power of two within the limit.
        chunk_bytes: of one chunk, a power of two.
        free_chunks: uint8 [chunk_bytes] each; ``HostCopies`` takes and returns them.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.slab_bytes = 1 << (limit_bytes.bit_length() - 1) if limit_bytes else 0
        self.chunk_bytes = max(min(_CHUNK_BYTES, self.slab_bytes // _FEWEST_CHUNKS), 1)
        self._pinned = pinned
        self._reserved = False
        self.free_chunks: list[Tensor] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of the chunks in use."""
        free_bytes = len(self.free_chunks) * self.chunk_bytes
        return self.slab_bytes - free_bytes if self._reserved else 0

    def reserve(self) -> None:
        """Allocate the slab at the first call.

        Raises:
            MemoryError: the host has no memory for it.
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
        self.free_chunks += torch.split(slab, self.chunk_bytes) if self.slab_bytes else ()
        self._reserved = True

    def in_chunks(self, nbytes: int) -> int:
        """Bytes of the chunks that a ``HostCopies`` of this size takes."""
        return -(-nbytes // self.chunk_bytes) * self.chunk_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether enough chunks are free for a ``HostCopies`` of this size."""
        return nbytes <= len(self.free_chunks) * self.chunk_bytes


class HostCopies:
    """Tensors that are copied together and packed end to end into chunks that no others share.

    The chunks are returned when this object and all of its copies have been garbage-collected.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._chunks: list[Tensor] = []
        self._rest = torch.empty(0, dtype=torch.uint8)  # unused rest of the last chunk
        weakref.finalize(self, memory.free_chunks.extend, self._chunks)

    def add(self, tensor: Tensor) -> HostCopy:
        """Copy the tensor asynchronously, on the current stream.

        Raises:
            MemoryError: no chunk is free; ``HostMemory.fits`` checks that.
        """
        memory, data, pieces = self._memory, _bytes_of(tensor.contiguous()), []
        while data.numel():
            if not self._rest.numel():
                if not memory.free_chunks:
                    raise MemoryError(
                        f"host memory for copies: expected a free chunk of {memory.chunk_bytes} "
                        f"bytes, got {memory.used_bytes} of {memory.slab_bytes} in use"
                    )
                self._rest = memory.free_chunks.pop()
                self._chunks.append(self._rest)
            piece = self._rest[: data.numel()]
            piece.copy_(data[: piece.numel()], non_blocking=True)
            pieces.append(piece)
            data, self._rest = data[piece.numel() :], self._rest[piece.numel() :]
        return HostCopy(tensor.shape, tensor.dtype, pieces, self)


@dataclass(frozen=True, eq=False)
class HostCopy:
    """One copied tensor.

    Attributes:
        pieces: uint8 [bytes] each, its bytes in chunks, in order.
        copies: the owner of the chunks, which stay in use as long as this copy exists.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Tensor]
    copies: HostCopies

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def to(self, device: torch.device, *, first_row: int = 0) -> Tensor:
        """dtype [rows - first_row, ...], a new tensor without the first rows, by copies on the
        current stream."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        if first_row:  # a 0-dimensional tensor cannot be sliced
            tensor = tensor[first_row:]
        data = _bytes_of(tensor)
        at = data.numel() - self.nbytes  # negative: left out
        for piece in self.pieces:
            stop = at + piece.numel()
            if stop > 0:
                data[max(at, 0) : stop].copy_(piece[max(-at, 0) :], non_blocking=True)
            at = stop
        return tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [bytes], the same memory. tensor: contiguous."""
    return tensor.view(-1).view(torch.uint8)
