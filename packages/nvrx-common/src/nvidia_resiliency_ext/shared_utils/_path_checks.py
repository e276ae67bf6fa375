# SPDX-License-Identifier: Apache-2.0
"""Judging a path as it is now; it opens and creates nothing."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError, UnsafePathError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["resolve_under_allowed_roots", "validate_directory", "validate_filepath"]


def validate_directory(dir_path: str | os.PathLike[str]) -> None:
    """Check that a directory, if it exists, can be trusted and read.

    Args:
        dir_path: The directory; it need not exist.

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
    """Check that a file, if it exists, is a regular file in a directory that can be trusted.

    Args:
        file_path: The file; it need not exist.

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
    """Return the real path of `path` when it is one of the roots or lies under one.

    Args:
        path: The path.
        allowed_roots: Directories below which it may lie.

    Raises:
        PathOutsideRootsError: The path leads outside of all roots; this is a `ValueError`.
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
