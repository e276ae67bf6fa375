# SPDX-License-Identifier: Apache-2.0
"""Memory that holds the staged bytes of a save; the trainer fills it, a worker process reads it.

The memory is a memfd: it has no name that could stay behind, and goes with the last process that
has it. Buffers are reused, because fresh pages cost several times as much as the copy itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

PAGE_BYTES = 4096
_SLACK = 64  # a buffer is made 1/64 larger than asked for, so that small growth needs no new one


def round_up(value: int, unit: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


class StagingBuffer:
    """One piece of shared memory, mapped into this process.

    Example:
        >>> buffer = StagingBuffer(10)
        >>> buffer.view[:3] = b"abc"
        >>> bytes(StagingBuffer.attach(os.dup(buffer.fd)).view[:3])
        b'abc'
        >>> buffer.close()

    Args:
        nbytes: Its size, which is rounded up to whole pages.
        pinned: Register it with CUDA, so that copies from a GPU go straight into it.

    Attributes:
        fd: Its descriptor; stays open until `close`.
        nbytes: Its size.
        view: Its bytes.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self._map(_allocate(round_up(max(nbytes, 1))))
        if pinned:
            self._end = weakref.finalize(self, _give_back, self.fd, _pin(self.tensor()))

    @classmethod
    def attach(cls, fd: int) -> StagingBuffer:
        """Map the memory of another process's buffer; the descriptor is owned from now on."""
        buffer = cls.__new__(cls)
        buffer._map(fd)  # noqa: SLF001 - our own class
        return buffer

    def _map(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        try:
            self._mapping = mmap.mmap(fd, self.nbytes)
        except BaseException:
            os.close(fd)
            raise
        self.view = memoryview(self._mapping)
        self._tensor: torch.Tensor | None = None
        # Also for a buffer that nobody closes: it goes with the queue that is forgotten.
        self._end = weakref.finalize(self, _give_back, fd, None)

    def tensor(self) -> torch.Tensor:
        """Return its bytes as a tensor of dtype uint8 and shape (nbytes,)."""
        if self._tensor is None:
            import torch

            self._tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        return self._tensor

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last view of it does."""
        if self.fd < 0:
            return
        self.fd = -1
        self._end()
        self._tensor = None
        self.view = memoryview(b"")
        # While a tensor or a view of it is in use it stays mapped, and goes with the last of them.
        with contextlib.suppress(BufferError):
            self._mapping.close()


class StagingPool:
    """The staging buffers of one queue, lent one at a time and reused.

    Args:
        limit: How many may be lent at once; whoever takes one looks at `full` before.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._idle: list[StagingBuffer] = []
        self._lent = 0

    @property
    def full(self) -> bool:
        """Whether all buffers are lent."""
        return self._lent >= self.limit

    def take(self, nbytes: int, *, pinned: bool = False) -> StagingBuffer:
        """Lend a buffer of at least `nbytes`.

        Raises:
            OSError: The system has no memory for it.
        """
        with self._lock:
            self._lent += 1
            buffer = self._idle.pop() if self._idle else None
        try:
            if buffer is not None and buffer.nbytes >= nbytes:
                return buffer
            if buffer is not None:
                buffer.close()
            return StagingBuffer(nbytes + nbytes // _SLACK, pinned=pinned)
        except BaseException:
            with self._lock:
                self._lent -= 1
            raise

    def give_back(self, buffer: StagingBuffer) -> None:
        """Take a lent buffer back; nobody else may still read it."""
        with self._lock:
            self._lent -= 1
            self._idle.append(buffer)

    def discard(self, buffer: StagingBuffer) -> None:
        """Take a lent buffer back that a lost worker may still read: it is not used again."""
        with self._lock:
            self._lent -= 1
        buffer.close()

    def close(self) -> None:
        """Free the buffers that are not lent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for buffer in idle:
            buffer.close()


def _allocate(size: int) -> int:
    fd = os.memfd_create("nvrx-ckpt", os.MFD_CLOEXEC)
    try:
        # All pages at once: a later write can then not fail, and does not grow it page by page.
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _give_back(fd: int, unpin: Callable[[], None] | None) -> None:
    if unpin is not None:
        unpin()
    os.close(fd)


def _pin(tensor: torch.Tensor) -> Callable[[], None] | None:
    """Register memory with CUDA; return a function to undo it, None where there is no CUDA."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)) != 0:
        return None

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin
