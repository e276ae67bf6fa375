# SPDX-License-Identifier: Apache-2.0
"""Owns the merged file: appending to it, and telling what of a batch is in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from zlib import crc32

from nvidia_resiliency_ext.shared_utils.os_utils import open_append_beneath

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils._logging.position import Position

__all__ = ["Output"]


class Output:
    """A file that is appended to; it may be renamed or removed at any time.

    Args:
        directory: Descriptor of its directory; it stays open.
        name: Its name.

    Raises:
        UnsafePathError: It is no regular file with a single name.
        OSError: It cannot be opened.
    """

    def __init__(self, directory: int, name: str) -> None:
        self._directory = directory
        self._name = name
        self._left = b""
        self._fd = open_append_beneath(directory, name)

    @property
    def is_behind(self) -> bool:
        """Whether bytes are still to be written."""
        return bool(self._left)

    def place(self) -> tuple[int, int]:
        """Return inode and size of the file that is written to, which is the one of the name."""
        status = os.fstat(self._fd)
        try:
            named = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
            fd = open_append_beneath(self._directory, self._name)
            os.close(self._fd)
            self._fd = fd
            status = os.fstat(fd)
        return status.st_ino, status.st_size

    def append(self, data: bytes) -> None:
        """Write bytes; those that cannot be written are kept for ``flush``.

        Raises:
            OSError: Not all could be written.
        """
        self._left += data
        self.flush()

    def flush(self) -> None:
        """Write what is left of earlier calls.

        Raises:
            OSError: Not all could be written.
        """
        while self._left:
            self._left = self._left[os.write(self._fd, self._left) :]

    def found_of(self, position: Position) -> bytes:
        """Return the bytes that stand where a batch of this position would be."""
        if position.batch is None or self.place()[0] != position.output_inode:
            return b""
        # The descriptor for appending cannot read.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._name, flags, dir_fd=self._directory)
        try:
            return os.pread(fd, position.batch.length, position.output_bytes)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def is_batch(data: bytes, position: Position) -> bool:
    """Say whether these bytes are the batch of a position."""
    batch = position.batch
    return batch is not None and len(data) == batch.length and crc32(data) == batch.crc
