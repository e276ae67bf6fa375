# SPDX-License-Identifier: Apache-2.0
"""Owns the files that one process logs to in a directory of its node; merging them is another's."""

from __future__ import annotations

import logging
import os
import stat
import sys
import time

__all__ = ["NodeLocalTmpLogHandler"]

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NodeLocalTmpLogHandler(logging.Handler):
    """Appends records to ``rank_<rank>_<process>.msg.<ms since epoch>`` and changes file by size.

    Each record is one system call on a file opened for appending, so that a forked child may go
    on with the same file. A record that cannot be written goes to stderr.

    Args:
        rank_id: Global rank, None when unknown.
        file_path: The directory.
        max_file_size: Size in bytes beyond which a new file is begun.
        max_backup_files: How many older files of this rank and process stay when one is begun.
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

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            data = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 - a record's arguments may do anything
            self.handleError(record)
            return
        try:
            fd = self._writable_fd()
            while data:
                data = data[os.write(fd, data) :]
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

    def _writable_fd(self) -> int:
        """Return the descriptor to write to: of the present file, or of a new one."""
        found = self._own_status()
        if found is not None:
            if found.st_nlink and found.st_size <= self.max_file_size:
                return self._fd
            self._release()
        times = self._file_times()
        if times:
            fd = self._open(times[-1])
            if os.fstat(fd).st_size <= self.max_file_size:
                return self._keep(fd)
            os.close(fd)
            times = self._remove_old(times)
        now_ms = int(time.time() * 1000)
        return self._keep(self._open(max(now_ms, times[-1] + 1) if times else now_ms))

    def _keep(self, fd: int) -> int:
        found = os.fstat(fd)
        self._fd, self._identity = fd, (found.st_dev, found.st_ino)
        return fd

    def _own_status(self) -> os.stat_result | None:
        """Return the status of the present file; None where there is none.

        A program may close every descriptor that it does not know, and the number may then belong
        to a file of its own.
        """
        if self._fd < 0:
            return None
        try:
            found = os.fstat(self._fd)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            self._fd = -1
            return None
        return found

    def _file_times(self) -> list[int]:
        """Return the times in the names of this rank's and process's files, oldest first."""
        os.makedirs(self.file_path, mode=0o700, exist_ok=True)
        start = len(self._stem)
        ends = [name[start:] for name in os.listdir(self.file_path) if name.startswith(self._stem)]
        return sorted(int(end) for end in ends if end.isascii() and end.isdigit())

    def _remove_old(self, times: list[int]) -> list[int]:
        """Delete all but the newest files and return the times of those that stay."""
        first_kept = max(0, len(times) - self.max_backup_files)
        for file_time in times[:first_kept]:
            self._unlink(file_time)
        return times[first_kept:] or times[-1:]

    def _unlink(self, file_time: int) -> None:
        try:
            os.unlink(self._path(file_time))
        except FileNotFoundError:
            return  # the aggregator was faster

    def _path(self, file_time: int) -> str:
        return os.path.join(self.file_path, f"{self._stem}{file_time}")

    def _open(self, file_time: int) -> int:
        fd = os.open(self._path(file_time), _FLAGS, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(f"{self._path(file_time)} is not a regular file")
        return fd

    def _release(self) -> None:
        if self._own_status() is not None:
            os.close(self._fd)
            self._fd = -1

    def _write_to_stderr(self, data: bytes) -> None:
        if sys.stderr is None:
            return
        try:
            sys.stderr.write(data.decode("utf-8", "replace"))
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # nowhere is left to write to
