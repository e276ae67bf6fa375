# SPDX-License-Identifier: Apache-2.0
"""Errors of both kinds of checkpoints; it holds no behaviour beyond fields and messages."""

from __future__ import annotations

import errno

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

_NEXT_STEPS = {
    errno.ENOENT: "the directory is missing or gone: create or mount it",
    errno.ENOSPC: "free space there, or save elsewhere",
    errno.EDQUOT: "free space of this user there, or raise the quota",
    errno.EROFS: "mount the file system writable; its device may have failed",
    errno.EIO: "the device or its connection failed: see the kernel's log",
    errno.EBUSY: "give each job a directory of its own",
}


class AsyncSaveError(NvrxError, RuntimeError):
    """A save that was scheduled did not succeed; nothing of it was finalised.

    Args:
        call_idx: Index that `schedule_async_request` returned.
        rank: Global rank on which it failed.
        cause: What happened there, with the traceback of the worker where there is one.
    """

    def __init__(self, call_idx: int, rank: int, cause: str) -> None:
        super().__init__(call_idx, rank, cause)
        self.call_idx = call_idx
        self.rank = rank
        self.cause = cause

    def __str__(self) -> str:
        return f"save {self.call_idx} failed on rank {self.rank}: {self.cause}"


class CheckpointWriteError(NvrxError, OSError):
    """A file of a checkpoint could not be written.

    Args:
        number: `errno` of the failure, or 0 where there is none.
        reason: What the system said.
        path: The file, under its final name.
        written_bytes: How many bytes of it had been written.
        action: What was being done: "create", "write", "fsync", "close" or "rename".
    """

    def __init__(
        self, number: int, reason: str, path: str, written_bytes: int, action: str
    ) -> None:
        super().__init__(number, reason, path)
        self.written_bytes = written_bytes
        self.action = action

    @classmethod
    def from_os(
        cls, error: OSError, path: str, written_bytes: int, action: str
    ) -> CheckpointWriteError:
        """Return the error for an `OSError` that a file operation raised.

        Args:
            error: What the operation raised; its `errno` and text are taken over.
            path: The file, under its final name.
            written_bytes: How many bytes of the file had been written.
            action: The operation: "create", "write", "fsync", "close" or "rename".
        """
        reason = error.strerror or str(error)
        return cls(error.errno or 0, reason, path, written_bytes, action)

    def __str__(self) -> str:
        step = _NEXT_STEPS.get(self.errno or 0)
        return (
            f"cannot {self.action} {self.filename!r}: [Errno {self.errno}] {self.strerror}"
            f" ({self.written_bytes} bytes written)" + (f"; {step}" if step else "")
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the error with all fields; the base class would lose two."""
        fields = (self.errno, self.strerror, self.filename, self.written_bytes, self.action)
        return type(self), fields


class DamagedCheckpointError(NvrxError, ValueError):
    """A file of a checkpoint is not what was written.

    Args:
        path: The file.
        problem: What is wrong with it, naming the tensor where that is known.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"
