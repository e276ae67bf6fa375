# SPDX-License-Identifier: Apache-2.0
"""Owns one open log with the ledger beside it: opening, repair after a crash, appending a batch.

Every error leaves the object unusable: close it and open again, which repairs what was half done.
One thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel import ledger
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, lock_file, open_append_beneath

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nvidia_resiliency_ext.shared_utils._funnel.places import Place, Roots

__all__ = ["IOV_MAX", "LogFile", "Piece", "StaleLogError"]

Piece = memoryview | bytes | bytearray

IOV_MAX = 1024
# The page cache takes as large blocks as one write asks for, and large blocks are the ones that a
# virtual machine has given back to its host: each then costs several times what copying does.
_WRITE_BYTES = 128 << 10
_LEDGER_MODE = 0o600
_COMPACT_ABOVE_BYTES = 256 << 10
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


class StaleLogError(OSError):
    """The open log has been removed; under its name is another file or none."""


class LogFile:
    """A log that this server appends to, locked against other servers.

    Attributes:
        seqs: The last number of each stream that is in the log.
        ends_line: The log is empty or its last byte is a newline.
        last_stream: Who wrote the last bytes, where that is known.
    """

    def __init__(self, roots: Roots, place: Place) -> None:
        self._directory, self._log = roots.open(place)
        self._ledger = -1
        self._ledger_bytes = 0
        self._compact_above = _COMPACT_ABOVE_BYTES
        self._name = ledger.ledger_name(place.names[-1])
        self.seqs: dict[str, int] = {}
        self.last_stream: str | None = None
        self.ends_line = True
        try:
            _lock(self._log)
            self._recover()
        except BaseException:
            # Nothing is swallowed; only the descriptors go.
            self.close()
            raise

    def append(
        self,
        buffers: Sequence[Piece],
        seqs: Mapping[str, int],
        *,
        sync: bool,
    ) -> None:
        """Write a batch, whole or not at all.

        Args:
            buffers: At most IOV_MAX pieces.
            seqs: What the log holds once they are written; the stream that writes last, last.
            sync: Wait until a power cut could not lose it.

        Raises:
            StaleLogError: The log has been removed.
            OSError: It cannot be written.
        """
        status = os.fstat(self._log)
        if status.st_nlink == 0:
            raise StaleLogError(errno.ESTALE, "the log has been removed")
        start = status.st_size
        size = sum(map(len, buffers))
        if seqs:
            self._note(start, start + size, seqs, sync=sync)
        try:
            self._write(buffers)
            if sync:
                os.fdatasync(self._log)
        except OSError:
            # Where this fails too, opening again does it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._log, start)
            raise
        ledger.merge(self.seqs, seqs)
        if self._ledger_bytes > self._compact_above:
            self._compact(start + size)

    def sync(self) -> None:
        """Wait until a power cut could not lose what was written."""
        os.fdatasync(self._log)

    def close(self) -> None:
        """Close both files; harmless when repeated."""
        for descriptor in (self._ledger, self._log, self._directory):
            if descriptor >= 0:
                # Network file systems report late errors here; the data is not ours any more.
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._ledger = self._log = self._directory = -1

    def _write(self, buffers: Sequence[Piece]) -> None:
        for group in _groups(buffers):
            written = os.writev(self._log, group)
            if written == sum(map(len, group)):
                continue
            # Only a full disk or a limit stops in the middle; the rest then gives the reason.
            rest = memoryview(b"".join(group))[written:]
            while rest:
                count = os.write(self._log, rest)
                if count == 0:
                    raise OSError(errno.EIO, "the log takes no more bytes")
                rest = rest[count:]

    def _note(self, start: int, end: int, seqs: Mapping[str, int], *, sync: bool) -> None:
        if self._ledger < 0:
            self._ledger = open_append_beneath(self._directory, self._name, _LEDGER_MODE)
        record = ledger.encode(start, end, seqs)
        if os.write(self._ledger, record) != len(record):
            # What stands there is no record; nothing behind it may be glued to it.
            os.ftruncate(self._ledger, self._ledger_bytes)
            raise OSError(errno.ENOSPC, "no room for the ledger")
        self._ledger_bytes += len(record)
        if sync:
            os.fdatasync(self._ledger)

    def _recover(self) -> None:
        size = os.fstat(self._log).st_size
        data = self._read_ledger()
        if data is not None:
            found = ledger.read_ledger(data, size)
            if found.cut_log_to is not None:
                os.ftruncate(self._log, found.cut_log_to)
                size = found.cut_log_to
            # Only now: a ledger that was cut first would hide that the log must be.
            if found.cut_ledger_to is not None:
                os.ftruncate(self._ledger, found.cut_ledger_to)
                self._ledger_bytes = found.cut_ledger_to
            self.seqs, self.last_stream = found.seqs, found.last_stream
        if size:
            descriptor = os.open(
                f"/proc/self/fd/{self._log}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )
            try:
                self.ends_line = os.pread(descriptor, 1, size - 1) == b"\n"
            finally:
                os.close(descriptor)

    def _read_ledger(self) -> bytes | None:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._name, flags, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > ledger.MAX_BYTES:
                raise OSError(errno.EINVAL, f"{self._name} is no ledger of this log")
            data = file.readall()
        self._ledger = open_append_beneath(self._directory, self._name, _LEDGER_MODE)
        self._ledger_bytes = len(data)
        return data

    def _compact(self, log_size: int) -> None:
        record = ledger.encode_all(log_size, self.seqs)
        self._compact_above = max(_COMPACT_ABOVE_BYTES, 4 * len(record))
        path = f"/proc/self/fd/{self._directory}/{self._name}"
        try:
            atomic_write(path, record, _LEDGER_MODE, fsync=False)
        except OSError:
            # The old ledger is as good as before, only longer; the batch is in the log.
            self._compact_above = min(2 * self._ledger_bytes, ledger.MAX_BYTES // 2)
            return
        os.close(self._ledger)
        self._ledger, self._ledger_bytes = -1, len(record)


def _groups(buffers: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in groups of at most _WRITE_BYTES, parts of large ones by themselves."""
    group: list[Piece] = []
    size = 0
    for piece in buffers:
        if group and size + len(piece) > _WRITE_BYTES:
            yield group
            group, size = [], 0
        if len(piece) > _WRITE_BYTES:
            whole = memoryview(piece)
            for start in range(0, len(piece), _WRITE_BYTES):
                yield [whole[start : start + _WRITE_BYTES]]
        else:
            group.append(piece)
            size += len(piece)
    if group:
        yield group


def _lock(descriptor: int) -> None:
    """Keep other servers from the log: what one has cut back, another may be writing."""
    try:
        lock_file(descriptor)
    except BlockingIOError:
        raise OSError(errno.EAGAIN, "another log server writes this file") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
