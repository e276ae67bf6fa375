# SPDX-License-Identifier: Apache-2.0
"""Owns the files that one process logs to in a directory of its node; merging them is another's.

What of it may be deleted is decided in ``keep``.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import time

from .escape import guarded
from .place import open_log_directory

__all__ = ["NodeLocalTmpLogHandler"]

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NodeLocalTmpLogHandler(logging.Handler):
    """Appends records to ``rank_<rank>_<process>.msg.<ms since epoch>`` and changes file by size.

    Each record is one system call on a file opened for appending, so that a forked child may go
    on with the same file. A record that cannot be written goes to stderr.

    Args:
        rank_id: Global rank, None when unknown.
        file_path: The directory.
        max_file_size: Size in bytes beyond which a new file is begun.
        max_backup_files: How many older files of this rank and process stay when one is begun.
            While an aggregator works in the directory, files that it has not read stay too, up to
            16 times as many. Records in files that went unread are counted in a warning.
        proc_name: Name of the process in the file's name.
    """

    def __init__(
        self,
        rank_id: int | None,
        file_path: str,
        max_file_size: int,
        max_backup_files: int,
        proc_name: str,
    ) -> None:
        super().__init__()
        self.rank_id = rank_id
        self.file_path = file_path
        self.max_file_size = max_file_size
        self.max_backup_files = max_backup_files
        self.proc_name = proc_name
        rank = "unknown" if rank_id is None else str(rank_id)
        self._stem = f"rank_{rank}_{proc_name.replace('/', '_')}.msg."
        self._fd = -1
        self._identity = (0, 0)
        self._size = 0
        self._is_line_torn = False
        self._dropped_count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record.

        Args:
            record: The record.
        """
        try:
            data = self._bytes_of(record)
        except Exception:  # noqa: BLE001 - a record's arguments may do anything
            self.handleError(record)
            return
        try:
            self._make_ready()
            self._append(data)
        except OSError:
            self._write_to_stderr(data)

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        self.acquire()
        try:
            self._release()
        finally:
            self.release()
        super().close()

    def _bytes_of(self, record: logging.LogRecord) -> bytes:
        return (guarded(self.format(record)) + "\n").encode("utf-8", "backslashreplace")

    def _append(self, data: bytes) -> None:
        if self._is_line_torn:
            data = b"\n" + data
        written = os.write(self._fd, data)
        while written < len(data):
            self._is_line_torn = True
            written += os.write(self._fd, data[written:])
        self._is_line_torn = False
        self._size += written

    def _make_ready(self) -> None:
        """Go on to another file if the present one is full or gone.

        This asks the kernel each time, which takes a microsecond: a program may close descriptors
        that it does not know, and the number may then belong to a file of its own.
        """
        if self._is_still_ours() and self._size <= self.max_file_size:
            return
        self._release()
        directory = open_log_directory(self.file_path)
        try:
            self._open_next(directory)
        finally:
            os.close(directory)

    def _open_next(self, directory: int) -> None:
        """Go on with the newest file of this rank and process, or begin one after it."""
        times = self._file_times(directory)
        if times:
            self._open(times[-1], directory)
            if self._size <= self.max_file_size:
                return
            self._release()
        newest = times[-1] if times else 0
        dropped = self._remove_old(times, directory)
        self._open(max(int(time.time() * 1000), newest + 1), directory)
        if dropped:
            self._dropped_count += dropped
            self._append(self._bytes_of(self._complaint()))

    def _is_still_ours(self) -> bool:
        """Look at the file: whether it is there, and how large its writers have made it."""
        if self._fd < 0:
            return False
        try:
            found = os.fstat(self._fd)
        except OSError:
            self._fd = -1
            return False
        if (found.st_dev, found.st_ino) != self._identity:
            self._fd = -1  # the number is another file's now
            return False
        self._size = found.st_size
        return found.st_nlink > 0

    def _file_times(self, directory: int) -> list[int]:
        """Return the times in the names of this rank's and process's files, oldest first."""
        start = len(self._stem)
        ends = [name[start:] for name in os.listdir(directory) if name.startswith(self._stem)]
        return sorted(int(end) for end in ends if end.isascii() and end.isdigit())

    def _remove_old(self, times: list[int], directory: int) -> int:
        """Delete what may go and return how many records nobody has read of it."""
        first_kept = max(0, len(times) - self.max_backup_files)
        if not first_kept:
            return 0
        from .keep import remove_old

        names = [f"{self._stem}{file_time}" for file_time in times]
        return remove_old(names, self.max_backup_files, directory)

    def _complaint(self) -> logging.LogRecord:
        return logging.LogRecord(
            "nvrx",
            logging.WARNING,
            __file__,
            0,
            "%d log records dropped",
            (self._dropped_count,),
            None,
        )

    def _open(self, file_time: int, directory: int) -> None:
        name = f"{self._stem}{file_time}"
        fd = os.open(name, _FLAGS, 0o600, dir_fd=directory)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        self._fd, self._size = fd, found.st_size
        self._identity = (found.st_dev, found.st_ino)
        # Whoever wrote before us may have died in the middle of a line.
        self._is_line_torn = self._size > 0 and os.pread(fd, 1, self._size - 1) != b"\n"

    def _release(self) -> None:
        self._is_still_ours()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write_to_stderr(self, data: bytes) -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(data.decode("utf-8", "replace"))
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # nowhere is left to write to
