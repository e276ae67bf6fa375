# SPDX-License-Identifier: Apache-2.0
"""Owns the rule that one aggregator works in a directory; the kernel ends it with the process."""

from __future__ import annotations

import fcntl
import os
import threading

from nvidia_resiliency_ext.shared_utils.errors import DirectoryBusyError

__all__ = ["DirectoryLock"]

_NAME = ".nvrx_log_aggregator.lock"


class DirectoryLock:
    """Held from construction to ``close``.

    The kernel's lock belongs to the process and not to its forked children, who would otherwise
    hold it after our death. It says nothing within a process: the set does.

    Args:
        directory: Descriptor of the directory.
        path: Its path, for the message.

    Raises:
        DirectoryBusyError: Somebody holds the lock.
        OSError: The lock's file cannot be made.
    """

    _guard = threading.Lock()  # guards _held
    _held: set[tuple[int, int, int]] = set()  # noqa: RUF012 - one set for the process is the point

    def __init__(self, directory: int, path: str) -> None:
        status = os.fstat(directory)
        self._key = (os.getpid(), status.st_dev, status.st_ino)
        with self._guard:
            if self._key in self._held:
                raise DirectoryBusyError(f"{path}: this process aggregates its logs already")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(_NAME, flags, 0o600, dir_fd=directory)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._fd)
                message = f"{path}: another process aggregates its logs already"
                raise DirectoryBusyError(message) from error
            self._held.add(self._key)

    def close(self) -> None:
        """Let others work in the directory."""
        with self._guard:
            self._held.discard(self._key)
            os.close(self._fd)
