# SPDX-License-Identifier: Apache-2.0
"""Owns where logs may lie: roots given at the start, and the way from them to a file.

A path is judged twice: its text when a chunk names it, and each of its components while it is
opened, from the root's descriptor on, so that nothing swapped in between leads outside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel.ledger import is_ledger_name
from nvidia_resiliency_ext.shared_utils._funnel.refusal import Refusal
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, UnsafePathError
from nvidia_resiliency_ext.shared_utils.os_utils import open_append_beneath

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Place", "Roots"]

FILE_MODE = 0o640
DIRECTORY_MODE = 0o750
_MAX_PATH_BYTES = 4000
# Of the 255 that file systems allow, some are for the ledger's name beside it.
_MAX_NAME_BYTES = 230
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FIRST_PRINTABLE, _DELETE = 0x20, 0x7F


@dataclass(frozen=True, slots=True)
class Place:
    """A file below a root.

    Attributes:
        root: The root, resolved.
        names: Directories, then the file.
    """

    root: str
    names: tuple[str, ...]


class Roots:
    """Directories below which logs may lie; safe in all threads.

    Args:
        paths: Existing directories. They are resolved here, once.
        must_exist: Without it they need not: for who judges paths and opens none.

    Raises:
        ConfigError: One is no directory that can be entered, or there is none.
    """

    def __init__(self, paths: Iterable[str], *, must_exist: bool = True) -> None:
        self._resolved: dict[str, str] = {}
        for path in paths:
            real = path
            try:
                real = os.path.realpath(path)
                if must_exist:
                    os.close(os.open(real, _OPEN_DIRECTORY))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise ConfigError(f"allowed root {path!r}: {reason}") from error
            # As it was given and as it is: senders may know either.
            self._resolved[os.path.abspath(path)] = real
            self._resolved[real] = real
        if not self._resolved:
            raise ConfigError("no allowed root is given")

    def locate(self, path: str) -> Place:
        """Return the place that a path names, from its text alone.

        Raises:
            Refusal: It is empty, relative, too long, outside of all roots, or not a name that a log
                may have.
        """
        if not path:
            raise _invalid("file_path is empty")
        shown = repr(path if len(path) <= 200 else path[:200] + "...")  # noqa: PLR2004
        if len(path.encode()) > _MAX_PATH_BYTES:
            raise Refusal("RESOURCE_EXHAUSTED", f"the path is too long: {shown}")
        if any(ord(c) < _FIRST_PRINTABLE or ord(c) == _DELETE for c in path):
            raise _invalid(f"the path has control characters: {shown}")
        names = path.split("/")
        if names[0] or not names[-1] or names[-1] == "." or ".." in names:
            raise _invalid(f"not an absolute path of a file without '..': {shown}")
        names = [name for name in names if name not in ("", ".")]
        if any(len(name.encode()) > _MAX_NAME_BYTES for name in names):
            raise Refusal("RESOURCE_EXHAUSTED", f"a name in the path is too long: {shown}")
        if is_ledger_name(names[-1]):
            raise _invalid(f"the name is the funnel's own: {shown}")
        # The longest root wins, so that a root below another one is entered by itself.
        for count in range(len(names) - 1, -1, -1):
            root = self._resolved.get("/" + "/".join(names[:count]))
            if root is not None:
                return Place(root, tuple(names[count:]))
        raise _invalid(f"outside of the allowed roots: {shown}")

    def open(self, place: Place) -> tuple[int, int]:
        """Open a log for appending, with the directories to it made where they are missing.

        Returns:
            Descriptors of its directory and of the file; the caller owns both.

        Raises:
            UnsafePathError: A component is a symbolic link or of the wrong kind.
            OSError: It cannot be opened now.
        """
        directory = os.open(place.root, _OPEN_DIRECTORY)
        try:
            for name in place.names[:-1]:
                child = _enter(directory, name)
                os.close(directory)
                directory = child
            return directory, _open_log(directory, place.names[-1])
        except BaseException:
            # Nothing is swallowed; only the descriptor goes.
            os.close(directory)
            raise


def _enter(directory: int, name: str) -> int:
    try:
        return _open_directory(directory, name)
    except FileNotFoundError:
        # Where somebody else made it, or a dangling link, the next line tells.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)
        return _open_directory(directory, name)


def _open_directory(directory: int, name: str) -> int:
    try:
        return os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            message = f"{name} is a symbolic link or no directory"
            raise UnsafePathError(error.errno, message) from error
        raise


def _open_log(directory: int, name: str) -> int:
    try:
        # Opening some devices does something already, so an honest look comes first;
        # open_append_beneath looks again at what it has opened.
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise UnsafePathError(errno.EINVAL, f"{name} is no regular file")
    return open_append_beneath(directory, name, FILE_MODE)


def _invalid(reason: str) -> Refusal:
    return Refusal("INVALID_ARGUMENT", reason)
