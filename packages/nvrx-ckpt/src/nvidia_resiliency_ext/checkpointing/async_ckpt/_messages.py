# SPDX-License-Identifier: Apache-2.0
"""Messages between trainer and worker process, over a private socketpair.

Plans, functions and results are too large for messages: they stand in a memfd of each job (`Job`).
Every message names queue, call and worker generation, so that none is taken for another's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.wire import MessageSet

_PROGRESS_BYTES = 8


@dataclass(frozen=True)
class Job:
    """Which job a message is about.

    Attributes:
        queue: Random identity of the queue.
        call: Index of the call in it.
        generation: Number of the worker process, counted by the queue.
    """

    queue: str
    call: int
    generation: int


@dataclass(frozen=True)
class Settings:
    """The first message to a worker, which answers with what it has got.

    Attributes:
        cpu_priority: Niceness from 0 to 19.
        io_priority: Class of `ionice`: 0 to 3; None keeps it.
    """

    cpu_priority: int
    io_priority: int | None


@dataclass(frozen=True)
class Run:
    """Carry out a job; the staging memory and the job's memory travel with it as descriptors.

    Attributes:
        job: Its identity.
        kind: "write" for a plan, "call" for a function, "bytes" for one that needs no torch.
        plan_bytes: Length of the plan, or of the pickled function and arguments.
        code_bytes: Length of the pickled opener behind the plan, 0 for none.
        renames: Whether files get a temporary name first.
        max_buffers: How many staging buffers the trainer has at a time.
        retries: How often to try again after an error of the file system.
        retry_delay: Seconds before the first new attempt; doubled each time.
    """

    job: Job
    kind: str
    plan_bytes: int
    code_bytes: int
    renames: bool
    max_buffers: int
    retries: int
    retry_delay: float


@dataclass(frozen=True)
class Cancel:
    """Give a job up, soon."""

    job: Job


@dataclass(frozen=True)
class Finished:
    """A job is over.

    Attributes:
        job: Its identity.
        ok: Whether it succeeded.
        result_at: Where the result stands in the job's memory: JSON.
        result_bytes: Its length.
        seconds: How long it took.
    """

    job: Job
    ok: bool
    result_at: int
    result_bytes: int
    seconds: float


@dataclass(frozen=True)
class Released:
    """From the worker: the staging buffer of a job is free, the job goes on. To it: all is over."""

    job: Job


MESSAGES = MessageSet(Job, Settings, Run, Cancel, Released, Finished)


class JobMemory:
    """The memory of one job: 8 bytes of progress, then the plan, code and the result.

    Args:
        fd: Its memfd, owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls, *parts: bytes) -> JobMemory:
        """Return the memory of a new job with these parts behind the progress."""
        memory = cls(os.memfd_create("nvrx-ckpt-job", os.MFD_CLOEXEC))
        memory.write(0, bytes(_PROGRESS_BYTES) + b"".join(parts))
        return memory

    def write(self, position: int, data: bytes) -> None:
        """Put bytes somewhere."""
        view = memoryview(data)
        while view:
            done = os.pwrite(self.fd, view, position)
            position, view = position + done, view[done:]

    def read(self, position: int, count: int) -> bytes:
        """Return bytes from somewhere; fewer where it ends."""
        parts = []
        while count > 0 and (data := os.pread(self.fd, count, position)):
            parts.append(data)
            position, count = position + len(data), count - len(data)
        return b"".join(parts)

    def part(self, first: int, count: int) -> bytes:
        """Return bytes behind the progress: the plan begins at 0."""
        return self.read(_PROGRESS_BYTES + first, count)

    def append(self, data: bytes) -> int:
        """Put bytes at the end and return their position."""
        position = os.fstat(self.fd).st_size
        self.write(position, data)
        return position

    @property
    def progress(self) -> int:
        """How many bytes have been written to files."""
        return int.from_bytes(self.read(0, _PROGRESS_BYTES), "little")

    @progress.setter
    def progress(self, nbytes: int) -> None:
        self.write(0, nbytes.to_bytes(_PROGRESS_BYTES, "little"))

    def close(self) -> None:
        """Give the descriptor back; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
