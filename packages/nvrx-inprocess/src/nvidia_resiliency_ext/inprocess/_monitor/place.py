# SPDX-License-Identifier: Apache-2.0
"""The private directory in which the ranks of a node meet their monitor: socket and lock.

All ranks of a job on a node come to the same one without having to be told. Whoever holds the lock
may start a monitor, or remove the directory; both take microseconds to milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import socket
import stat
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError
from nvidia_resiliency_ext.shared_utils.os_utils import (
    atomic_write,
    lock_file,
    private_dir,
    read_regular_file,
    remove_tree_at,
)
from nvidia_resiliency_ext.shared_utils.rundir import MAX_SOCKET_PATH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["NodePlace"]

logger = logging.getLogger("nvrx")

_PREFIX = "nvrx-ip-"
_SOCKET = "monitor.sock"
_LOCK = "lock"
_MONITOR = "monitor.json"
_MONITOR_BYTES = 4096
_BACKLOG = 512
_MOST_REMOVALS = 100
_JOB_NAMES = ("NVRX_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_CYCLE_NAMES = ("NVRX_CYCLE", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_LAUNCHER_SOCKET = "FT_LAUNCHER_IPC_SOCKET"
_GONE = (FileNotFoundError, NotADirectoryError)


class NodePlace:
    """One such directory.

    Attributes:
        path: Its absolute path.
    """

    def __init__(self, path: str) -> None:
        """Name a directory; it need not be there."""
        self.path = path

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> NodePlace:
        """Return the directory of this job on this node, and make it if it is not there.

        Raises:
            OSError: No place will have it.
        """
        name = _PREFIX + _identity(environ)
        last_error: OSError | None = None
        for parent in _parents(environ):
            path = os.path.join(parent, name)
            if len(os.fsencode(os.path.join(path, _SOCKET))) > MAX_SOCKET_PATH_BYTES:
                continue
            place = cls(path)
            try:
                os.close(place._open_lock())
            except OSError as error:
                last_error = error
                continue
            return place
        message = "no place where ranks and monitor can meet: set TMPDIR to a short path"
        if last_error is not None:
            message += f" that can be written (the last one tried: {last_error})"
        raise OSError(errno.ENOENT, message) from last_error

    def connect(self) -> socket.socket | None:
        """Return a connection to the monitor, or `None` when none listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Without blocking: the queue of a monitor that is stopped may be full.
            sock.settimeout(0.0)
            sock.connect(os.path.join(self.path, _SOCKET))
            sock.settimeout(None)
        except (ConnectionRefusedError, *_GONE):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def is_served(self) -> bool:
        """Return whether a monitor listens, without coming to it.

        Whoever comes is waited for: two monitors that came to each other would never end.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(os.path.join(self.path, _SOCKET))
            except (ConnectionRefusedError, *_GONE):
                return False
            except OSError as error:
                # Somebody is bound to it, with a socket of another kind than the probe.
                if error.errno != errno.EPROTOTYPE:
                    raise
        return True

    def listen(self) -> socket.socket:
        """Return a listening socket in the place of a dead monitor's; only under the lock."""
        path = os.path.join(self.path, _SOCKET)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            os.chmod(path, 0o600)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock.

        Raises:
            DeadlineExceededError: Somebody else holds it all the time.
            OSError: The directory cannot be used.
        """
        fd = self._lock(timeout_s)
        try:
            yield
        finally:
            # Closing alone is not enough: a child forked meanwhile holds the same lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def socket_inode(self) -> int | None:
        """Return what tells one listening socket here from a later one; `None` for none."""
        try:
            return os.lstat(os.path.join(self.path, _SOCKET)).st_ino
        except OSError:
            return None

    def name_monitor(self, pid: int, start_ticks: int) -> None:
        """Say which process is the monitor; a full disk costs a look at it, no more."""
        path = os.path.join(self.path, _MONITOR)
        try:
            atomic_write(path, json.dumps([pid, start_ticks]).encode(), fsync=False)
        except OSError as error:
            logger.warning("monitor_process: %s cannot be written: %s", path, error)

    def find_monitor(self) -> PidHandle | None:
        """Return the monitor's process, if it said which it is and still runs."""
        try:
            data = read_regular_file(os.path.join(self.path, _MONITOR), _MONITOR_BYTES)
            pid, start_ticks = (int(number) for number in json.loads(data))
            return PidHandle(pid, start_ticks)
        except (OSError, ValueError, TypeError):
            return None

    def remove(self) -> None:
        """Remove the directory; only under the lock."""
        parent, name = os.path.split(self.path)
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # At once for all others: else one could make a new lock in it, and lose that, too.
        gone = f"{name}-{secrets.token_hex(4)}"
        try:
            os.rename(name, gone, src_dir_fd=directory, dst_dir_fd=directory)
            remove_tree_at(gone, directory)
        finally:
            os.close(directory)

    def remove_stale_siblings(self) -> None:
        """Remove directories of our user beside this one in which no monitor lives any more."""
        parent = os.path.dirname(self.path)
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                path = os.path.join(parent, name)
                if name.startswith(_PREFIX) and path != self.path:
                    NodePlace(path).remove_if_stale()

    def remove_if_stale(self) -> None:
        """Remove the directory if it is ours and no monitor lives in it."""
        try:
            if os.lstat(self.path).st_uid != os.geteuid():
                return
            with self.locked(0.0):
                if not self.is_served():
                    self.remove()
        except (OSError, DeadlineExceededError) as error:
            logger.debug("monitor_process: %s is left alone: %s", self.path, error)

    def _lock(self, timeout_s: float) -> int:
        deadline = Deadline.after(timeout_s)
        while True:
            fd = self._open_lock()
            try:
                lock_file(fd, deadline.remaining())
                # The last holder may have removed the directory.
                if self._is_current(fd):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise DeadlineExceededError(
                    f"somebody has been starting the monitor of this node for over {timeout_s:g} s"
                ) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for left in reversed(range(_MOST_REMOVALS)):
            try:
                private_dir(self.path)
                return os.open(os.path.join(self.path, _LOCK), flags, 0o600)
            except FileNotFoundError:
                # The holder of the lock may be removing the directory in this moment.
                if not left:
                    raise
        raise AssertionError("not reached")

    def _is_current(self, fd: int) -> bool:
        try:
            found = os.lstat(os.path.join(self.path, _LOCK))
        except _GONE:
            return False
        return os.path.samestat(found, os.fstat(fd))


def _identity(environ: Mapping[str, str]) -> str:
    """Return a short name of user, host, namespaces, job and cycle."""
    parts = [
        str(os.geteuid()),
        os.uname().nodename,
        procfs.boot_id(),
        _namespace("net"),
        procfs.pid_namespace(),
        environ.get("MASTER_ADDR", ""),
        environ.get("MASTER_PORT", ""),
        *_first(environ, _JOB_NAMES),
        *_first(environ, _CYCLE_NAMES),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return next(([name, environ[name]] for name in names if environ.get(name)), ["", ""])


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _parents(environ: Mapping[str, str]) -> list[str]:
    """Return the directories in which a name of ours stays ours."""
    # The launcher's is removed with all that is in it, also when the monitor was killed.
    launchers = os.path.dirname(environ.get(_LAUNCHER_SOCKET, ""))
    own = [environ.get("XDG_RUNTIME_DIR"), environ.get("TMPDIR")]
    candidates = [launchers, *own, "/tmp", "/dev/shm"]  # noqa: S108
    parents: list[str] = []
    for candidate in candidates:
        if not candidate or not os.path.isabs(candidate):
            continue
        parent = os.path.realpath(candidate)
        try:
            status = os.stat(parent)
        except OSError:
            continue
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_trusted = is_sticky or (is_closed and status.st_uid in (os.geteuid(), 0))
        if stat.S_ISDIR(status.st_mode) and is_trusted and parent not in parents:
            parents.append(parent)
    return parents
