# SPDX-License-Identifier: Apache-2.0
"""Create, list, publish and remove the shards in the directory of one rank."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from nvidia_resiliency_ext.checkpointing._errors import CheckpointWriteError
from nvidia_resiliency_ext.checkpointing._shard.read import FileSource
from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError
from nvidia_resiliency_ext.shared_utils.os_utils import lock_file, private_dir, sync_directory

DIRTY = ".dirty"
DAMAGED = ".damaged"
_PATTERN = re.compile(r"iter_(\d{7,})_(\d+)_local(\.dirty|\.damaged)?\.pt")
_FAILURE_MAGIC = b"NVRX save failed: "
_FAILURE_LIMIT_BYTES = 4096
_CREATE_ATTEMPTS = 5
_MODE = 0o600


def shard_file_name(iteration: int | str, owner: int | str, extra_suffix: str = "") -> str:
    """Return the name of a shard's file; text takes the place of a number as it is."""
    number = f"{iteration:07d}" if isinstance(iteration, int) else iteration
    return f"iter_{number}_{owner}_local{extra_suffix}.pt"


@dataclass(frozen=True, order=True)
class ShardName:
    """Iteration and rank of a shard, as its file name gives them."""

    iteration: int
    owner: int
    suffix: str = ""

    @classmethod
    def parse(cls, name: str) -> ShardName | None:
        """Read a file name; None when it is not that of a shard."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2]), match[3] or "")

    def __str__(self) -> str:
        return shard_file_name(self.iteration, self.owner, self.suffix)


class RankDirectory:
    """The shards that one rank holds: its own and copies of others'.

    Args:
        root: Directory of all sessions.
        session_id: Session, a path below the root; empty for none.
        rank: The rank.

    Raises:
        UnsafePathError: The session leads out of the root.
    """

    def __init__(self, root: str | os.PathLike[str], session_id: str, rank: int) -> None:
        parts = session_id.split("/")
        if "\0" in session_id or ".." in parts or session_id.startswith("/"):
            raise UnsafePathError(errno.EPERM, "the session leads out of the root", session_id)
        self._session = os.path.join(root, session_id) if session_id else None
        self.path = os.path.join(root, session_id, str(rank))

    def ensure(self) -> None:
        """Create the directory if it is missing; make sure that only we may write to it.

        Raises:
            UnsafePathError: It, or the one of the session, is a symbolic link, belongs to somebody
                else, or others may write to it.
            OSError: It cannot be created.
        """
        if self._session is not None:
            private_dir(self._session)
        private_dir(self.path)

    def lock(self) -> DirectoryLock:
        """Keep other processes from saving here until all in this one have dropped the lock.

        Raises:
            OSError: Another process saves here, or the directory is missing or not to be trusted.
        """
        with self.open() as directory:
            if directory is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
            status = os.fstat(directory)
            found = _locks.get((status.st_dev, status.st_ino))
            try:
                return found or DirectoryLock(directory)
            except BlockingIOError as error:
                reason = "another process saves to it; give each job a directory or session_id"
                raise OSError(errno.EBUSY, reason, self.path) from error

    @contextlib.contextmanager
    def open(self) -> Iterator[int | None]:
        """Open the directory; give None when it is missing.

        Raises:
            UnsafePathError: It, or the one of the session, is not to be trusted.
            OSError: It cannot be read.
        """
        for path in (self._session, self.path):
            if path is None:
                continue
            try:
                descriptor = _open_trusted(path)
            except FileNotFoundError:
                yield None
                return
            if path is not self.path:
                os.close(descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def names(self) -> list[ShardName]:
        """Return all files that have a name of ours, oldest first; none when it is missing."""
        with self.open() as directory:
            return [] if directory is None else _names_in(directory)

    def source(self, name: ShardName) -> FileSource:
        """Open a shard for reading.

        Raises:
            OSError: It is missing, or it or the directory is not to be trusted.
        """
        with self.open() as directory:
            if directory is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
            source = FileSource(str(name), directory)
        source.name = os.path.join(self.path, str(name))
        return source

    def create(self, iteration: int, owner: int) -> ShardInProgress:
        """Begin a shard; remove the unfinished file of a dead writer.

        Raises:
            CheckpointWriteError: It cannot be created, or a living process writes it.
        """
        try:
            self.ensure()
            with self.open() as directory:
                return ShardInProgress(self.path, directory, ShardName(iteration, owner))
        except OSError as error:
            name = os.path.join(self.path, shard_file_name(iteration, owner))
            raise CheckpointWriteError.from_os(error, name, 0, "create") from error

    def remove(self, names: list[ShardName]) -> None:
        """Remove files; those that are gone already are no error.

        Raises:
            OSError: One cannot be removed; the others are.
        """
        problem: OSError | None = None
        with self.open() as directory:
            for name in names if directory is not None else ():
                try:
                    os.unlink(str(name), dir_fd=directory)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    problem = error
        if problem is not None:
            raise problem

    def keep_as_spare(self, shards: list[ShardName]) -> None:
        """Keep the files of shards that nobody needs, for the next shards of their owners.

        They lie beside this directory, so that it holds shards only. All other spare files of this
        rank are removed, and so are shards that cannot be moved there.

        Raises:
            OSError: One cannot be moved or removed.
        """
        with self.open() as directory:
            if directory is None:
                return
            kept = {_spare_path(self.path, name.owner): str(name) for name in shards}
            folder, prefix = os.path.split(_spare_path(self.path, ""))
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if name.startswith(prefix) and path not in kept:
                    with contextlib.suppress(OSError):  # it is no file, or another user's
                        os.unlink(path)
            for path, name in kept.items():
                try:
                    os.rename(name, path, src_dir_fd=directory)
                except OSError:
                    os.unlink(name, dir_fd=directory)

    def set_aside(self, name: ShardName) -> None:
        """Rename a damaged shard, so that nobody takes it for a whole one again."""
        with self.open() as directory, contextlib.suppress(FileNotFoundError):
            if directory is not None:
                aside = ShardName(name.iteration, name.owner, DAMAGED)
                os.rename(str(name), str(aside), src_dir_fd=directory, dst_dir_fd=directory)

    def remove_leftovers(self) -> list[str]:
        """Remove files in progress whose writers are gone; return notes of failed saves in them."""
        notes: list[str] = []
        with self.open() as directory:
            if directory is None:
                return notes
            for name in [n for n in _names_in(directory) if n.suffix == DIRTY]:
                with contextlib.suppress(BlockingIOError, FileNotFoundError):
                    note = _remove_dead(str(name), directory)
                    if note:
                        notes.append(note)
        return notes


class DirectoryLock:
    """Keeps other processes from saving to a directory until it is forgotten.

    Args:
        directory: Descriptor of the directory; it stays the caller's.

    Raises:
        BlockingIOError: Another process has it.
    """

    def __init__(self, directory: int) -> None:
        descriptor = os.dup(directory)
        self.end = weakref.finalize(self, os.close, descriptor)
        try:
            lock_file(descriptor)
        except OSError:
            self.end()
            raise
        status = os.fstat(descriptor)
        _locks[status.st_dev, status.st_ino] = self


_locks: weakref.WeakValueDictionary[tuple[int, int], DirectoryLock] = weakref.WeakValueDictionary()


def _leave_locks() -> None:
    """Leave the locks to the process that this one was forked from, also when that ends."""
    for lock in list(_locks.values()):
        lock.end()
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks)


class ShardInProgress:
    """A file that is being written; it is locked, so that others see that its writer lives.

    A spare file of the same owner is written over, which spares the system the pages.

    Args:
        path: Path of the directory, for messages.
        directory: Its descriptor.
        name: The shard's final name.
    """

    def __init__(self, path: str, directory: int | None, name: ShardName) -> None:
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._name = name
        self._dirty = shard_file_name(name.iteration, name.owner, DIRTY)
        self.path = os.path.join(path, str(name))
        spare = _spare_path(path, name.owner)
        self._descriptor = _create_from_spare(spare, self._dirty, directory)
        self._directory = os.dup(directory)
        self._growing = threading.Lock()
        self.written_bytes = 0

    def write(self, position: int, data: memoryview) -> None:
        """Write bytes at a position; several threads may do so."""
        while data:
            written = os.pwrite(self._descriptor, data, position)
            position, data = position + written, data[written:]
        with self._growing:
            self.written_bytes = max(self.written_bytes, position)

    def publish(self) -> None:
        """Make the file durable and give it its final name.

        Raises:
            CheckpointWriteError: That failed; it has its old name, to be discarded.
        """
        name, folder = str(self._name), self._directory
        action, is_named = "fsync", False
        try:
            self._end_here()
            os.fsync(self._descriptor)
            action = "rename"
            os.rename(self._dirty, name, src_dir_fd=folder, dst_dir_fd=folder)
            action, is_named = "fsync", True
            sync_directory(self._directory)
        except OSError as error:
            if is_named:
                with contextlib.suppress(OSError):
                    os.rename(name, self._dirty, src_dir_fd=folder, dst_dir_fd=folder)
            nbytes = self.written_bytes
            raise CheckpointWriteError.from_os(error, self.path, nbytes, action) from error
        self._close()

    def _end_here(self) -> None:
        """Cut off the rest of a longer shard behind the last written byte."""
        os.ftruncate(self._descriptor, self.written_bytes)

    def source(self) -> FileSource:
        """Open the written file for reading."""
        self._end_here()
        source = FileSource(self._dirty, self._directory)
        source.name = self.path
        return source

    def discard(self, note: str = "") -> None:
        """Give the file up; a note stays in the file until the leftovers are removed."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            if note:
                data = _FAILURE_MAGIC + note.encode(errors="replace")[-_FAILURE_LIMIT_BYTES:]
                os.pwrite(self._descriptor, data, 0)
        if not note:
            with contextlib.suppress(OSError):
                os.unlink(self._dirty, dir_fd=self._directory)
        self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        os.close(self._directory)
        self._descriptor = -1


def _open_trusted(path: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            message = "a symbolic link or no directory"
            raise UnsafePathError(error.errno, message, path) from error
        raise
    status = os.fstat(descriptor)
    problem = ""
    if status.st_uid != os.geteuid():
        problem = f"the directory belongs to uid {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "others may write to the directory"
    if problem:
        os.close(descriptor)
        raise UnsafePathError(errno.EPERM, problem, path)
    return descriptor


def _names_in(directory: int) -> list[ShardName]:
    """Return the names of ours, oldest first; directories are none, whatever their names."""
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    return sorted(filter(None, map(ShardName.parse, names)))


def _create_locked(name: str, directory: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_CREATE_ATTEMPTS):
        try:
            descriptor = os.open(name, flags, _MODE, dir_fd=directory)
        except FileExistsError:
            try:
                _remove_dead(name, directory)
            except FileNotFoundError:
                pass
            except BlockingIOError as error:
                message = "a living process is writing it"
                raise OSError(errno.EBUSY, message, name) from error
            continue
        try:
            lock_file(descriptor)
            if os.path.samestat(os.fstat(descriptor), os.lstat(name, dir_fd=directory)):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass  # somebody who removes leftovers was faster than our lock
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EBUSY, "others keep removing it", name)


def _spare_path(path: str, owner: int | str) -> str:
    """Return where the spare file of an owner lies: beside the rank's directory at `path`."""
    folder, rank = os.path.split(path)
    return os.path.join(folder, f".spare_{rank}_{owner}")


def _create_from_spare(spare: str, name: str, directory: int) -> int:
    """Make and lock the file with that name: of the spare one if it is fit, else a new one."""
    descriptor = _create_locked(name, directory)
    try:
        # Whoever renames it has it: nobody else can take it, or put another in its place.
        os.rename(spare, name, dst_dir_fd=directory)
    except OSError:
        return descriptor
    os.close(descriptor)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        descriptor = os.open(name, flags, dir_fd=directory)
        stack.callback(os.close, descriptor)
        lock_file(descriptor)
        if _is_only_ours(descriptor, name, directory):
            stack.pop_all()
            return descriptor
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return _create_locked(name, directory)


def _is_only_ours(descriptor: int, name: str, directory: int) -> bool:
    """Return whether only we may use a file, and nobody has linked, opened or mapped it.

    Raises:
        OSError: Somebody has it open, or the system does not tell.
    """
    status = os.fstat(descriptor)
    # The system gives a lease only on a file that nobody else has open. Who opens it before the
    # lease is given back causes a signal, which must not be one that ends this process.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    is_private = status.st_uid == os.geteuid() and status.st_mode == stat.S_IFREG | _MODE
    is_there = os.path.samestat(status, os.lstat(name, dir_fd=directory))
    return is_private and is_there and status.st_nlink == 1


def _remove_dead(name: str, directory: int) -> str:
    """Remove a file in progress and return its note.

    Raises:
        BlockingIOError: Its writer lives.
        FileNotFoundError: It is gone.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        os.unlink(name, dir_fd=directory)
        return ""
    try:
        lock_file(descriptor)
        if not os.path.samestat(os.fstat(descriptor), os.lstat(name, dir_fd=directory)):
            raise BlockingIOError(errno.EAGAIN, "a writer has just replaced it", name)
        os.unlink(name, dir_fd=directory)
        head = os.read(descriptor, len(_FAILURE_MAGIC) + _FAILURE_LIMIT_BYTES)
    finally:
        os.close(descriptor)
    if not head.startswith(_FAILURE_MAGIC):
        return ""
    return head[len(_FAILURE_MAGIC) :].decode(errors="replace")
