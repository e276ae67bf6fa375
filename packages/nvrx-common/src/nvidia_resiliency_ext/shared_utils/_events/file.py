# SPDX-License-Identifier: Apache-2.0
"""Owns the file that the processes of a node append events to: its name, header and descriptor.

It does not own what an event is (``log``). Methods return why something failed and never raise an
``OSError``: the program that is being recorded must not suffer from a full disk.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from .encode import encode_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SCHEMA", "NodeFile"]

SCHEMA = "nvrx_events.v1"
_REOPEN_AFTER_S = 5.0
_NAME_LIMIT = 64
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def _name_part(text: str) -> str:
    """Return ``text`` as a piece of a file name: no separators, no leading dot, bounded."""
    kept = "".join(ch if ch.isascii() and (ch.isalnum() or ch in "._-") else "_" for ch in text)
    return kept.lstrip(".")[:_NAME_LIMIT] or "unknown"


class NodeFile:
    """One append-only file of a host and a launch; any number of processes have it open."""

    def __init__(
        self,
        directory: str,
        *,
        host: str,
        launch_id: str,
        job_id: str | None,
        versions: Mapping[str, str],
    ) -> None:
        """Describe the file without opening it."""
        self.directory = directory
        self.host = host
        self.launch_id = launch_id
        self.fd = -1
        self._job_id = job_id
        self._versions = dict(versions)
        self._identity = (0, 0)
        self._is_line_torn = False
        self._next_open_at = 0.0

    @property
    def path(self) -> str:
        """Path of the file."""
        name = f"events-{_name_part(self.host)}-{_name_part(self.launch_id)}.jsonl"
        return os.path.join(self.directory, name)

    def open(self, *, is_new: bool) -> str:
        """Open the file and return why that failed, nothing when it did not.

        A new file gets another ``launch_id`` where one of that name is there already.
        """
        self.fd = -1
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self.fd = self._open_new() if is_new else self._open_existing()
            found = os.fstat(self.fd)
        except OSError as error:
            why = error.strerror or type(error).__name__
        else:
            self._identity = (found.st_dev, found.st_ino)
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                return ""
            self.release()
            why = "not a regular file of this user"
        self._next_open_at = time.monotonic() + _REOPEN_AFTER_S
        return why

    def is_open(self) -> bool:
        """Say whether the descriptor is still our file.

        A program may close every descriptor that it does not know, and the number may then belong
        to a file of its own.
        """
        if self.fd < 0:
            return False
        try:
            found = os.fstat(self.fd)
        except OSError:
            self.fd = -1
            return False
        is_ours = (found.st_dev, found.st_ino) == self._identity
        if is_ours and found.st_nlink:
            return True
        if is_ours:
            self.release()
        self.fd = -1
        return False

    def may_open(self) -> bool:
        """Say whether the last failure is long enough ago to try again."""
        return time.monotonic() >= self._next_open_at

    def size(self) -> int:
        """Return how many bytes all processes have written."""
        return os.fstat(self.fd).st_size

    def write(self, line: bytes) -> str:
        """Write one line and return why that failed, nothing when it did not.

        What a short write left behind is ended by the newline before the next line.
        """
        data = b"\n" + line if self._is_line_torn else line
        try:
            written = os.write(self.fd, data)
        except OSError as error:
            return error.strerror or type(error).__name__
        self._is_line_torn = written < len(data)
        return "short write" if self._is_line_torn else ""

    def release(self) -> None:
        """Close the descriptor if it is still ours."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) == self._identity:
                os.close(fd)
        except OSError:
            return  # somebody else closed it: nothing is left to do

    def _open_new(self) -> int:
        first_id = self.launch_id
        for number in range(2, 100):
            try:
                return self._make()
            except FileExistsError:
                self.launch_id = f"{first_id[: _NAME_LIMIT - 3]}.{number}"
        raise FileExistsError(errno.EEXIST, f"too many files of launch {first_id}")

    def _open_existing(self) -> int:
        try:
            return os.open(self.path, _FLAGS)
        except FileNotFoundError:
            pass
        try:
            return self._make()
        except FileExistsError:
            return os.open(self.path, _FLAGS)

    def _make(self) -> int:
        """Make the file with its header, or leave neither a file nor a descriptor behind."""
        fd = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._write_header(fd)
        except BaseException:
            # Who opened it meanwhile notices that it has no name any more and opens it anew.
            os.close(fd)
            os.unlink(self.path)
            raise
        return fd

    def _write_header(self, fd: int) -> None:
        header = self._header()
        if os.write(fd, header) < len(header):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _header(self) -> bytes:
        from nvidia_resiliency_ext.shared_utils import procfs

        return encode_line(
            {
                "kind": "header",
                "schema": SCHEMA,
                "host": self.host,
                "launch_id": self.launch_id,
                "job_id": self._job_id,
                "boot_id": procfs.boot_id() or None,
                "clock": {"wall": time.time(), "mono": time.monotonic()},
                "versions": self._versions,
            }
        )
