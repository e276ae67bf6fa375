# SPDX-License-Identifier: Apache-2.0
"""Paths that can be trusted, files that are ours alone, locks, and memory to share."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from typing import BinaryIO

from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError, UnsafePathError

__all__ = [
    "SEALS", "atomic_write", "lock_file", "open_append_beneath", "private_dir", "read_regular_file",
    "remove_tree_at", "resolve_under_allowed_roots", "shared_memory", "sync_directory",
    "validate_directory", "validate_filepath",
]  # fmt: skip

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LONGEST_NAME_BYTES = 255
_REMOVE_ROUNDS = 5
_FIRST_LOCK_PAUSE_S, _LONGEST_LOCK_PAUSE_S = 0.001, 0.1
# Numbers of linux/fcntl.h, where this Python does not know them.
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
"""Seals of memory that no holder of its descriptor can shrink or grow."""
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)


def validate_directory(dir_path: str | os.PathLike[str]) -> None:
    """Check that the directory `dir_path`, if it exists, can be trusted and read.

    Raises:
        UnsafePathError: It is no directory, it or a parent is a symbolic link, it cannot be read,
            everybody may write to it without the sticky bit, or a group may write to it and it
            belongs to somebody else. Every cause is an `OSError` to the caller.
    """
    dir_path = os.fspath(dir_path)
    status = _status_without_links(dir_path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafePathError(errno.ENOTDIR, "not a directory", dir_path)
    if not os.access(dir_path, os.R_OK | os.X_OK):
        raise UnsafePathError(errno.EACCES, "the directory cannot be read", dir_path)
    if status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH:
        message = "everybody may write to the directory and it has no sticky bit"
        raise UnsafePathError(errno.EPERM, message, dir_path)
    if status.st_mode & stat.S_IWGRP and status.st_uid != os.geteuid():
        message = f"a group may write to the directory, which belongs to uid {status.st_uid}"
        raise UnsafePathError(errno.EPERM, message, dir_path)


def validate_filepath(file_path: str | os.PathLike[str]) -> None:
    """Check that `file_path`, if it exists, is a regular file in a trusted directory.

    Raises:
        UnsafePathError: It is no regular file, it or a parent is a symbolic link, dangling or
            not, or `validate_directory` refuses its directory. Every cause is an `OSError`.
    """
    file_path = os.fspath(file_path)
    status = _status_without_links(file_path)
    if status is None:
        return
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePathError(errno.EINVAL, "not a regular file", file_path)
    validate_directory(os.path.dirname(os.path.abspath(file_path)))


def resolve_under_allowed_roots(
    path: str | os.PathLike[str], allowed_roots: Iterable[str | os.PathLike[str]]
) -> str:
    """Return the real path of `path` when it is one of `allowed_roots` or lies under one.

    Raises:
        PathOutsideRootsError: The path leads outside of all roots; this is a `ValueError`.

    Example:
        >>> resolve_under_allowed_roots("/usr/../dev/null", ["/dev"])
        '/dev/null'
    """
    path = os.fspath(path)
    if "\0" in path:
        raise PathOutsideRootsError(errno.EINVAL, "the path holds a null character", path)
    resolved = os.path.realpath(path)
    roots = [os.path.realpath(root) for root in allowed_roots]
    if any(os.path.commonpath([root, resolved]) == root for root in roots):
        return resolved
    raise PathOutsideRootsError(errno.EPERM, f"leads outside of {roots}", path)


def _status_without_links(path: str) -> os.stat_result | None:
    """Return the status of a path in which no component is a symbolic link; `None`: missing."""
    status = None
    walked = "/"
    for name in os.path.abspath(path).split("/"):
        walked = os.path.join(walked, name)
        try:
            status = os.lstat(walked)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(status.st_mode):
            raise UnsafePathError(errno.ELOOP, f"{walked} is a symbolic link", path)
    return status


def open_append_beneath(root_fd: int, relpath: str | os.PathLike[str], mode: int = 0o600) -> int:
    """Return a descriptor of a regular file below a directory, made if missing, for appending.

    The path is walked component by component without following symbolic links, so nobody who
    can write below the root can lead it outside.

    Args:
        root_fd: Descriptor of the directory; it stays open.
        relpath: Path below it; its directories must exist.
        mode: Permissions of a new file, less the umask.

    Raises:
        PathOutsideRootsError: The path is absolute, empty, or has a `..`.
        UnsafePathError: A component is a symbolic link, or the end no file with a single name.
        OSError: It cannot be opened.
    """
    relpath = os.fspath(relpath)
    names = [name for name in relpath.split("/") if name not in ("", ".")]
    if relpath.startswith("/") or relpath.endswith("/") or ".." in names or not names:
        message = "not a path of a file below a directory"
        raise PathOutsideRootsError(errno.EPERM, message, relpath)
    directory = os.dup(root_fd)
    try:
        for name in names[:-1]:
            child = open_unlinked(name, _OPEN_DIRECTORY, directory, relpath)
            os.close(directory)
            directory = child
        # O_NONBLOCK: a pipe planted under this name must not hold us up.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = open_unlinked(names[-1], flags, directory, relpath, mode)
    finally:
        os.close(directory)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        message = "not a regular file with a single name"
        raise UnsafePathError(errno.EINVAL, message, relpath)
    return descriptor


def atomic_write(
    path: str | os.PathLike[str],
    data: bytes | bytearray | memoryview,
    mode: int | None = 0o600,
    fsync: bool = True,
) -> None:
    """Write a file so that readers see the old content or the new, and never a part.

    A symbolic link under this name is replaced, not followed. A device, a pipe or a socket is not
    replaced: root would take `/dev/full` away from everybody.

    Args:
        path: The file; its directory must exist.
        data: The content.
        mode: Permissions of the file, whatever the umask; None for what a new file gets.
        fsync: Wait until it would survive a power cut.

    Raises:
        OSError: It cannot be written, or is no file; the old content is then untouched.
    """
    parent, name = os.path.split(path)
    directory = os.open(parent or ".", _OPEN_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            kind = os.lstat(name, dir_fd=directory).st_mode
            if stat.S_ISDIR(kind):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
            if not stat.S_ISREG(kind) and not stat.S_ISLNK(kind):
                raise OSError(errno.EINVAL, "not a regular file", name)
        suffix = f".{os.urandom(8).hex()}.tmp"
        space = _LONGEST_NAME_BYTES - 1 - len(suffix)
        temporary = "." + os.fsdecode(os.fsencode(name)[:space]) + suffix
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            first_mode = 0o666 if mode is None else 0o600
            descriptor = os.open(temporary, flags, first_mode, dir_fd=directory)
            try:
                if mode is not None:
                    os.fchmod(descriptor, mode)
                remaining = memoryview(data).cast("B")
                while remaining:
                    remaining = remaining[os.write(descriptor, remaining) :]
                if fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            # Also on KeyboardInterrupt: nothing is swallowed, the temporary file goes.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
            raise
        if fsync:
            sync_directory(directory)
    finally:
        os.close(directory)


def sync_directory(directory: int | str | os.PathLike[str]) -> None:
    """Wait until the names in `directory`, a path or descriptor, would survive a power cut.

    A descriptor stays open. File systems that cannot do so are left alone.

    Raises:
        OSError: It cannot be opened, or the device failed.
    """
    descriptor = (
        directory if isinstance(directory, int) else os.open(directory or ".", _OPEN_DIRECTORY)
    )
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory and say so like this.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        if descriptor is not directory:
            os.close(descriptor)


def read_regular_file(
    path: str | os.PathLike[str], max_bytes: int, *, follows_symlink: bool = False
) -> bytes:
    """Return at most `max_bytes`, the first, of file `path`, which another user may have written.

    Raises:
        OSError: It is absent, unreadable, a symbolic link without `follows_symlink`, or no regular
            file: a pipe or a device would make the reader wait or read for ever.
    """
    with open_regular_file(path, follows_symlink=follows_symlink) as file:
        return file.read(max_bytes)


def open_regular_file(path: str | os.PathLike[str], *, follows_symlink: bool) -> BinaryIO:
    """Open a file for reading; raise as `read_regular_file`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follows_symlink else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        # Before `open`, which would forget to close the descriptor of a directory.
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(descriptor, "rb")


def private_dir(path: str | os.PathLike[str]) -> str:
    """Create directory `path` that only we may enter, or close an existing one; return the path.

    Missing parents are created likewise. A directory of ours that others could read is closed.

    Raises:
        UnsafePathError: It is a link or no directory, of somebody else, or others can write to it.
        OSError: It cannot be created.
    """
    path = os.fspath(path)
    _make_private(os.path.abspath(path))
    descriptor = open_unlinked(path.rstrip("/") or "/", _OPEN_DIRECTORY, None, path)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            message = f"the directory belongs to uid {status.st_uid}"
            raise UnsafePathError(errno.EPERM, message, path)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafePathError(errno.EPERM, "others may write to the directory", path)
        if stat.S_IMODE(status.st_mode) != stat.S_IRWXU:
            os.fchmod(descriptor, stat.S_IRWXU)
    finally:
        os.close(descriptor)
    return path


def remove_tree_at(name: str, directory_fd: int) -> None:
    """Remove `name` in `directory_fd` with all that is in it; follow no symbolic link.

    What others remove or add meanwhile is no error, as long as the end is reached.

    Raises:
        OSError: Something cannot be removed.
    """
    for _ in range(_REMOVE_ROUNDS):
        try:
            child = os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)
            return
        try:
            for entry_name in os.listdir(child):
                remove_tree_at(entry_name, child)
        finally:
            os.close(child)
        try:
            os.rmdir(name, dir_fd=directory_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise OSError(errno.ENOTEMPTY, "others keep adding to the directory", name)


def remove_tree(path: str) -> None:
    """Remove `path` as `remove_tree_at` does; a parent that is missing is no error, either."""
    parent, name = os.path.split(path)
    try:
        directory = os.open(parent, _OPEN_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        remove_tree_at(name, directory)
    finally:
        os.close(directory)


def _make_private(path: str) -> None:
    # Not os.makedirs: it leaves the permissions of parents to the umask.
    if os.path.lexists(path):
        return
    _make_private(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def open_unlinked(
    name: str, flags: int, directory_fd: int | None, path: str, mode: int = 0o600
) -> int:
    """Open `name`, the last part of `path` or of its beginning; refuse a symbolic link."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=directory_fd)
    except OSError as error:
        # With O_DIRECTORY a symbolic link gives ENOTDIR, and so does a file.
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            message = f"{name} is a symbolic link or of the wrong kind"
            raise UnsafePathError(error.errno, message, path) from error
        raise


def lock_file(descriptor: int, timeout_s: float = 0.0) -> None:
    """Take the exclusive `flock` of an open file or directory.

    The lock ends when the last copy of the descriptor is closed; where forked children may have
    copies, end it with `fcntl.flock(descriptor, fcntl.LOCK_UN)`.

    Args:
        descriptor: The open file.
        timeout_s: Seconds to wait for whoever has the lock; default: not at all.

    Raises:
        BlockingIOError: Somebody has the lock, for all of that time.
        OSError: The file system has no locks, or lost them during the wait.
    """
    until = time.monotonic() + timeout_s
    pause_s = _FIRST_LOCK_PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if timeout_s <= 0:
                raise
            left_s = until - time.monotonic()
            if left_s <= 0:
                message = f"another process has had the lock for {timeout_s:g} s"
                raise BlockingIOError(errno.EAGAIN, message) from error
        else:
            return
        # The kernel's own wait has no deadline.
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_LOCK_PAUSE_S)


def shared_memory(name: str, size_bytes: int, directories: Iterable[str]) -> int:
    """Return a descriptor of memory that processes can share: only the descriptor travels.

    Args:
        name: For people who look at a process's descriptors.
        size_bytes: Its size, which is sealed; 0: a file that may grow.
        directories: Where else a file without a name is made: the first with space is taken.

    Raises:
        OSError: No directory has space; it names the last one.
    """
    if os.environ.get("NVRX_FORCE_NO_MEMFD") != "1" and hasattr(os, "memfd_create"):
        # An error: seccomp or an old kernel.
        with contextlib.suppress(OSError):
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            return _sized(fd, size_bytes, is_sealed=True)
    import tempfile

    problem: OSError | None = None
    for directory in directories:
        try:
            fd, path = tempfile.mkstemp(prefix=f"{name}-", dir=directory)
            os.unlink(path)
            return _sized(fd, size_bytes, is_sealed=False)
        except OSError as error:
            text = f"no shared memory {name!r}: {error.strerror}"
            problem = OSError(error.errno, text, directory)
    raise problem or OSError(errno.ENOENT, "no directory is given")


def _sized(fd: int, size_bytes: int, *, is_sealed: bool) -> int:
    try:
        if size_bytes:
            # Blocks now: a store into a hole of a full file system kills with SIGBUS.
            os.posix_fallocate(fd, 0, size_bytes)
            if is_sealed:
                fcntl.fcntl(fd, _ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
