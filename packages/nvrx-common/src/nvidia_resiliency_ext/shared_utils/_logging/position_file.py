# SPDX-License-Identifier: Apache-2.0
"""Owns the file with an aggregator's position: two places that are written in turn.

A place is written over, within space that the file has already, so a full disk does not keep the
position from going on, and what a crash tears is only the newer one of the two.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from .position import STATE_NAME, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .position import Position

__all__ = ["PositionFile", "read_position"]

_PLACES = 2
_LARGEST_BYTES = 64 * 1024 * 1024
_FIRST_BYTES = 64 * 1024
_PAGE_BYTES = 4096
_NEW_NAME = STATE_NAME + ".new"
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_position(directory: int) -> Position | None:
    """Return the last position of the aggregator of a directory, None where there is none."""
    try:
        descriptor = os.open(STATE_NAME, os.O_RDONLY | _OPEN, dir_fd=directory)
    except OSError:
        return None
    try:
        found = _latest(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if found is None else found[1]


class PositionFile:
    """The position file of one directory, written by one aggregator.

    Args:
        directory: Descriptor of the directory; it stays open.

    Raises:
        OSError: The file can be neither opened nor made.
    """

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._number = 0
        self._place_bytes = 0
        self._fd = -1
        self.last: Position | None = None
        self.is_damaged = False
        try:
            self._fd = os.open(STATE_NAME, os.O_RDWR | _OPEN, dir_fd=directory)
            found = _latest(self._fd)
            self.is_damaged = found is None
        except FileNotFoundError:
            found = None
        if found is not None:
            self._number, self.last = found
            self._place_bytes = os.fstat(self._fd).st_size // _PLACES

    def write(self, position: Position) -> None:
        """Replace the older of the two positions.

        Raises:
            OSError: It cannot be written; the position before is then untouched.
        """
        data = encode(position, self._number + 1)
        if self._fd < 0 or len(data) > self._place_bytes or not os.fstat(self._fd).st_nlink:
            self._make(data)
        else:
            self._put(self._fd, data)
        self._number += 1
        self.last = position

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _put(self, fd: int, data: bytes) -> None:
        place = (self._number + 1) % _PLACES * self._place_bytes
        while data:
            written = os.pwrite(fd, data, place)
            data, place = data[written:], place + written

    def _make(self, data: bytes) -> None:
        """Put a new file with enough room in the place of the old one."""
        least = -(-len(data) // _PAGE_BYTES) * _PAGE_BYTES
        fd = self._open_new()
        before = self._place_bytes
        try:
            self._place_bytes = _reserve(
                fd, [max(_FIRST_BYTES, self._place_bytes, 2 * least), least]
            )
            self._put(fd, data)
            os.rename(_NEW_NAME, STATE_NAME, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            self._place_bytes = before
            os.close(fd)
            os.unlink(_NEW_NAME, dir_fd=self._directory)
            raise OSError(error.errno, error.strerror, STATE_NAME) from error
        except BaseException:
            os.close(fd)
            raise
        self.close()
        self._fd = fd

    def _open_new(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NEW_NAME, dir_fd=self._directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
        return os.open(_NEW_NAME, flags, 0o600, dir_fd=self._directory)


def _reserve(descriptor: int, sizes: Sequence[int]) -> int:
    """Reserve room for all places and return the size of one: the first for which there is room.

    Raises:
        OSError: There is room for none.
    """
    *wishes, least = sizes
    for place_bytes in wishes:
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, place_bytes * _PLACES)
            return place_bytes
    os.posix_fallocate(descriptor, 0, least * _PLACES)
    return least


def _latest(descriptor: int) -> tuple[int, Position] | None:
    """Return the later of the positions in a file that are whole."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_BYTES:
        return None
    place_bytes = found.st_size // _PLACES
    places = (decode(os.pread(descriptor, place_bytes, n * place_bytes)) for n in range(_PLACES))
    return max((place for place in places if place is not None), key=_number_of, default=None)


def _number_of(found: tuple[int, Position]) -> int:
    return found[0]
