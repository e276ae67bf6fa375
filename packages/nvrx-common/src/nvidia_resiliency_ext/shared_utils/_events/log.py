# SPDX-License-Identifier: Apache-2.0
"""The writing of events: what is recorded, what is dropped, and that a file may be full.

Nothing here raises into the program that is being recorded: what cannot be written is counted,
one warning says so, and a ``dropped`` event tells about it as soon as writing works again. There
is no lock, so a fork or a signal handler in the middle of ``record`` cannot block anybody.
"""

from __future__ import annotations

import os
import time

from .file import NodeFile, encode_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .kinds import Event


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
        self._is_closed = False
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
        log._open(is_new=True)
        return log

    @classmethod
    def join(cls, *, src: str) -> EventLog:
        """Continue the file of this node from another process, as program `src` (such as `ckpt`).

        The environment says which one: ``NVRX_EVENT_DIR``, ``NVRX_LAUNCH_ID`` and, where the
        launcher calls the node by another name than the kernel does, ``NVRX_EVENT_HOST``. Without
        the first nothing is recorded (``NULL_EVENTS``). Without the second another launcher has
        started this process; its children share a file.
        """
        directory = os.environ.get("NVRX_EVENT_DIR")
        if not directory:
            return NULL_EVENTS
        launch_id = os.environ.get("NVRX_LAUNCH_ID") or _launch_of_parent()
        host = os.environ.get("NVRX_EVENT_HOST") or os.uname().nodename
        log = cls(NodeFile(directory, host=host, launch_id=launch_id), src)
        log._open(is_new=False)
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
        """How many events this process could not write so far."""
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
            event: What happened.
            cycle: The launcher's cycle, None outside any.
            rank: The global rank that it happened to, None when it is not about one rank.
            t: Wall time in seconds, default now. Give it, or ``m``, for something noticed late:
                one follows from the other.
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
        """Tell what was dropped and close the file; later events are ignored."""
        if self._dropped_count and self._is_usable():
            self._record_dropped()
        self._is_closed = True
        self._file.close()

    def _append(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._is_closed:
            return
        try:
            line = encode_line(fields)
        except Exception as error:  # noqa: BLE001 - a foreign object's __str__ may do anything
            self._drop(0, f"not writable as text: {type(error).__name__}")
            return
        if not self._is_usable():
            self._drop(len(line), self._dropped_why or "no file")
            return
        size = self._file.size
        if size + len(line) > self.max_bytes and not self._passes_limit(kind, size):
            self._drop(len(line), "file limit reached")
            return
        if self._dropped_count and size < self.max_bytes:
            self._record_dropped()
        failure = self._file.write(line)
        if failure:
            self._drop(len(line), failure)

    def _passes_limit(self, kind: str, size: int) -> bool:
        """Say whether a full file still takes this kind; the first time, note that it is full."""
        if not self._has_logged_limit:
            self._has_logged_limit = True
            self._warn(f"{self.path} is full ({self.max_bytes} bytes)")
            self._write_dropped(0, 0, "file limit reached: essential kinds only")
        return kind in _ESSENTIAL_KINDS and size < 2 * self.max_bytes

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

    def _is_usable(self) -> bool:
        """Say whether the file can be written; open it again where that is due."""
        if self._file.is_open():
            return True
        if not self._file.may_open():
            return False
        self._open(is_new=False)
        return self._file.fd >= 0

    def _open(self, *, is_new: bool) -> None:
        why = self._file.open(is_new=is_new)
        if why:
            self._dropped_why = why
            self._warn(f"no events are recorded in {self.path}: {why}")


def _launch_of_parent() -> str:
    """Return what the processes have in common that one program has started on this node."""
    from nvidia_resiliency_ext.shared_utils import procfs

    pid = os.getppid()
    parent = procfs.read_stat(pid)
    return f"p{pid}" if parent is None else f"p{pid}-{parent.start_ticks}"


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

    def close(self) -> None:
        """Do nothing."""


NULL_EVENTS: EventLog = _NullEventLog()
