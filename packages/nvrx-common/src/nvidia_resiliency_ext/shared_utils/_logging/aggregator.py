# SPDX-License-Identifier: Apache-2.0
"""The aggregator: it merges records into one file; one at a time works in a directory."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.directory_notices import DirectoryNotices
from nvidia_resiliency_ext.shared_utils.errors import DirectoryBusyError
from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp
from nvidia_resiliency_ext.shared_utils.os_utils import open_append_beneath
from nvidia_resiliency_ext.shared_utils.procfs import boot_id

from .handler import open_log_directory
from .journal import Batch, Position, PositionFile
from .reader import Read, Source, Sources, render, take

_log = logging.getLogger("nvrx")

_NAME = ".nvrx_log_aggregator.lock"


class DirectoryLock:
    """Held from construction to ``close``.

    The kernel's lock belongs to the process and not to its forked children, who would otherwise
    hold it after our death. It says nothing within a process: the set does.
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
        with self._guard:
            self._held.discard(self._key)
            os.close(self._fd)


class Output:
    """A file that is appended to; it may be renamed or removed at any time."""

    def __init__(self, directory: int, name: str) -> None:
        self._directory = directory
        self._name = name
        self._left = b""
        self._fd = open_append_beneath(directory, name)

    @property
    def is_behind(self) -> bool:
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
        """Write bytes; those that cannot be written are kept for ``flush``."""
        self._left += data
        self.flush()

    def flush(self) -> None:
        while self._left:
            self._left = self._left[os.write(self._fd, self._left) :]

    def bytes_at(self, inode: int, start: int, length: int) -> bytes:
        """Return bytes of the file, none where it is not the one of that inode."""
        if self.place()[0] != inode:
            return b""
        # The descriptor for appending cannot read.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._name, flags, dir_fd=self._directory)
        try:
            return os.pread(fd, length, start)
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self._fd)


_BATCH_BYTES = 8 << 20
_SETTLE_S = 0.1
_ORDER_S = 0.3
_RETRY_S = 1.0
_SIGN_OF_LIFE_S = 10.0
_ALL_TIMES = 1 << 62


@dataclass(frozen=True, slots=True)
class Job:
    """Directory, output and settings of an aggregation; see `NodeLogAggregator`."""

    temp_dir: str
    log_dir: str
    log_file: str
    max_file_size: int
    is_ordered: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a step."""

    taken: int
    again_s: float | None = None  # when the next one is due at the latest; 0 for at once
    is_blocked: bool = False  # nothing can be written: there is no use in trying earlier


class Aggregation:
    """Merges from where an earlier one ended, in one thread; each problem is logged once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._logged: set[str] = set()
        self._targets: dict[int, int] | None = None
        self._boot_id = boot_id()
        with ExitStack() as stack:
            self.directory = open_log_directory(job.temp_dir)
            stack.callback(os.close, self.directory)
            stack.callback(DirectoryLock(self.directory, job.temp_dir).close)
            log_directory = open_log_directory(job.log_dir, must_be_ours=False)
            stack.callback(os.close, log_directory)
            self._output = Output(log_directory, job.log_file)
            stack.callback(self._output.close)
            self._position = PositionFile(self.directory)
            stack.callback(self._position.close)
            if self._position.is_damaged:
                self._complain(
                    f"{job.temp_dir}: the position is damaged: all that is there is merged anew"
                )
            self._sources = Sources(self.directory)
            self._recover()
            if not self._output.is_behind:
                self._write_batch_record(None)
            self._stack = stack.pop_all()

    def step(self, names: Iterable[str] | None, *, is_final: bool = False) -> Step:
        """Merge the present lines; if `names` are given, only those files have changed.

        `is_final` takes what is there at the first such step, and nothing that comes later.
        """
        now_ms = int(time.time() * 1000)  # before looking: what is old enough then is found
        if names is None or (is_final and self._targets is None):
            self._sources.look()
        else:
            self._sources.look_at(names)
        if is_final and self._targets is None:
            self._targets = {each.inode: each.seen_bytes for each in self._sources}
        try:
            if self._output.is_behind:
                self._output.flush()
                self._confirm()
            step = self._merge(now_ms if self._targets is None else _ALL_TIMES)
        except OSError as error:
            self._complain(f"{self._job.log_file}: {error.strerror}: merging of logs waits")
            return Step(0, _RETRY_S, is_blocked=True)
        if step.taken:
            self._logged.clear()
        return step

    def is_moved(self) -> bool:
        """Return whether the directory's path leads to another directory, or nowhere."""
        ours = os.fstat(self.directory)
        try:
            named = os.stat(self._job.temp_dir, follow_symlinks=False)
        except OSError:
            return True
        return (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino)

    def close(self) -> None:
        self._stack.close()

    def _merge(self, now_ms: int) -> Step:
        reads = self._read()
        lengths = take([read for _, read in reads], now_ms=now_ms if self._job.is_ordered else None)
        for (source, read), length in zip(reads, lengths, strict=True):
            # Lines that wait are looked at again; a half line is not, before something comes.
            are_waiting = read.data.rfind(b"\n") >= length
            source.is_hungry = read.has_more or not read.is_settled or are_waiting
        taken = sum(lengths)
        if taken:
            self._append(reads, lengths)
        else:
            self._show_life()
        self._tidy()
        if any(read.has_more for _, read in reads):
            return Step(taken, 0.0)
        is_waiting = any(source.is_hungry for source in self._sources)
        wait_s = _ORDER_S if self._job.is_ordered else _SETTLE_S
        return Step(taken, wait_s if is_waiting else None)

    def _read(self) -> list[tuple[Source, Read]]:
        """Read on in every file in which there may be something new."""
        reads = []
        left = _BATCH_BYTES
        busy_stems = set()
        for source in self._sources.in_turn():
            # A writer's next file comes after the end of the one before.
            if not source.is_hungry or left <= 0 or source.stem in busy_stems:
                continue
            limit = None if self._targets is None else self._targets.get(source.inode, 0)
            try:
                read = self._sources.read(source, limit)
            except OSError as error:
                # One file that cannot be read must not hold up the others.
                source.is_hungry = False
                if isinstance(error, FileNotFoundError):
                    self._sources.forget(source)
                else:
                    self._complain(f"{source.name}: {error.strerror}: it is left out")
                continue
            left -= len(read.data)
            if read.has_more or read.may_be_torn:
                busy_stems.add(source.stem)
            reads.append((source, read))
        return reads

    def _append(self, reads: Sequence[tuple[Source, Read]], lengths: Sequence[int]) -> None:
        sources = [source for source, _ in reads]
        parts = [read.data[:length] for (_, read), length in zip(reads, lengths, strict=True)]
        data = _render(sources, parts, is_ordered=self._job.is_ordered)
        for source, length in zip(sources, lengths, strict=True):
            source.after = source.offset + length
        try:
            self._write_batch_record(Batch.of(data, is_ordered=self._job.is_ordered), sources)
        except OSError:
            for source in sources:
                source.after = source.offset
                source.is_hungry = True
            raise
        self._output.append(data)
        self._confirm()

    def _confirm(self) -> None:
        """Record that the batch is in the output."""
        for source in self._sources:
            source.offset = source.after
        self._write_batch_record(None)

    def _write_batch_record(self, batch: Batch | None, first: Sequence[Source] = ()) -> None:
        """Write the position; the files of a batch come first in it, in the batch's order."""
        inode, size = self._output.place()
        others = [source for source in self._sources if source not in set(first)]
        files = tuple(source.position() for source in (*first, *others))
        position = Position(inode, size, files, batch, self._boot_id, time.monotonic())
        self._position.write(position)

    def _show_life(self) -> None:
        """Let the writers know from time to time that their files are being read."""
        last = self._position.last
        if last is None or time.monotonic() - last.monotonic_s >= _SIGN_OF_LIFE_S:
            self._write_batch_record(None)

    def _tidy(self) -> None:
        """Delete files that are read, full and closed."""
        for source in self._sources:
            is_read = source.offset >= source.size and not source.is_hungry
            is_full = source.size >= self._job.max_file_size
            if is_read and is_full and self._sources.is_over(source):
                self._sources.remove(source)

    def _recover(self) -> None:
        """Append the part of the last batch that is missing in the output after a crash."""
        position = self._position.last
        if position is None:
            self._sources.look()
            return
        self._sources.restore(position)
        batch = position.batch
        if batch is None:
            return
        found = self._output.bytes_at(position.output_inode, position.output_bytes, batch.length)
        if Batch.of(found, is_ordered=batch.is_ordered) != batch:
            # Make it again, and append what the output has not got of it.
            sources = tuple(self._sources)
            parts = [self._sources.reread(source) for source in sources]
            data = _render(sources, parts, is_ordered=batch.is_ordered)
            if Batch.of(data, is_ordered=batch.is_ordered) == batch and data.startswith(found):
                self._append_soon(data[len(found) :])
            else:
                for source in sources:
                    source.after = source.offset
                if found:
                    self._append_soon(b"\n")
        if not self._output.is_behind:
            self._confirm()

    def _append_soon(self, data: bytes) -> None:
        """Append now, or in the first step that can."""
        try:
            self._output.append(data)
        except OSError as error:
            self._complain(f"{self._job.log_file}: {error.strerror}: merging of logs waits")

    def _complain(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _log.warning(message)


def _render(sources: Sequence[Source], parts: Sequence[bytes], *, is_ordered: bool) -> bytes:
    """Return the merged bytes; what one writer has put into several files is one part."""
    joined: dict[str, bytes] = {}
    for source, part in zip(sources, parts, strict=True):
        before = joined.get(source.stem, b"")
        end = b"\n" if before and not before.endswith(b"\n") else b""
        joined[source.stem] = before + end + part
    return render([*joined.values()], is_ordered=is_ordered)


_GAP_S = 0.05
_LOOK_S = 5.0
_LOOK_WITHOUT_NOTICES_S = 0.25


class NodeLogAggregator:
    """Merges the files that the processes of a node log to into one file.

    A record with its lines stays in one piece. Each comes exactly once, also when the process is
    killed and another one goes on; after a power cut, what the file systems kept decides.

    Args:
        log_dir: Directory of the merged file; made when it is missing.
        temp_dir: Directory of the files, ``rank_*``; made with mode 0700 when it is missing.
        log_file: Name of the merged file.
        max_file_size: Bytes from which on a file is deleted once it is read and closed.
        en_chrono_ord: Merge the records of different files by their times; they come 0.3 s later.
    """

    def __init__(
        self, log_dir: str, temp_dir: str, log_file: str, max_file_size: int, en_chrono_ord: bool
    ) -> None:
        folders = os.path.abspath(temp_dir), os.path.abspath(log_dir)
        self._job = Job(*folders, log_file, max_file_size, is_ordered=bool(en_chrono_ord))
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start_aggregator(self) -> None:
        """Start the thread; without effect when it runs.

        Raises:
            DirectoryBusyError: Another aggregator works in the directory.
            UnsafePathError: A directory or the merged file cannot be trusted.
            OSError: Something cannot be made or opened.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        aggregation = Aggregation(self._job)
        self._stop.clear()
        self._wake_up = WakeUp()
        self._thread = threading.Thread(
            target=self._run, args=(aggregation,), name="nvrx-log-aggregator", daemon=True
        )
        self._thread.start()

    def shutdown(self) -> None:
        """Merge everything that has been written so far, and end the thread.

        What cannot be merged, because the disk is full, stays in the files for the next start.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        if thread.is_alive():
            self._wake_up.set()
            thread.join()
        self._wake_up.close()

    def _run(self, aggregation: Aggregation) -> None:
        current: Aggregation | None = aggregation
        while current is not None:
            try:
                self._serve(current)
                _drain(current)
            finally:
                current.close()
            current = None if self._stop.is_set() else self._begin_again()

    def _serve(self, aggregation: Aggregation) -> None:
        """Work until the end is asked for or the directory is another one."""
        notices = DirectoryNotices(aggregation.directory)
        look_s = _LOOK_S if notices.are_there else _LOOK_WITHOUT_NOTICES_S
        names: Iterable[str] | None = None
        try:
            while not self._stop.is_set() and not (names is None and aggregation.is_moved()):
                step = aggregation.step(names)
                if step.again_s == 0.0:
                    names = ()
                    continue
                # What comes in a short time is merged together: it costs one look.
                self._wait(None, _RETRY_S if step.is_blocked else _GAP_S)
                is_waiting = step.again_s is not None
                if self._wait(notices, look_s if step.again_s is None else step.again_s - _GAP_S):
                    names = notices.names()
                else:
                    names = () if is_waiting and notices.are_there else None
        finally:
            notices.close()

    def _wait(self, notices: DirectoryNotices | None, seconds: float) -> bool:
        """Wait for notices, the end or the time; say whether notices came."""
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        if notices is not None and notices.are_there:
            poll.register(notices.fileno(), select.POLLIN)
        return any(fd != self._wake_up.fileno() for fd, _ in poll.poll(max(0.0, seconds) * 1000))

    def _begin_again(self) -> Aggregation | None:
        """Return an aggregation of the directory that stands under the path now."""
        is_logged = False
        while not self._stop.is_set():
            try:
                return Aggregation(self._job)
            except (OSError, RuntimeError) as error:
                if not is_logged:
                    _log.warning("aggregation of %s waits: %s", self._job.temp_dir, error)
                is_logged = True
            self._wait(None, _RETRY_S)
        return None


def _drain(aggregation: Aggregation) -> None:
    """Merge all lines in the directory; stop where they cannot be merged now."""
    step = aggregation.step(None, is_final=True)
    while step.taken or step.again_s == 0.0:
        step = aggregation.step((), is_final=True)
