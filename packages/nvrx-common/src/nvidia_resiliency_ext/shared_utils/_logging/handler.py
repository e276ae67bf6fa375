# SPDX-License-Identifier: Apache-2.0
"""The handler that writes a process's files, and its records as text."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import sys
import time
from functools import lru_cache
from typing import ClassVar

_LINE_BREAKS = (0x2028, 0x2029)  # some programs end a line there
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), *_LINE_BREAKS)
_ESCAPES: dict[int, str] = {code: ascii(chr(code))[1:-1] for code in _CONTROLS}
_ESCAPES[ord("\t")] = "\t"
# A record's further lines begin with a tab, and a line that begins a record never does.
_ESCAPES[ord("\n")] = "\n\t"


def guarded(text: str) -> str:
    """Return the text of a record with its line breaks marked and control characters escaped."""
    return text if text.isprintable() else text.translate(_ESCAPES)


# Everything of a line before its message, as a regular expression with named groups.
LINE_HEAD = (
    r"(?: *(?:\d+|\?): )?"
    r"(?P<asctime>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})"
    r" \[(?P<levelname>[^\]\s]+(?: \d+)?)\]"
    r" \[(?P<hostname>[^\]\n]*)\]"
    r" \[workload:(?P<workload_rank>\d+|\?)\((?P<workload_local_rank>\d+|\?)\)"
    r" infra:(?P<infra_rank>\d+|\?)\((?P<infra_local_rank>\d+|\?)\)\]"
    r" (?P<filename>[^:\n]+):(?P<lineno>\d+) "
)
_PARTS = ((0, 4), (5, 7), (8, 10), (11, 13), (14, 16), (17, 19))
_RANGES = ((1, 12), (1, 31), (0, 23), (0, 59), (0, 60))  # month, day, hour, minute, second


class LogMessage:
    """A line of a log taken apart.

    Attributes:
        log_message: The line as given.
        log_message_valid: Whether it has the form of the nvrx log.
        hash_table: The named groups of ``log_pattern``, with ``asctime`` in milliseconds since
            the epoch; empty when the line is not valid.

    Example:
        >>> line = "2026-01-02 03:04:05,678 [INFO] [n1] [workload:0(0) infra:?(?)] a.py:1 hello"
        >>> LogMessage(line).hash_table["message"]
        'hello'
    """

    log_pattern: ClassVar[re.Pattern[str]] = re.compile(LINE_HEAD + r"(?P<message>.*)", re.DOTALL)

    def __init__(self, log_message: str) -> None:
        self.log_message = log_message
        self.hash_table: dict[str, str | int] = {}
        match = self.log_pattern.match(log_message)
        self.log_message_valid = False
        if match is None:
            return
        asctime = match["asctime"]
        second = seconds_of(asctime[:-4])
        if second is not None:
            self.hash_table = {**match.groupdict(), "asctime": second * 1000 + int(asctime[-3:])}
            self.log_message_valid = True

    def getts(self) -> int:
        """Return the time in milliseconds since the epoch, 0 when the line is not valid."""
        return int(self.hash_table.get("asctime", 0))

    def __str__(self) -> str:
        """Return the line as given."""
        return self.log_message


@lru_cache(maxsize=4096)
def seconds_of(text: str | bytes, *, is_utc: bool = False) -> int | None:
    """Return ``YYYY-MM-DD?HH:MM:SS``, local or UTC, in seconds since the epoch; else None."""
    year, *given = (int(text[at:end]) for at, end in _PARTS)
    if not all(low <= part <= high for part, (low, high) in zip(given, _RANGES, strict=True)):
        return None
    try:
        if is_utc:
            from calendar import timegm  # it loads much, which a rank that only logs never needs

            return timegm((year, *given, 0, 0, 0))
        month, day, hour, minute, second = given
        return int(time.mktime((year, month, day, hour, minute, second, 0, 0, -1)))
    except (OverflowError, ValueError):
        return None


def line_format(
    node: str, workload: tuple[int | None, int | None], infra: tuple[int | None, int | None]
) -> str:
    """Return the format of a text line of this process; what never changes is part of it."""
    workload_rank, workload_local_rank = map(_shown, workload)
    infra_rank, infra_local_rank = map(_shown, infra)
    name = node.replace("%", "%%")
    return (
        f"%(asctime)s [%(levelname)s] [{name}]"
        f" [workload:{workload_rank}({workload_local_rank})"
        f" infra:{infra_rank}({infra_local_rank})]"
        " %(filename)s:%(lineno)d %(message)s"
    )


class TextLineFormatter(logging.Formatter):
    """Formats as the standard library does, without computing the same second again."""

    # Second and its text: most records share their second with the one before. One tuple, so that
    # threads never see the text of another second.
    _second: tuple[int, str] = (-1, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the standard library's name
        """Return the local time of `record`: by `datefmt` (of `strftime`) or with milliseconds."""
        if datefmt:
            return super().formatTime(record, datefmt)
        second = int(record.created)
        known, text = self._second
        if known != second:
            text = time.strftime("%Y-%m-%d %H:%M:%S", self.converter(second))
            self._second = (second, text)
        return f"{text},{int(record.msecs):03d}"


class DynamicLogFormatter(TextLineFormatter):
    """Gives each record the four ranks of its process before formatting it.

    Args:
        workload_rank: Global rank of the worker, None when unknown (shown as ``?``).
        workload_local_rank: The worker's rank on its node.
        infra_rank: Rank of the launcher.
        infra_local_rank: The launcher's rank on its node.
        fmt: Format as of ``logging.Formatter``; may name the four arguments above as fields.
        datefmt: Format of the time as of ``logging.Formatter``.
    """

    def __init__(
        self,
        workload_rank: int | None = None,
        workload_local_rank: int | None = None,
        infra_rank: int | None = None,
        infra_local_rank: int | None = None,
        fmt: str | None = None,
        datefmt: str | None = None,
    ) -> None:
        super().__init__(fmt=fmt, datefmt=datefmt)
        self._ranks = {
            "workload_rank": _shown(workload_rank),
            "workload_local_rank": _shown(workload_local_rank),
            "infra_rank": _shown(infra_rank),
            "infra_local_rank": _shown(infra_local_rank),
        }

    def format(self, record: logging.LogRecord) -> str:
        """Return `record` as text."""
        record.__dict__.update(self._ranks)
        return super().format(record)


class JsonLineFormatter(logging.Formatter):
    """Makes one JSON object per record: ts, level, node, ranks, cycle, file, line, msg, exc.

    ``cycle`` is the record's own (``extra={"cycle": 3}``) where it has one.
    """

    def __init__(self, node: str, ranks: dict[str, int | None], cycle: int | None) -> None:
        super().__init__()
        self._node = node
        self._ranks = ranks
        self._cycle = cycle

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "ts": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "node": self._node,
            "ranks": self._ranks,
            "cycle": getattr(record, "cycle", self._cycle),
            "file": record.filename,
            "line": record.lineno,
            "msg": record.getMessage(),
            "exc": self.formatException(record.exc_info) if record.exc_info else record.exc_text,
        }
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields, separators=(",", ":"), default=str)


def _shown(rank: int | None) -> str:
    return "?" if rank is None else str(rank)


def open_log_directory(path: str, *, must_be_ours: bool = True) -> int:
    """Open the directory, which is made with mode 0700 when it is missing."""
    from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError
    from nvidia_resiliency_ext.shared_utils.os_utils import validate_directory

    os.makedirs(path, mode=0o700, exist_ok=True)
    validate_directory(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    owner = os.fstat(descriptor).st_uid
    if must_be_ours and owner != os.geteuid():
        os.close(descriptor)
        raise UnsafePathError(errno.EPERM, f"the directory belongs to uid {owner}", path)
    return descriptor


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
        """Write one `record`."""
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
        dropped = 0
        if len(times) > self.max_backup_files:
            from .journal import remove_old

            names = [f"{self._stem}{file_time}" for file_time in times]
            dropped = remove_old(names, self.max_backup_files, directory)
        self._open(max(int(time.time() * 1000), newest + 1), directory)
        if dropped:
            self._dropped_count += dropped
            text, arguments = "%d log records dropped", (self._dropped_count,)
            complaint = logging.LogRecord(
                "nvrx", logging.WARNING, __file__, 0, text, arguments, None
            )
            self._append(self._bytes_of(complaint))

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
