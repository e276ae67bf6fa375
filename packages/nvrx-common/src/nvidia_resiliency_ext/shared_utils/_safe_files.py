# SPDX-License-Identifier: Apache-2.0
"""Opening, writing and removing files in ways that nobody can race; it decides no policy."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError, UnsafePathError

__all__ = [
    "atomic_write",
    "open_append_beneath",
    "private_dir",
    "read_regular_file",
    "remove_tree_at",
]

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LONGEST_NAME_BYTES = 255
_REMOVE_ROUNDS = 5


def open_append_beneath(root_fd: int, relpath: str | os.PathLike[str], mode: int = 0o600) -> int:
    """Open a regular file below a directory for appending, and create it if it is missing.

    The path is walked component by component without following symbolic links, so nobody who
    can write below the root can lead it outside.

    Args:
        root_fd: Descriptor of the directory; it stays open.
        relpath: Path below it; its directories must exist.
        mode: Permissions of a new file, less the umask.

    Returns:
        A descriptor that the caller owns.

    Raises:
        PathOutsideRootsError: The path is absolute, empty, or has a `..`.
        UnsafePathError: A component is a symbolic link, or the end is no regular file with a
            single name.
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
            child = _open_unlinked(name, _OPEN_DIRECTORY, directory, relpath)
            os.close(directory)
            directory = child
        # O_NONBLOCK: a pipe planted under this name must not hold us up.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = _open_unlinked(names[-1], flags, directory, relpath, mode)
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
        _require_replaceable(name, directory)
        temporary = _temporary_name(name)
        try:
            _write_new(directory, temporary, data, mode, fsync=fsync)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            # Also on KeyboardInterrupt: nothing is swallowed, the temporary file goes.
            _unlink_if_there(temporary, directory)
            raise
        if fsync:
            sync_directory(directory)
    finally:
        os.close(directory)


def sync_directory(directory: int | str | os.PathLike[str]) -> None:
    """Wait until the names in a directory would survive a power cut.

    File systems that cannot do so are left alone.

    Args:
        directory: Its path, or a descriptor of it, which stays open.

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


def _require_replaceable(name: str, directory: int) -> None:
    try:
        kind = os.lstat(name, dir_fd=directory).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(kind) and not stat.S_ISLNK(kind):
        raise OSError(errno.EINVAL, "not a regular file", name)


def read_regular_file(
    path: str | os.PathLike[str], max_bytes: int, *, follows_symlink: bool = False
) -> bytes:
    """Return the beginning of a file that another user may have written.

    Args:
        path: The file.
        max_bytes: How many bytes to read at most.
        follows_symlink: Accept a symbolic link. Default False.

    Raises:
        OSError: It is absent, unreadable, a symlink that must not be followed, or no regular file:
            a pipe or a device would make the reader wait or read for ever.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follows_symlink else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        # Before `open`, which would forget to close the descriptor of a directory.
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    with open(descriptor, "rb") as file:
        return file.read(max_bytes)


def private_dir(path: str | os.PathLike[str]) -> str:
    """Create a directory that only we may enter, or make sure that an existing one is.

    Missing parents are created likewise. An existing directory of ours that others could only
    read is closed to them.

    Args:
        path: The directory.

    Returns:
        The path.

    Raises:
        UnsafePathError: It is a symbolic link or no directory, belongs to somebody else, or
            others could write to it.
        OSError: It cannot be created.
    """
    path = os.fspath(path)
    _make_private(os.path.abspath(path))
    descriptor = _open_unlinked(path.rstrip("/") or "/", _OPEN_DIRECTORY, None, path)
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
    """Remove a file or a directory with all that is in it; follow no symbolic link.

    What others remove or add meanwhile is no error, as long as the end is reached.

    Args:
        name: Entry of the directory.
        directory_fd: The directory that holds it.

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
            _unlink_if_there(name, directory_fd)
            return
        try:
            with os.scandir(child) as entries:
                inside = [entry.name for entry in entries]
            for entry_name in inside:
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


def _make_private(path: str) -> None:
    # Not os.makedirs: it leaves the permissions of parents to the umask.
    if os.path.lexists(path):
        return
    _make_private(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _open_unlinked(
    name: str, flags: int, directory_fd: int | None, path: str, mode: int = 0o600
) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=directory_fd)
    except OSError as error:
        # With O_DIRECTORY a symbolic link gives ENOTDIR, and so does a file.
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            message = f"{name} is a symbolic link or of the wrong kind"
            raise UnsafePathError(error.errno, message, path) from error
        raise


def _write_new(
    directory: int,
    name: str,
    data: bytes | bytearray | memoryview,
    mode: int | None,
    *,
    fsync: bool,
) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666 if mode is None else 0o600, dir_fd=directory)
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


def _temporary_name(name: str) -> str:
    suffix = f".{os.urandom(8).hex()}.tmp"
    room = _LONGEST_NAME_BYTES - 1 - len(suffix)
    return "." + os.fsdecode(os.fsencode(name)[:room]) + suffix


def _unlink_if_there(name: str, directory_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=directory_fd)
    except FileNotFoundError:
        return
