# SPDX-License-Identifier: Apache-2.0
"""Where workers' stdout and stderr go: files per cycle and rank, and copies on the console.

A worker writes into a file or into what it inherited, and into a pipe of the launcher only where
the user asked for cycle logs: a launcher that is stopped blocks a rank whose pipe is full. The
console copy (`--tee`) follows the
files; the kernel says when they grow (inotify), and where it cannot, a timer looks.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .output_copies import FilteredFile, offer

logger = logging.getLogger("nvrx")

READ_BYTES = 1 << 16
PROBE_BYTES = 4096
MAX_LINE_BYTES = 1 << 20
MAX_READS = 16
LAST_WORDS_S = 1.0
MEGABYTE = 1_000_000
LOOK_INTERVAL_S = 0.1
_IN_MODIFY = 0x2


class LogDirectoryError(NvrxError):
    """The log directory cannot be written."""

    def __init__(self, path: str, error: OSError) -> None:
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
    """Where one stream goes: inherited (path None), a file, or a file with a console copy.

    Attributes:
        path: The file; None for the launcher's own stream or a pipe.
        tee: Whether it is copied to the console.
        open_pipe: Makes a new pipe and returns its writing end.
        filter: Which of the file's lines are also elsewhere; None: none.
    """

    path: str | None = None
    tee: bool = False
    open_pipe: Callable[[], int] | None = None
    filter: Filter | None = None


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """The streams and the error file of one worker in one cycle."""

    stdout: Target
    stderr: Target
    error_file: str


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """What the flags asked for. Bits of a Std value: 1 = stdout, 2 = stderr."""

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
        target(Stream.STDOUT, 1),
        target(Stream.STDERR, 2),
        os.path.join(directory, "error.json"),
    )


def console_output(directory: str) -> WorkerOutput:
    """Return the streams of a worker whose files have no room: the launcher's own."""

    def target(descriptor: int) -> Target:
        # Named, and not inherited: a standby that was made for files would keep its placeholder.
        return Target(open_pipe=lambda: os.dup(descriptor))

    return WorkerOutput(target(1), target(2), os.path.join(directory, "error.json"))


def line_prefix(template: str | None, role: str, rank: int, local_rank: int) -> str:
    """Return what stands before each line that is copied to the console."""
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
        """Make a folder for this launch in the user's log directory and prove it is writable.

        Raises:
            LogDirectoryError: with the path, the reason and the remedy.
        """
        root = os.path.join(os.path.abspath(log_dir), name)
        probe = os.path.join(root, ".probe")
        try:
            os.makedirs(root, exist_ok=True)
            # An empty file can be made on a full disk; a block of data cannot.
            with open(probe, "wb") as file:
                file.write(b"\0" * PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
            os.unlink(probe)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(probe)
            with contextlib.suppress(OSError):
                os.rmdir(root)
            raise LogDirectoryError(log_dir, error) from None
        return cls(root)

    @classmethod
    def in_new_folder(cls) -> OutputFiles:
        """Make a folder for logs that are to be kept although no --log-dir was given."""
        import tempfile

        return cls(tempfile.mkdtemp(prefix="nvrx-logs-"))

    def missing_space(self) -> str:
        """Return why workers cannot write here now, or an empty text.

        It writes a block of data and does not wait for the disk: a restart must not.
        """
        probe = os.path.join(self.root, ".probe")
        try:
            with open(probe, "wb", buffering=0) as file:
                written = file.write(b"\0" * PROBE_BYTES)
            os.unlink(probe)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(probe)
            return error.strerror or str(error)
        return "" if written == PROBE_BYTES else os.strerror(errno.ENOSPC)

    def worker_directory(self, cycle: int, local_rank: int) -> str:
        """Make and return the folder of one worker in one cycle.

        Raises:
            LogDirectoryError: when it cannot be made any more.
        """
        path = os.path.join(self.root, f"attempt_{cycle}", str(local_rank))
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise LogDirectoryError(self.root, error) from None
        return path


def open_target(target: Target) -> int | None:
    """Open the file of a stream for appending, or return None when it is inherited.

    Raises:
        LogDirectoryError: when the file cannot be made.
        OSError: when there are no descriptors for a pipe.
    """
    if target.open_pipe is not None:
        return target.open_pipe()
    if target.path is None:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(target.path, flags, 0o644)
    except OSError as error:
        raise LogDirectoryError(target.path, error) from None


class _Followed:
    """One file that grows: what was read of it and is not shown yet.

    `offer` takes what it can of some bytes within a time, and returns how many; `wants` says which
    lines it is offered. `sink` names where they go.
    """

    def __init__(
        self,
        path: str,
        prefix: bytes,
        sink: str,
        offer: Callable[[bytes, float], int],
        wants: Callable[[bytes], bool],
    ) -> None:
        self.path = path
        self.sink = sink
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.prefix = prefix
        self._offer = offer
        self._wants = wants
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
        self.unshown += b"".join(self.prefix + line + b"\n" for line in lines if self._wants(line))
        return bool(data)

    def unread(self) -> int:
        """Return how many bytes of the file were not read."""
        try:
            return max(0, os.fstat(self.fd).st_size - os.lseek(self.fd, 0, os.SEEK_CUR))
        except OSError:
            return 0

    def end_line(self) -> None:
        """Take the last line as it is: nothing will be added to it."""
        if self._rest and self._wants(self._rest):
            self.unshown += self.prefix + self._rest + b"\n"
        self._rest = b""

    def show(self, wait_s: float) -> bool:
        """Write where the lines go; return whether everything was taken."""
        taken = self._offer(self.unshown, wait_s)
        self.unshown = self.unshown[taken:]
        return not self.unshown


class Tee:
    """Copies what workers append to their files to the launcher's own streams and other files.

    `fileno` is readable when a file grew; None where the kernel has no inotify, then `look`
    is due every `LOOK_INTERVAL_S`. A console that does not read holds up the copy and nothing
    else: what it did not take stays in the files. One thread only.
    """

    def __init__(self, again: Callable[[], None] = lambda: None) -> None:
        self._again = again
        self._followed: dict[int, _Followed] = {}
        # Files of the cycle before, at which nobody writes any more, that are not copied yet.
        self._ended: list[_Followed] = []
        self._next_key = -1
        self._copies: dict[str, FilteredFile] = {}
        self._inotify = _inotify_open()

    def fileno(self) -> int | None:
        """Return the inotify descriptor, or None."""
        return self._inotify

    def follow(self, path: str, prefix: str, stream: Stream) -> None:
        """Begin to copy `path` to the console; each line gets `prefix`."""

        def to_console(data: bytes, wait_s: float) -> int:
            return offer(stream.value, data, wait_s)

        self._follow(path, prefix, stream.value, to_console, _all)

    def filter(self, path: str, prefix: str, wanted: Filter) -> None:
        """Begin to copy the lines of `path` that are wanted, each with `prefix`."""
        copy = self._copies.get(wanted.path)
        if copy is None:
            copy = self._copies[wanted.path] = FilteredFile(wanted.path, wanted.texts)
        self._follow(path, prefix, wanted.path, copy.write, copy.wants)

    def _follow(
        self,
        path: str,
        prefix: str,
        sink: str,
        offer: Callable[[bytes, float], int],
        wants: Callable[[bytes], bool],
    ) -> None:
        followed = _Followed(path, prefix.encode(errors="surrogateescape"), sink, offer, wants)
        key = _inotify_watch(self._inotify, path) if self._inotify is not None else None
        # A file has one watch, however often it is followed.
        if key is None or key in self._followed:
            key, self._next_key = self._next_key, self._next_key - 1
        self._followed[key] = followed

    def look(self) -> float | None:
        """Copy what is new; call it when `fileno` is readable or the interval is over.

        Returns:
            Seconds after which it should be called again without being asked, or None.
        """
        if self._inotify is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, READ_BYTES)
        waits = [self._copy_ended(followed) for followed in list(self._ended)]
        # What ranks wrote before a restart comes before what they wrote after it.
        held = {followed.sink for followed in self._ended}
        waits += [self._copy(f) for f in self._followed.values() if f.sink not in held]
        return min((wait for wait in waits if wait is not None), default=None)

    def _copy_ended(self, followed: _Followed) -> float | None:
        wait_s = self._copy(followed)
        if wait_s is None:
            followed.end_line()
            if not followed.show(0.0):
                return LOOK_INTERVAL_S
            self._forget(followed)
        return wait_s

    def _forget(self, followed: _Followed) -> None:
        self._ended.remove(followed)
        os.close(followed.fd)
        sinks = {other.sink for other in (*self._ended, *self._followed.values())}
        for path in self._copies.keys() - sinks:
            self._copies.pop(path).close()

    def _copy(self, followed: _Followed) -> float | None:
        # Bounded, so that a worker that writes without end cannot keep the launcher here.
        for _ in range(MAX_READS):
            if not followed.show(0.0):
                return LOOK_INTERVAL_S
            if not followed.read():
                return None
        return 0.0

    def end_cycle(self) -> None:
        """Take the files for ended, without waiting; `look` copies what is left of them.

        What the console has not taken of the cycle before stays in its files.
        """
        self._complete(time.monotonic())
        self._take_for_ended()
        if self._ended:
            self._again()

    def finish(self) -> None:
        """Copy the rest of every file, unfinished lines too, and stop following.

        It waits `LAST_WORDS_S` for a console that does not read.
        """
        deadline = time.monotonic() + LAST_WORDS_S
        self._complete(deadline)
        self._take_for_ended()
        self._complete(deadline)

    def _take_for_ended(self) -> None:
        for key, followed in self._followed.items():
            self._ended.append(followed)
            if self._inotify is not None and key >= 0:
                _inotify_unwatch(self._inotify, key)
        self._followed.clear()

    def _complete(self, deadline: float) -> None:
        """Copy what is left of ended files until the deadline, and let go of them."""
        missing = {}
        for followed in list(self._ended):
            missing[followed.path] = self._copy_rest(followed, deadline)
            self._forget(followed)
        paths = [path for path, count in missing.items() if count]
        if paths:
            logger.warning(
                "the console is slower than the workers: it lacks %s of what they wrote;"
                " all of it stands in %s",
                *(_size_text(sum(missing.values())), ", ".join(paths)),
            )

    def _copy_rest(self, followed: _Followed, deadline: float) -> int:
        """Copy what the console takes until the deadline, and return how many bytes it lacks."""
        while followed.show(max(0.0, deadline - time.monotonic())) and followed.read():
            if time.monotonic() > deadline:
                break
        left = followed.unread()
        if not left:
            followed.end_line()
        followed.show(max(0.0, deadline - time.monotonic()))
        return left + len(followed.unshown)

    def close(self) -> None:
        """Copy the rest and release the descriptors."""
        self.finish()
        if self._inotify is not None:
            os.close(self._inotify)
            self._inotify = None


def _all(_line: bytes) -> bool:
    return True


def _size_text(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= MEGABYTE else f"{count} bytes"


def _inotify_open() -> int | None:
    import ctypes

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    except (OSError, AttributeError):
        return None
    return fd if fd >= 0 else None


def _inotify_watch(fd: int, path: str) -> int | None:
    import ctypes

    watch = int(ctypes.CDLL(None).inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY))
    return watch if watch >= 0 else None


def _inotify_unwatch(fd: int, watch: int) -> None:
    import ctypes

    ctypes.CDLL(None).inotify_rm_watch(fd, watch)
