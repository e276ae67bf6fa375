# SPDX-License-Identifier: Apache-2.0
"""Write files so that each is there whole, under its name and after a power cut, or not at all.

It needs no torch: a worker process of a few megabytes runs it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ClassVar

from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, sync_directory

from ._errors import CheckpointWriteError
from ._staging import PAGE_BYTES, round_up
from ._write_plan import FileResult
from ._zip_checksums import FileChecksums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._write_plan import FilePlan, WritePlan

CHUNK_BYTES = 8 << 20
"""Bytes of one system call; also how far checksums run ahead, four times."""

_AHEAD = 4


class SaveCancelledError(Exception):
    """Another file of the same save failed, or the save was given up."""


def temporary_name(path: str, tag: str) -> str:
    """Return the name under which a file is written: hidden, in the same directory."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.nvrx-{tag}.tmp")


def write_small_file(path: str, data: bytes, *, sync: bool = True) -> None:
    """Write a file so that readers see the old content or the new, durably where `sync` is true.

    Raises:
        CheckpointWriteError: It cannot be written; nothing else is left.
    """
    try:
        atomic_write(path, data, mode=None, fsync=sync)
    except OSError as error:
        raise CheckpointWriteError.from_os(error, path, 0, "write") from error


def publish_files(plan: WritePlan, temporary_names: Sequence[str]) -> None:
    """Give written files their names, and make the names durable.

    Raises:
        CheckpointWriteError: A name cannot be given.
    """
    folders = {os.path.dirname(file.path) for file in plan.files}
    path = ""
    try:
        for path in plan.remove_first:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                folders.add(os.path.dirname(path))
        for file, name in zip(plan.files, temporary_names, strict=True):
            path = file.path
            os.replace(name, path)
        for path in folders if plan.sync else ():
            sync_directory(path)
    except OSError as error:
        raise CheckpointWriteError.from_os(error, path, 0, "rename") from error


class FileSaver:
    """Writes all files of one plan; from any thread, once.

    Args:
        plan: What to write.
        view: The staging buffer; the writer fills in checksums.
        opener: Replaces the opening of files, called as `opener(path, "wb")`; None for ours.
        renames: Whether files get a temporary name first. False for object stores, which publish
            an object when it is closed.
        on_progress: Called with the number of bytes of each chunk that was written.

    Attributes:
        stopped: Set by `cancel`, or when one of the files failed.
        ended: Set when `run` is over, in any way.
    """

    def __init__(
        self,
        plan: WritePlan,
        view: memoryview,
        *,
        opener: Callable[[str, str], Any] | None = None,
        renames: bool = True,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._view = view
        self._opener = opener
        self._renames = renames
        self._on_progress = on_progress
        self.stopped = threading.Event()
        self.ended = threading.Event()
        self._tag = secrets.token_hex(4)

    def cancel(self) -> None:
        """Let `run` end soon, with an error and without files."""
        self.stopped.set()

    def run(self) -> list[FileResult]:
        """Write the files, then give all of them their names; return them in order.

        Raises:
            CheckpointWriteError: One cannot be written. No file has got its name, unless renaming
                failed, and temporary files are gone.
            SaveCancelledError: `cancel` was called.
        """
        files = self._plan.files
        threads = max(1, min(self._plan.threads, len(files)))
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="nvrx-write") as pool:
                running = [pool.submit(self._write, file) for file in files]
                done, _ = wait(running, return_when=FIRST_EXCEPTION)
                if any(future.exception() for future in done):
                    self.stopped.set()
            errors = [error for future in running if (error := future.exception())]
            if errors:
                # The cause, rather than a file that was given up because of it.
                raise min(errors, key=lambda error: isinstance(error, SaveCancelledError))  # noqa: TRY301
            self._publish()
        except BaseException:
            self._remove_temporary_files()
            raise
        finally:
            self.ended.set()
        return [future.result() for future in running]

    def _name(self, file: FilePlan) -> str:
        return temporary_name(file.path, self._tag) if self._renames else file.path

    def _publish(self) -> None:
        if self.stopped.is_set():
            raise SaveCancelledError
        if self._renames:
            publish_files(self._plan, [self._name(file) for file in self._plan.files])

    def _remove_temporary_files(self) -> None:
        for file in self._plan.files if self._renames else ():
            with contextlib.suppress(OSError):
                os.unlink(self._name(file))

    def _write(self, file: FilePlan) -> FileResult:
        image = self._view[file.start : file.start + round_up(file.length)]
        checksums = FileChecksums(file, self._plan.shapes, image)
        target = self._open(file)
        try:
            with contextlib.closing(_Ahead(checksums.walk(CHUNK_BYTES), self.stopped)) as positions:
                for position in positions:
                    self._on_progress(target.write_up_to(position, image))
            target.finish(sync=self._plan.sync)
        except OSError as error:
            raise CheckpointWriteError.from_os(
                error, file.path, target.written, target.action
            ) from error
        finally:
            target.give_back()
        return FileResult(file.path, file.length, checksums.crc, checksums.item_crcs)

    def _open(self, file: FilePlan) -> _Target:
        name = self._name(file)
        try:
            if self._opener is not None:
                stream = self._opener(name, "wb")
                return _StreamTarget(stream, file.length, publishes=not self._renames)
            big = file.length >= CHUNK_BYTES and self._plan.io_mode == "auto"
            direct = big or self._plan.io_mode == "direct"
            return _FileTarget(name, file.length, direct=direct)
        except OSError as error:
            raise CheckpointWriteError.from_os(error, file.path, 0, "create") from error


class _Target:
    """A file that is being written, in order."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.written = 0
        self.action = "write"

    def write_up_to(self, position: int, image: memoryview) -> int:
        before = self.written
        while self.written < position:
            self.written += self._write_some(image, position)
        self.written = min(self.written, self.length)
        return self.written - before

    def _write_some(self, image: memoryview, position: int) -> int:
        raise NotImplementedError

    def finish(self, *, sync: bool) -> None:
        """Make the written bytes durable, and close the file."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Drop an unfinished file; harmless after `finish`."""
        raise NotImplementedError


class _FileTarget(_Target):
    """A file of a file system."""

    def __init__(self, path: str, length: int, *, direct: bool) -> None:
        super().__init__(length)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = direct
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._direct = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # some file systems make the file before they refuse the flag
            self._fd = os.open(path, flags, 0o666)
        self._reserve(length)

    def _reserve(self, length: int) -> None:
        """Reserve the file's length on disk; where that is impossible writing shows a full disk."""
        # Major number 0 is no block device. In memory nothing is laid out, which took 6 % of a
        # write; a network file system that cannot do it has the C library write into every block.
        # Others that have 0 (overlayfs, btrfs) could: there a full disk shows while writing.
        if length < CHUNK_BYTES or os.major(os.fstat(self._fd).st_dev) == 0:
            return
        try:
            os.posix_fallocate(self._fd, 0, length)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
                self.give_back()
                raise

    def _write_some(self, image: memoryview, position: int) -> int:
        end = position
        if self._direct and position == self.length:
            end = round_up(position)  # the image has room up to the page; cut off in `finish`
        try:
            return os.pwrite(self._fd, image[self.written : end], self.written)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        self._leave_direct()
        return 0

    def _leave_direct(self) -> None:
        import fcntl

        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def finish(self, *, sync: bool) -> None:
        if self.length % PAGE_BYTES:
            os.ftruncate(self._fd, self.length)
        if sync:
            self.action = "fsync"
            os.fsync(self._fd)

    def give_back(self) -> None:
        os.close(self._fd)


class _StreamTarget(_Target):
    """A stream that somebody else's opener gave us.

    Args:
        stream: The stream.
        length: How long it will be.
        publishes: Whether closing it makes an object of what was written, under its final name.
    """

    unfinished: ClassVar[list[Any]] = []
    """Streams that must not be closed: closing, also by the garbage collector, would publish."""

    def __init__(self, stream: Any, length: int, *, publishes: bool) -> None:
        super().__init__(length)
        self._stream = stream
        self._publishes = publishes
        self._finished = False

    def _write_some(self, image: memoryview, position: int) -> int:
        data = image[self.written : position]
        done = self._stream.write(data)
        return len(data) if done is None else done

    def finish(self, *, sync: bool) -> None:
        self._stream.flush()
        if sync:
            self.action = "fsync"
            try:
                number = self._stream.fileno()
            except (OSError, AttributeError):
                number = -1  # an object store: durable when it is closed without an error
            if number >= 0:
                os.fsync(number)
        self.action = "close"
        self._finished = True
        self._stream.close()

    def give_back(self) -> None:
        if self._finished:
            return
        if not self._publishes:
            self._stream.close()  # of a temporary file, which is then removed
            return
        # What multi-storage-client's files have; for its objects it does nothing.
        getattr(self._stream, "discard", _nothing)()
        if not self._stream.closed:
            self._stream.truncate(0)
            self.unfinished.append(self._stream)


def _nothing() -> None:
    """Do nothing."""


class _Ahead:
    """Runs an iterator in a thread of its own, a few steps ahead of the code that takes values."""

    def __init__(self, positions: Iterator[int], stop: threading.Event) -> None:
        self._positions = positions
        self._stop = stop
        self._ready: queue.Queue[int | BaseException | None] = queue.Queue(_AHEAD)
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvrx-checksum", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for position in self._positions:
                self._ready.put(position)
                if self._abandoned.is_set():
                    break
        except BaseException as error:  # noqa: BLE001 - the thread that takes values raises it
            last = error
        self._ready.put(last)

    def __iter__(self) -> Iterator[int]:
        while (value := self._ready.get()) is not None:
            if isinstance(value, BaseException):
                self._ready.put(None)
                raise value
            if self._stop.is_set():
                raise SaveCancelledError
            yield value
        self._ready.put(None)

    def close(self) -> None:
        self._abandoned.set()
        while isinstance(self._ready.get(), int):
            pass
        self._thread.join()
