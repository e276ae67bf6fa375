# SPDX-License-Identifier: Apache-2.0
"""Where workers' stdout and stderr go: files per cycle and rank, and copies on the console.

A pipe of the launcher is used only for cycle logs: a launcher that is stopped blocks a rank whose
pipe is full. The console copy (`--tee`) follows the files.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nvidia_resiliency_ext.shared_utils.directory_notices import FileNotices
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

logger = logging.getLogger("nvrx")

READ_BYTES = 1 << 16
PROBE_BYTES = 4096
MAX_LINE_BYTES = 1 << 20
MAX_READS = 16
DRAIN_S = 1.0
MEGABYTE = 1_000_000
LOOK_INTERVAL_S = 0.1
CHUNK_BYTES = 4096  # What a pipe that polls as writable takes without blocking (PIPE_BUF).


class LogDirectoryError(NvrxError):
    """The log directory cannot be written; `number` is the errno of the reason, if it has one."""

    def __init__(self, path: str, error: OSError) -> None:
        self.number = error.errno
        reason = os.strerror(error.errno) if error.errno else str(error)
        super().__init__(
            f"--log-dir {path}: {reason}; name a directory that exists or can be made, "
            f"is writable and has free space"
        )


class Stream(enum.Enum):
    """A standard stream of a worker."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Filter:
    """Lines of a stream that hold one of `texts` are also in the file `path`, all ranks' in one."""

    path: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """Where one stream goes: inherited, a file, or a file with a console copy."""

    path: str | None = None  # None for the launcher's own stream or a pipe.
    tee: bool = False
    open_pipe: Callable[[], int] | None = None  # Makes a pipe and returns its writing end.
    filter: Filter | None = None  # Which of the file's lines are also elsewhere.


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """The streams and the error file of one worker in one cycle."""

    stdout: Target
    stderr: Target
    error_file: str


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Output options of a launch. Bits of a Std value: 1 = stdout, 2 = stderr."""

    redirects: Mapping[int, int]
    tee: Mapping[int, int]
    console_ranks: frozenset[int] | None
    filters: Mapping[Stream, tuple[str, ...]] = field(default_factory=dict)

    @property
    def writes_files(self) -> bool:
        """Whether any stream goes to a file that the user wants to keep."""
        return any(self.redirects.values()) or any(self.tee.values())


def worker_output(settings: OutputSettings, directory: str, local_rank: int) -> WorkerOutput:
    """Return where the streams of `local_rank` go; `directory` is this worker's own."""
    shown = settings.console_ranks is None or local_rank in settings.console_ranks

    def target(stream: Stream, bit: int) -> Target:
        to_console = bool(settings.tee.get(local_rank, 0) & bit)
        to_file = bool(settings.redirects.get(local_rank, 0) & bit) or to_console
        if to_file:
            path = os.path.join(directory, f"{stream.value}.log")
            texts = settings.filters.get(stream, ()) if shown else ()
            # Beside the folders of all ranks of the cycle.
            copy = os.path.join(os.path.dirname(directory), f"filtered_{stream.value}.log")
            return Target(path, to_console and shown, filter=Filter(copy, texts) if texts else None)
        return Target() if shown else Target(os.devnull)

    return WorkerOutput(
        target(Stream.STDOUT, 1), target(Stream.STDERR, 2), os.path.join(directory, "error.json")
    )


def console_output(directory: str) -> WorkerOutput:
    """Return the streams of a worker whose files have no room: the launcher's own."""

    def target(descriptor: int) -> Target:
        # Named, and not inherited: a process prewarmed for files would keep its placeholder.
        return Target(open_pipe=lambda: os.dup(descriptor))

    return WorkerOutput(target(1), target(2), os.path.join(directory, "error.json"))


def line_prefix(template: str | None, role: str, rank: int, local_rank: int) -> str:
    if template is None:
        return f"[{role}{local_rank}]:"
    from string import Template

    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


class OutputFiles:
    """The folders `<root>/attempt_<cycle>/<local rank>/` of one launch."""

    def __init__(self, root: str) -> None:
        self.root = root

    @classmethod
    def beneath(cls, log_dir: str, name: str) -> OutputFiles:
        """Make a folder for this launch in the user's log directory and prove it is writable."""
        root = os.path.join(os.path.abspath(log_dir), name)
        try:
            os.makedirs(root, exist_ok=True)
            _write_probe(root, syncs=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.rmdir(root)
            raise LogDirectoryError(log_dir, error) from None
        return cls(root)

    def missing_space(self) -> str:
        """Return why workers cannot write here now, or an empty text; a restart may ask."""
        try:
            _write_probe(self.root, syncs=False)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def worker_directory(self, cycle: int, local_rank: int) -> str:
        """Make and return the folder of one worker in one cycle."""
        path = os.path.join(self.root, f"attempt_{cycle}", str(local_rank))
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise LogDirectoryError(self.root, error) from None
        return path


def _write_probe(folder: str, *, syncs: bool) -> None:
    """Write a block of data and remove it: an empty file can be made on a full disk."""
    probe = os.path.join(folder, ".probe")
    try:
        with open(probe, "wb", buffering=0) as file:
            if file.write(b"\0" * PROBE_BYTES) != PROBE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if syncs:
                os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def open_target(target: Target) -> int | None:
    """Open the file of a stream for appending, or return None when it is inherited."""
    if target.open_pipe is not None:
        return target.open_pipe()
    if target.path is None:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(target.path, flags, 0o644)
    except OSError as error:
        raise LogDirectoryError(target.path, error) from None


class ConsoleStream:
    """One of the launcher's own streams, which takes every line."""

    def __init__(self, name: str) -> None:
        self.path = name

    def wants(self, _line: bytes) -> bool:
        return True

    def write(self, lines: bytes, wait_s: float) -> int:
        """Return how many bytes the stream took in time: everything if it is closed or gone."""
        stream = getattr(sys, self.path)
        try:
            fd = stream.fileno()
        except (OSError, ValueError, AttributeError):
            # Without a descriptor, such as a notebook's.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.write(lines.decode("utf-8", "replace"))
            return len(lines)
        deadline = time.monotonic() + wait_s
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        taken = 0
        while taken < len(lines):
            ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return taken
            if not ready[0][1] & select.POLLOUT:
                return len(lines)
            try:
                taken += os.write(fd, lines[taken : taken + CHUNK_BYTES])
            except BlockingIOError:
                return taken
            except OSError:
                return len(lines)
        return taken


class FilteredFile:
    """The lines that were wanted, of one stream of all workers of a cycle.

    A file that cannot be written costs its lines and one message, never the job.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self.path = path
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._fd = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            self._give_up(error)

    def wants(self, line: bytes) -> bool:
        return any(text in line for text in self._texts)

    def write(self, lines: bytes, _wait_s: float) -> int:
        """Write whole lines; return how many bytes are done with, which is all of them."""
        left = lines
        while left and self._fd >= 0:
            try:
                left = left[os.write(self._fd, left) :]
            except OSError as error:
                self._give_up(error)
        return len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, error: OSError) -> None:
        logger.warning("%s is not written any more: %s", self.path, error.strerror or error)
        self.close()


class _Followed:
    """A growing file, with the lines that were read and not shown in its sink yet."""

    def __init__(self, path: str, prefix: str, sink: ConsoleStream | FilteredFile) -> None:
        self.path = path
        self.sink = sink
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.prefix = prefix.encode(errors="surrogateescape")
        self.unshown = b""
        self._rest = b""
        self._has_failed = False

    def read(self) -> bool:
        """Read one block and make lines of it; return whether there may be more."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except OSError as error:
            # A network file system may lose a file; that costs its copy, not the job.
            if not self._has_failed:
                self._has_failed = True
                logger.warning("%s cannot be shown on the console: %s", self.path, error)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self.unshown += b"".join(
            self.prefix + line + b"\n" for line in lines if self.sink.wants(line)
        )
        return bool(data)

    def unread(self) -> int:
        try:
            return max(0, os.fstat(self.fd).st_size - os.lseek(self.fd, 0, os.SEEK_CUR))
        except OSError:
            return 0

    def end_line(self) -> None:
        """Take the last line as it is: nothing will be added to it."""
        if self._rest and self.sink.wants(self._rest):
            self.unshown += self.prefix + self._rest + b"\n"
        self._rest = b""

    def show(self, wait_s: float) -> bool:
        """Write where the lines go; return whether everything was taken."""
        taken = self.sink.write(self.unshown, wait_s)
        self.unshown = self.unshown[taken:]
        return not self.unshown


class Tee:
    """Copy appended lines of workers' files to the launcher's streams and other files.

    A console that does not read holds up the copy alone: what it did not take stays in the files.
    One thread only.
    """

    def __init__(self, again: Callable[[], None] = lambda: None) -> None:
        self._again = again
        self._followed: list[_Followed] = []
        # Files of the cycle before, at which nobody writes any more, that are not copied yet.
        self._ended: list[_Followed] = []
        self._console = {stream: ConsoleStream(stream.value) for stream in Stream}
        self._copies: dict[str, FilteredFile] = {}
        self._notices = FileNotices()
        self._has_unnoticed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when a file grew; -1 where the kernel has none."""
        return self._notices.fileno()

    def follow(self, target: Target, prefix: str, stream: Stream) -> None:
        """Begin to copy a stream's file as `target` says; each line gets `prefix`."""
        if target.path is None:
            return
        if target.tee:
            self._follow(target.path, prefix, self._console[stream])
        wanted = target.filter
        if wanted is not None:
            if wanted.path not in self._copies:
                self._copies[wanted.path] = FilteredFile(wanted.path, wanted.texts)
            self._follow(target.path, prefix, self._copies[wanted.path])

    def _follow(self, path: str, prefix: str, sink: ConsoleStream | FilteredFile) -> None:
        followed = _Followed(path, prefix, sink)
        self._followed.append(followed)
        self._has_unnoticed |= not self._notices.watch(path)
        # What was written before the watch began is not reported.
        if self._has_unnoticed or followed.unread():
            self._again()

    def look(self) -> float | None:
        """Copy new lines; return the seconds until the next look, None: when a file has grown."""
        self._notices.clear()
        waits = [self._copy(followed, is_ended=True) for followed in list(self._ended)]
        # What ranks wrote before a restart comes before what they wrote after it.
        held = {followed.sink for followed in self._ended}
        waits += [self._copy(f) for f in self._followed if f.sink not in held]
        if self._has_unnoticed:
            waits.append(LOOK_INTERVAL_S)
        return min((wait for wait in waits if wait is not None), default=None)

    def _forget(self, followed: _Followed) -> None:
        self._ended.remove(followed)
        os.close(followed.fd)
        sinks = {other.sink for other in (*self._ended, *self._followed)}
        for copy in [copy for copy in self._copies.values() if copy not in sinks]:
            self._copies.pop(copy.path).close()

    def _copy(self, followed: _Followed, *, is_ended: bool = False) -> float | None:
        # Bounded, so that a worker that writes without end cannot keep the launcher here.
        for _ in range(MAX_READS):
            if not followed.show(0.0):
                return LOOK_INTERVAL_S
            if followed.read():
                continue
            if is_ended:
                followed.end_line()
                if not followed.show(0.0):
                    return LOOK_INTERVAL_S
                self._forget(followed)
            return None
        return 0.0

    def end_cycle(self) -> None:
        """Take the files for ended, and give up those of the cycle before; never waits."""
        self._complete(time.monotonic())
        self._take_for_ended()
        if self._ended:
            self._again()

    def _take_for_ended(self) -> None:
        self._ended += self._followed
        self._followed = []
        self._notices.unwatch_all()
        self._has_unnoticed = False

    def _complete(self, deadline: float) -> None:
        """Copy the rest of ended files to the console until the deadline, and forget the files."""
        missing = {}
        for followed in list(self._ended):
            while followed.show(max(0.0, deadline - time.monotonic())) and followed.read():
                if time.monotonic() > deadline:
                    break
            left = followed.unread()
            if not left:
                followed.end_line()
            followed.show(max(0.0, deadline - time.monotonic()))
            missing[followed.path] = left + len(followed.unshown)
            self._forget(followed)
        paths = [path for path, count in missing.items() if count]
        if paths:
            count = sum(missing.values())
            size = f"{count / 1e6:.1f} MB" if count >= MEGABYTE else f"{count} bytes"
            logger.warning(
                "the console is slower than the workers: it lacks %s of what they wrote;"
                " all of it stands in %s",
                *(size, ", ".join(paths)),
            )

    def close(self) -> None:
        """Copy the rest of every file, unfinished lines too, in `DRAIN_S` at most."""
        deadline = time.monotonic() + DRAIN_S
        self._complete(deadline)
        self._take_for_ended()
        self._complete(deadline)
        self._notices.close()
