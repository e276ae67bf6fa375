# SPDX-License-Identifier: Apache-2.0
"""Lock a checkpoint while it is saved; the kernel gives a lock back when its process ends."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.os_utils import lock_file

from ._errors import CheckpointWriteError

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTEMPTS = 5
_RELEASE_S = 1.0  # a job that has finalised tells its worker, which then lets go
# Not for reading alone: NFS locks only what may be written. And not held up by a pipe.
_FLAGS = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


def open_locked(open_it: Callable[[], int], path: str, timeout_s: float = 0.0) -> int:
    """Open a file or directory and lock it; again, where others replace it in between.

    Args:
        open_it: Opens it, and creates it if it is missing.
        path: Where it is.
        timeout_s: Seconds to wait for whoever has the lock.

    Raises:
        BlockingIOError: Somebody has the lock.
        OSError: It cannot be opened or locked.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            descriptor = open_it()
            try:
                lock_file(descriptor, timeout_s)
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    raise OSError(errno.EBUSY, "others keep removing it", path)


class SaveLock:
    """Keeps other processes from saving one rank's part of a checkpoint until it is closed.

    What is locked is the rank's manifest: it is there anyway, and replaced last. On a file system
    without locks this does nothing.

    Args:
        path: The manifest; its directory is created, and an empty file in its place, if missing.

    Raises:
        CheckpointWriteError: Another process saves there, or the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        self.renew()

    def renew(self) -> None:
        """Lock the present manifest if another file replaced the locked one.

        Raises:
            CheckpointWriteError: Another process was faster, and saves there.
        """
        if not self._is_current():
            before, self._fd = self._fd, -1
            try:
                self._fd = self._take()
            finally:
                if before >= 0:
                    os.close(before)

    def close(self) -> None:
        """Let others save there; a file that is still empty goes."""
        if self._is_current() and os.fstat(self._fd).st_size == 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _is_current(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        return False

    def _take(self) -> int:
        folder = os.path.dirname(self._path)
        try:
            os.makedirs(folder, exist_ok=True)
            return open_locked(self._open, self._path, _RELEASE_S)
        except BlockingIOError as error:
            reason = "another process saves to it"
            raise CheckpointWriteError(errno.EBUSY, reason, folder, 0, "write") from error
        except OSError as error:
            # Or it is another user's: whether that can be replaced will be seen.
            if error.errno in _NO_LOCKS or os.access(self._path, os.R_OK):
                return -1
            raise CheckpointWriteError.from_os(error, folder, 0, "create") from error

    def _open(self) -> int:
        return os.open(self._path, _FLAGS | os.O_CREAT, 0o666)


def is_being_saved(folder: str) -> bool:
    """Return whether a process is saving a part of the checkpoint in a directory."""
    for path in glob.glob(os.path.join(glob.escape(folder), ".nvrx_manifest.*.json")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FLAGS)
            try:
                lock_file(descriptor)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False
