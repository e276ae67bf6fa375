# SPDX-License-Identifier: Apache-2.0
"""Where workers' stdout and stderr go: files per cycle and rank, and copies on the console.

A worker always writes into a file or into what it inherited, never into a pipe of the launcher:
a launcher that is stopped or gone must not block a rank. The console copy (`--tee`) follows the
files; the kernel says when they grow (inotify), and where it cannot, a timer looks.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
MAX_READS = 16
MAX_READS_AT_END = 4096
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
class Target:
    """Where one stream goes: inherited (path None), a file, or a file with a console copy."""

    path: str | None = None
    tee: bool = False


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
            return Target(os.path.join(directory, f"{stream.value}.log"), to_console and shown)
        return Target() if shown else Target(os.devnull)

    return WorkerOutput(
        target(Stream.STDOUT, 1),
        target(Stream.STDERR, 2),
        os.path.join(directory, "error.json"),
    )


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
                file.write(b"\0" * 4096)
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
    """
    if target.path is None:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(target.path, flags, 0o644)
    except OSError as error:
        raise LogDirectoryError(target.path, error) from None


class _Followed:
    """One file that grows, and the bytes of its unfinished last line."""

    def __init__(self, path: str, prefix: bytes, stream: Stream) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.prefix = prefix
        self.stream = stream
        self.rest = b""
        self.has_more = False

    def new_lines(self, *, final: bool) -> bytes:
        """Return whole new lines with their prefix; with `final` also the unfinished one.

        Bounded: a worker that writes without end must not keep the launcher here. `has_more`
        says afterwards whether the bound was reached.
        """
        out = []
        self.has_more = True
        for _ in range(MAX_READS_AT_END if final else MAX_READS):
            data = os.read(self.fd, READ_BYTES)
            if not data:
                self.has_more = False
                break
            *lines, self.rest = (self.rest + data).split(b"\n")
            out += [self.prefix + line + b"\n" for line in lines]
            if len(self.rest) > MAX_LINE_BYTES:
                out.append(self.prefix + self.rest + b"\n")
                self.rest = b""
        if final and self.rest:
            out.append(self.prefix + self.rest + b"\n")
            self.rest = b""
        return b"".join(out)


class Tee:
    """Copies what workers append to their files onto the launcher's own streams.

    `fileno` is readable when a file grew; None where the kernel has no inotify, then `look`
    is due every `LOOK_INTERVAL_S`. One thread only.
    """

    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}
        self._next_key = -1
        self._inotify = _inotify_open()

    def fileno(self) -> int | None:
        """Return the inotify descriptor, or None."""
        return self._inotify

    def follow(self, path: str, prefix: str, stream: Stream) -> None:
        """Begin to copy `path`; each line gets `prefix`."""
        followed = _Followed(path, prefix.encode(), stream)
        key = _inotify_watch(self._inotify, path) if self._inotify is not None else None
        if key is None:
            key, self._next_key = self._next_key, self._next_key - 1
        self._followed[key] = followed

    def look(self) -> bool:
        """Copy what is new; call it when `fileno` is readable or the interval is over.

        Returns:
            Whether there is more already, so that it should be called again soon.
        """
        if self._inotify is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, READ_BYTES)
        self._copy(final=False)
        return any(followed.has_more for followed in self._followed.values())

    def finish(self) -> None:
        """Copy the rest of every file, unfinished lines too, and stop following."""
        self._copy(final=True)
        for key, followed in self._followed.items():
            os.close(followed.fd)
            if self._inotify is not None and key >= 0:
                _inotify_unwatch(self._inotify, key)
        self._followed.clear()

    def _copy(self, *, final: bool) -> None:
        for followed in self._followed.values():
            if text := followed.new_lines(final=final):
                _write_console(followed.stream, text)

    def close(self) -> None:
        """Copy the rest and release the descriptors."""
        self.finish()
        if self._inotify is not None:
            os.close(self._inotify)
            self._inotify = None


def _write_console(stream: Stream, text: bytes) -> None:
    console = sys.stdout if stream is Stream.STDOUT else sys.stderr
    binary = getattr(console, "buffer", None)
    # A console that is gone, full or closed must not end the job; the files have it all.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        console.flush()
        if binary is None:  # A notebook's stream takes text only.
            console.write(text.decode("utf-8", "replace"))
        else:
            binary.write(text)
            binary.flush()


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
