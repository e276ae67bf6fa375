# SPDX-License-Identifier: Apache-2.0
"""The private directory of one run: its sockets and small files; it opens no socket itself.

It is called `nvrx-<label>-<random>`, open to our user only, and holds `owner.json`, by which a
later start can tell that the run is over and clean up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import time
from collections.abc import Mapping
from typing import final

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError

from .os_utils import atomic_write, read_regular_file, remove_tree

__all__ = [
    "MAX_SOCKET_PATH_BYTES",
    "RunDir",
    "live_run_dirs",
    "remove_stale_run_dirs",
    "stale_run_dirs",
]

MAX_SOCKET_PATH_BYTES = 107
"""Longest path that the kernel takes for a Unix socket."""

logger = logging.getLogger("nvrx")

_RESERVED_FOR_NAMES_BYTES = 40
_RANDOM_BYTES = 8
_LONGEST_LABEL = 24
_LABEL_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_OWNER_FILE = "owner.json"
_LARGEST_OWNER_FILE_BYTES = 4096


@final
class RunDir:
    """A 0700 directory at `path` that lives as long as a run; the run's owner removes it.

    Example:
        >>> with RunDir.create("demo") as run_dir:
        ...     path = run_dir.socket_path("launcher.sock")
    """

    def __init__(self, path: str) -> None:
        """Take over a directory that a process of our user made with `create`.

        Raises:
            UnsafePathError: It is no directory of ours, or others may enter it.
            OSError: It is not there.
        """
        status = os.lstat(path)
        _refuse_foreign(path, status)
        self.path = os.path.abspath(path)
        self._identity = (status.st_dev, status.st_ino)

    @classmethod
    def create(cls, label: str, environ: Mapping[str, str] = os.environ) -> RunDir:
        """Make a new run directory owned by this process.

        It lies in `$XDG_RUNTIME_DIR`, `$TMPDIR`, `/tmp` or `/dev/shm`: the first that is ours or
        sticky, can be written, and leaves space for socket names of 40 bytes.

        Args:
            label: What the run is, in at most 24 letters, digits, `_`, `.` and `-`.
            environ: Names the parent directories.

        Raises:
            ValueError: The label is none.
            OSError: No parent takes a run directory.
        """
        if not 0 < len(label) <= _LONGEST_LABEL or not _LABEL_CHARACTERS.issuperset(label):
            raise ValueError(f"{label!r} is no label of 1 to {_LONGEST_LABEL} plain characters")
        name = f"nvrx-{label}-{os.urandom(_RANDOM_BYTES).hex()}"
        last_error: OSError | None = None
        for parent in trusted_parents(environ):
            path = os.path.join(parent, name)
            space_bytes = MAX_SOCKET_PATH_BYTES - len(os.fsencode(path)) - 1
            if space_bytes < _RESERVED_FOR_NAMES_BYTES:
                continue
            try:
                return cls._create_at(path, label)
            except OSError as error:
                last_error = error
        message = "no place for a run directory: set TMPDIR to a short path that can be written"
        if last_error is not None:
            message += f" (the last one tried: {last_error.strerror})"
        raise OSError(errno.ENOENT, message) from last_error

    @classmethod
    def _create_at(cls, path: str, label: str) -> RunDir:
        own = procfs.read_stat(os.getpid())
        owner = {
            "pid": os.getpid(),
            "start_ticks": None if own is None else own.start_ticks,
            "boot_id": procfs.boot_id(),
            "host": os.uname().nodename,
            "pid_namespace": procfs.pid_namespace(),
            "uid": os.geteuid(),
            "created": time.time(),
            "label": label,
        }
        os.mkdir(path, 0o700)
        owner_file = os.path.join(path, _OWNER_FILE)
        try:
            atomic_write(owner_file, json.dumps(owner).encode(), fsync=False)
            return cls(path)
        except OSError:
            # This needs no free descriptor.
            with contextlib.suppress(OSError):
                os.unlink(owner_file)
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise

    def socket_path(self, name: str) -> str:
        """Return the path of the socket `name` in the directory; 40 bytes always fit.

        Raises:
            ValueError: The name is not a plain file name, or the path is too long.
        """
        if not name or "/" in name or "\0" in name or name in (".", "..", _OWNER_FILE):
            raise ValueError(f"{name!r} is no name for a socket")
        path = os.path.join(self.path, name)
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{path!r} is over {MAX_SOCKET_PATH_BYTES} bytes, too long a path")
        return path

    def remove(self) -> None:
        """Remove the directory with its content; harmless when it is gone or was replaced.

        Raises:
            OSError: Something in it cannot be removed.
        """
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if (status.st_dev, status.st_ino) == self._identity:
            remove_tree(self.path)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def stale_run_dirs(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return this user's run directories, found by `environ`, whose owner no longer exists.

    An owner no longer exists if it belongs to an earlier boot of this host, or if its process
    number is free or belongs to a process that started at another time. An owner that cannot be
    examined from here (on another host, in another container) counts as alive.
    """
    if not procfs.is_available() or not procfs.boot_id():
        return []
    return sorted(path for path in _paths("nvrx-", environ) if _is_stale(path))


def live_run_dirs(label: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return our run directories with this `label`, found by `environ`, but stale ones."""
    return sorted(p for p in _paths(f"nvrx-{label}-", environ) if _is_stale(p) is False)


def remove_stale_run_dirs(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Remove the directories that `stale_run_dirs` finds in `environ`; return their paths."""
    removed = []
    for path in stale_run_dirs(environ):
        try:
            remove_tree(path)
        except OSError as error:
            logger.warning("cannot remove the stale run directory %s: %s", path, error)
        else:
            removed.append(path)
    return removed


def _paths(prefix: str, environ: Mapping[str, str]) -> list[str]:
    """Return the paths of run directories whose names begin with `prefix`."""
    found = []
    for parent in trusted_parents(environ):
        try:
            with os.scandir(parent) as entries:
                found += [entry.path for entry in entries if entry.name.startswith(prefix)]
        except OSError as error:
            logger.debug("cannot look for run directories in %s: %s", parent, error)
    return found


def trusted_parents(environ: Mapping[str, str], preferred: str = "") -> list[str]:
    """Return the parents for run directories, of `environ` and usual ones, that can be trusted.

    `preferred` comes first, if it can.
    """
    own_uid = os.geteuid()
    named = [preferred, environ.get("XDG_RUNTIME_DIR"), environ.get("TMPDIR")]
    candidates = [*named, "/tmp", "/dev/shm"]  # noqa: S108
    parents: list[str] = []
    for candidate in candidates:
        if not candidate or not os.path.isabs(candidate):
            continue
        parent = os.path.realpath(candidate)
        try:
            status = os.stat(parent)
        except OSError:
            continue
        # In a directory that others can write to, only the sticky bit keeps our name ours.
        sticky = bool(status.st_mode & stat.S_ISVTX)
        closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        trusted = sticky or (closed and status.st_uid in (own_uid, 0))
        if trusted and os.access(parent, os.R_OK | os.W_OK | os.X_OK) and parent not in parents:
            parents.append(parent)
    return parents


def _is_stale(path: str) -> bool | None:
    """Return whether the owner of a run directory no longer exists; None: it is none of ours."""
    try:
        _refuse_foreign(path, os.lstat(path))
    except OSError:
        return None
    try:
        data = read_regular_file(os.path.join(path, _OWNER_FILE), _LARGEST_OWNER_FILE_BYTES)
        owner = json.loads(data)
    except (OSError, ValueError):
        return False
    is_here = isinstance(owner, dict) and owner.get("host") == os.uname().nodename
    if not is_here or not owner.get("boot_id"):
        return False
    if owner["boot_id"] != procfs.boot_id():
        return True
    pid, start_ticks = owner.get("pid"), owner.get("start_ticks")
    if owner.get("pid_namespace") != procfs.pid_namespace() or not isinstance(pid, int):
        return False
    stat_now = procfs.read_stat(pid)
    if stat_now is None or not stat_now.running:
        return True
    return isinstance(start_ticks, int) and stat_now.start_ticks != start_ticks


def _refuse_foreign(path: str, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafePathError(errno.ENOTDIR, "not a directory", path)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        message = "the directory belongs to somebody else, or is open to others"
        raise UnsafePathError(errno.EPERM, message, path)
