# SPDX-License-Identifier: Apache-2.0
"""The writing of events: lines of JSON, the file of a node, what is dropped when it is full.

An event is one line, at most ``LINE_LIMIT`` bytes long. Nothing here raises into the program that
is being recorded: what cannot be written is counted, one warning says so, and a ``dropped`` event
tells about it as soon as writing works again. No lock is held while a line is written, so a fork
or a signal handler in the middle of ``record`` cannot block anybody.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from _thread import allocate_lock  # of what `threading` has, all that is needed at every import
from collections.abc import Mapping
from math import isfinite

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .kinds import Event

LINE_LIMIT = 4096  # the size up to which an append is one piece on every file system we know
_SHORTEST_CUT = 16
_DEEPEST = 6


def encode_line(fields: Mapping[str, object]) -> bytes:
    """Return ``fields`` as one line, cut at the limit; what JSON does not know becomes text."""
    try:
        line = _ENCODER.encode(fields)
    except (ValueError, TypeError, RecursionError):
        line = ""
    if not line or len(line) >= LINE_LIMIT:
        sized = {str(name): _plain(value, 0) for name, value in fields.items()}
        # Halve the longest value until the line fits; numbers and short values stay whole.
        while len(line := _ENCODER.encode(sized)) >= LINE_LIMIT:
            longest = max(sized, key=lambda name: len(_ENCODER.encode(sized[name])))
            sized[longest] = _halved(sized[longest])
    return line.encode("ascii") + b"\n"


def _halved(value: object) -> object:
    """Return about half of ``value`` with a marker that says that something is missing."""
    if isinstance(value, str):
        kept, _, cut = value.rpartition(" ...[cut ")
        already = int(cut[:-1]) if kept and cut[:-1].isdigit() else 0
        text = kept if already else value
        keep = len(text) // 2
        if keep < _SHORTEST_CUT:
            return "...[cut]"
        return f"{text[:keep]} ...[cut {len(text) - keep + already}]"
    if isinstance(value, list) and len(value) > 1:
        items = [item for item in value if item != "...[cut]"]
        return [*items[: len(items) // 2], "...[cut]"]
    if isinstance(value, dict) and len(value) > 1:
        names = [name for name in value if name != "...[cut]"]
        return {**{name: value[name] for name in names[: len(names) // 2]}, "...[cut]": True}
    return "...[cut]"


def _plain(value: object, depth: int) -> object:
    """Return ``value`` made of JSON's own types only."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if depth >= _DEEPEST:
        return "...[cut]"
    if isinstance(value, dict):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return _foreign(value)


def _foreign(value: object) -> object:
    """Return a number where ``value`` is one (of numpy, of torch), else its text."""
    if hasattr(value, "__index__"):
        return int(value.__index__())
    if hasattr(value, "__float__"):
        number = float(value.__float__())
        return number if isfinite(number) else str(number)
    return str(value)


_ENCODER = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, check_circular=False, default=_foreign
)

SCHEMA = "nvrx_events.v1"
_REOPEN_AFTER_S = 5.0
_LOCK_S = 1.0
_NAME_LIMIT = 64
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def _name_part(text: str) -> str:
    """Return ``text`` as a piece of a file name: no separators, no leading dot, bounded."""
    kept = "".join(ch if ch.isascii() and (ch.isalnum() or ch in "._-") else "_" for ch in text)
    return kept.lstrip(".")[:_NAME_LIMIT] or "unknown"


# What stands at the descriptor: our file, our file without a name, or nothing of ours.
_OURS, _REMOVED, _FOREIGN = range(3)


class NodeFile:
    """One append-only file of a host and a launch; any number of processes have it open."""

    def __init__(
        self,
        directory: str,
        *,
        host: str,
        launch_id: str,
        job_id: str | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the file without opening it."""
        self.directory = directory
        self.host = host
        self.launch_id = launch_id
        self.fd = -1
        self.size = 0  # bytes that all processes had written when it was last looked at
        self._job_id = job_id
        self._versions = dict(versions or {})
        self._identity = (0, 0)
        self._lock = allocate_lock()
        self.is_closed = False
        self._is_line_torn = False
        self._next_open_at = 0.0
        self._why = ""

    @property
    def path(self) -> str:
        name = f"events-{_name_part(self.host)}-{_name_part(self.launch_id)}.jsonl"
        return os.path.join(self.directory, name)

    def open(self, *, is_new: bool) -> str:
        """Open the file unless it is open, and return why that failed; tries are 5 s apart.

        A new file gets another ``launch_id`` where one of that name is there already.
        """
        if self._look() == _OURS:
            return ""
        # Not for ever: a fork may have copied a lock that was held.
        if not self._lock.acquire(timeout=_LOCK_S):
            return "another thread holds it"
        try:
            if self.is_closed:
                return "it is closed"
            # Looked at once more, now that no other thread changes anything.
            state = self._look()
            if state == _OURS:
                return ""
            self._let_go(state)
            if time.monotonic() >= self._next_open_at:
                self._why = self._open(is_new=is_new)
            return self._why
        finally:
            self._lock.release()

    def _open(self, *, is_new: bool) -> str:
        fd = -1
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            fd = self._find_or_make(is_new=is_new)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "not a regular file of this user")  # noqa: TRY301
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._next_open_at = time.monotonic() + _REOPEN_AFTER_S
            return error.strerror or type(error).__name__
        self._identity = (found.st_dev, found.st_ino)
        self.fd = fd
        return ""

    def close(self) -> None:
        self.is_closed = True
        if self._lock.acquire(timeout=_LOCK_S):
            try:
                self._let_go(self._look())
            finally:
                self._lock.release()

    def _let_go(self, state: int) -> None:
        if state != _FOREIGN:
            os.close(self.fd)
        self.fd = -1

    def _look(self) -> int:
        """Return whose file the descriptor is: a program may have closed and reused the number."""
        if self.fd < 0:
            return _FOREIGN
        try:
            found = os.fstat(self.fd)
        except OSError:
            return _FOREIGN
        if (found.st_dev, found.st_ino) != self._identity:
            return _FOREIGN
        self.size = found.st_size
        return _OURS if found.st_nlink else _REMOVED

    def write(self, line: bytes) -> str:
        """Write one line, after ending a torn one; return the reason of a failure, or ''."""
        data = b"\n" + line if self._is_line_torn else line
        try:
            written = os.write(self.fd, data)
        except OSError as error:
            return error.strerror or type(error).__name__
        self._is_line_torn = written < len(data)
        return "short write" if self._is_line_torn else ""

    def _find_or_make(self, *, is_new: bool) -> int:
        first_id = self.launch_id
        for number in range(2, 100):
            if not is_new:
                try:
                    return os.open(self.path, _FLAGS)
                except FileNotFoundError:
                    pass
            try:
                return self._make()
            except FileExistsError:
                if is_new:
                    self.launch_id = f"{first_id[: _NAME_LIMIT - 3]}.{number}"
        raise FileExistsError(errno.EEXIST, f"too many files of launch {first_id}")

    def _make(self) -> int:
        """Make the file with its header, or leave neither a file nor a descriptor behind."""
        from nvidia_resiliency_ext.shared_utils import procfs

        header = encode_line(
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
        fd = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if os.write(fd, header) < len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 - as of `write`
        except BaseException:
            # Who opened it meanwhile notices that it has no name any more and opens it anew.
            os.close(fd)
            os.unlink(self.path)
            raise
        return fd


MAX_FILE_BYTES = 64 * 1024 * 1024
# What is still written when the file is full; at twice the limit nothing is.
_ESSENTIAL_KINDS = frozenset(
    {"fault", "cycle_start", "cycle_end", "job_start", "job_end", "dropped"}
)
_FIELD_NAMES: dict[type[Event], tuple[str, ...]] = {}


class EventLog:
    """The events of one node, written by one process of it.

    Every process of a node appends whole lines to the same file with one system call each. The
    object may be used from any thread and goes on working in a forked child. Writing stops at
    ``max_bytes`` except for faults, cycles and the job's start and end.

    Example:
        >>> from nvidia_resiliency_ext.shared_utils.events import EventLog, Fault
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     log = EventLog.create(
        ...         directory, src="launcher", job_id="7", launch_id="a1", host="node1"
        ...     )
        ...     log.record(Fault(cause="killed", what="signal 9"), cycle=0, rank=3)
        ...     log.close()
    """

    enabled = True

    def __init__(self, file: NodeFile, src: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Describe a log of program `src` without opening `file`; use ``create`` or ``join``."""
        self.src = src
        self.max_bytes = max_bytes
        self._file = file
        self._has_warned = False
        self._has_logged_limit = False
        self._dropped_count = 0
        self._dropped_bytes = 0
        self._dropped_why = ""
        self._all_dropped_count = 0

    @classmethod
    def create(  # noqa: PLR0913 - what a file of events says about itself
        cls,
        directory: str | os.PathLike[str],
        *,
        src: str,
        job_id: str | None,
        launch_id: str,
        host: str,
        versions: Mapping[str, str] | None = None,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> EventLog:
        """Start the file of this node and launch and write its header line.

        A file of the same host and launch that is there already is never continued: this launch
        then gets a number behind its id (see the attribute ``launch_id``). A directory that
        cannot be written gives one warning and a log that tries again later.

        Args:
            directory: Where the file is; made with mode 0700 when missing.
            src: Who writes: launcher, monitor, rank, wrapper, ckpt, straggler or attribution.
            job_id: The scheduler's job; None if there is none.
            launch_id: Unique for this launcher; part of the file's name.
            host: Name of the node; part of the file's name.
            versions: Versions worth knowing later, by distribution; for the header.
            max_bytes: Size of the file from which only the most important events are written.
        """
        file = NodeFile(
            os.fspath(directory), host=host, launch_id=launch_id, job_id=job_id, versions=versions
        )
        log = cls(file, src, max_bytes)
        log._is_usable(is_new=True)
        return log

    @classmethod
    def join(cls, *, src: str) -> EventLog:
        """Continue the file of this node from another process, as program `src` (such as `ckpt`).

        The environment says which one: ``NVRX_EVENT_DIR``, ``NVRX_LAUNCH_ID`` and, where the
        launcher calls the node by another name than the kernel does, ``NVRX_EVENT_HOST``. Without
        the first nothing is recorded (``NULL_EVENTS``). Without the second another launcher has
        started this process; its children share a file.
        """
        if not (directory := os.environ.get("NVRX_EVENT_DIR")):
            return NULL_EVENTS
        launch_id = os.environ.get("NVRX_LAUNCH_ID")
        if not launch_id:
            from nvidia_resiliency_ext.shared_utils import procfs

            # What the processes have in common that one program has started on this node.
            pid = os.getppid()
            parent = procfs.read_stat(pid)
            launch_id = f"p{pid}" if parent is None else f"p{pid}-{parent.start_ticks}"
        host = os.environ.get("NVRX_EVENT_HOST") or os.uname().nodename
        log = cls(NodeFile(directory, host=host, launch_id=launch_id), src)
        log._is_usable()
        return log

    @property
    def path(self) -> str:
        """Path of the file."""
        return self._file.path

    @property
    def launch_id(self) -> str:
        """The launch in the file's name; not the given one where that was taken already."""
        return self._file.launch_id

    @property
    def dropped_count(self) -> int:
        """Number of events that this process could not write."""
        return self._all_dropped_count

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which a child's `join` finds this file."""
        given = {
            "NVRX_EVENT_DIR": os.path.abspath(self._file.directory),
            "NVRX_LAUNCH_ID": self.launch_id,
        }
        if self._file.host != os.uname().nodename:
            given["NVRX_EVENT_HOST"] = self._file.host
        return given

    def record(
        self,
        event: Event,
        *,
        cycle: int | None,
        rank: int | None = None,
        t: float | None = None,
        m: float | None = None,
    ) -> None:
        """Append one event.

        Args:
            event: The event.
            cycle: The launcher's cycle; None outside of all cycles.
            rank: The global rank of the event; None if it is not about one rank.
            t: Wall time in seconds, default now. For an event detected late pass it or ``m``.
            m: Monotonic time in seconds, default now.
        """
        if t is None and m is None:
            t, m = time.time(), time.monotonic()
        elif m is None:
            m = time.monotonic() - (time.time() - t)  # type: ignore[operator]
        elif t is None:
            t = time.time() - (time.monotonic() - m)
        fields = self._common(event.kind, t, m, cycle, rank)
        kind = type(event)
        names = _FIELD_NAMES.get(kind)
        if names is None:
            names = _FIELD_NAMES[kind] = kind.field_names()
        for name in names:
            value = getattr(event, name)
            if value is not None:
                fields[name] = value
        self._append(event.kind, fields)

    def close(self) -> None:
        """Record the number of dropped events and close the file; later events are ignored."""
        if self._dropped_count and self._is_usable():
            self._record_dropped()
        self._file.close()

    def _append(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._file.is_closed:
            return
        try:
            line = encode_line(fields)
        except Exception as error:  # noqa: BLE001 - a foreign object's __str__ may do anything
            self._drop(0, f"not writable as text: {type(error).__name__}")
            return
        if not self._is_usable():
            self._drop(len(line), self._dropped_why)
            return
        size = self._file.size
        if size + len(line) > self.max_bytes:
            if not self._has_logged_limit:
                self._has_logged_limit = True
                self._warn(f"{self.path} is full ({self.max_bytes} bytes)")
                self._write_dropped(0, 0, "file limit reached: essential kinds only")
            if kind not in _ESSENTIAL_KINDS or size >= 2 * self.max_bytes:
                self._drop(len(line), "file limit reached")
                return
        if self._dropped_count and size < self.max_bytes:
            self._record_dropped()
        failure = self._file.write(line)
        if failure:
            self._drop(len(line), failure)

    def _common(
        self, kind: str, t: float | None, m: float | None, cycle: int | None, rank: int | None
    ) -> dict[str, object]:
        common: dict[str, object] = {"t": t, "m": m, "kind": kind, "src": self.src, "cycle": cycle}
        return common | {"rank": rank, "pid": os.getpid()}

    def _write_dropped(self, count: int, size: int, why: str) -> str:
        fields = self._common("dropped", time.time(), time.monotonic(), None, None)
        return self._file.write(encode_line(fields | {"count": count, "bytes": size, "why": why}))

    def _record_dropped(self) -> None:
        count, size = self._dropped_count, self._dropped_bytes
        if not self._write_dropped(count, size, self._dropped_why):
            self._dropped_count -= count
            self._dropped_bytes -= size

    def _drop(self, size: int, why: str) -> None:
        self._dropped_count += 1
        self._all_dropped_count += 1
        self._dropped_bytes += size
        self._dropped_why = why
        self._warn(f"events are being dropped, cannot write {self.path}: {why}")

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            import logging

            logging.getLogger("nvrx").warning("%s", message)

    def _is_usable(self, *, is_new: bool = False) -> bool:
        """Return whether the file can be written; open it again where that is due."""
        why = self._file.open(is_new=is_new)
        if why:
            self._dropped_why = why
            self._warn(f"no events are recorded in {self.path}: {why}")
        return not why


class _NullEventLog(EventLog):
    """Takes everything, keeps nothing."""

    enabled = False

    def __init__(self) -> None:
        super().__init__(NodeFile("", host="", launch_id=""), "")

    def record(
        self,
        event: Event,
        *,
        cycle: int | None,
        rank: int | None = None,
        t: float | None = None,
        m: float | None = None,
    ) -> None:
        """Do nothing; parameters by name cost less than collecting them."""

    def environment(self) -> dict[str, str]:
        """Return nothing: there is no file to find."""
        return {}


NULL_EVENTS: EventLog = _NullEventLog()
