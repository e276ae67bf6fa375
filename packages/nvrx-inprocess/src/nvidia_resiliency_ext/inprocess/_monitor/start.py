# SPDX-License-Identifier: Apache-2.0
"""Start or find the one monitor of a node: its private directory, lock, socket; exec.

Under the lock a monitor is started, and the directory removed; both take milliseconds.
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
import subprocess
import sys
from collections.abc import Iterator, Mapping

from nvidia_resiliency_ext.inprocess._monitor.messages import START_LIMIT_S
from nvidia_resiliency_ext.inprocess.exception import InternalError
from nvidia_resiliency_ext.shared_utils import procfs, unix_sockets
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError, NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import lock_file, private_dir, remove_tree_at
from nvidia_resiliency_ext.shared_utils.rundir import MAX_SOCKET_PATH_BYTES, trusted_parents
from nvidia_resiliency_ext.shared_utils.wire import require_same_user

logger = logging.getLogger("nvrx")
_PREFIX = "nvrx-ip-"
_SOCKET = "monitor.sock"
_LOCK = "lock"
_BACKLOG = 512
_MOST_REMOVALS = 100
_JOB_NAMES = ("NVRX_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_CYCLE_NAMES = ("NVRX_CYCLE", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_LAUNCHER_SOCKET = "FT_LAUNCHER_IPC_SOCKET"
_GONE = (FileNotFoundError, NotADirectoryError)


class NodeDirectory:
    """One such directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = os.path.join(path, _SOCKET)

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> NodeDirectory:
        """Return the directory of this job on this node; create a missing one."""
        name = _PREFIX + _identity(environ)
        last_error: OSError | None = None
        # The launcher removes its directory also when the monitor was killed.
        launchers = os.path.dirname(environ.get(_LAUNCHER_SOCKET, ""))
        for parent in trusted_parents(environ, launchers):
            directory = cls(os.path.join(parent, name))
            if len(os.fsencode(directory._socket)) <= MAX_SOCKET_PATH_BYTES:
                try:
                    os.close(directory._open_lock())
                except OSError as error:
                    last_error = error
                else:
                    return directory
        message = "no directory for the socket of ranks and monitor: set TMPDIR to a short path"
        if last_error is not None:
            message += f" that can be written (the last one tried: {last_error})"
        raise OSError(errno.ENOENT, message) from last_error

    def connect(self) -> socket.socket | None:
        """Return a connection to the monitor, or `None` when none listens."""
        try:
            # Without waiting: the queue of a monitor that is stopped may be full.
            return unix_sockets.connect(self._socket, 0.0)
        except (ConnectionRefusedError, *_GONE):
            return None

    def is_served(self) -> bool:
        """Probe without connecting; a connection would keep the other monitor alive."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._socket)
            except (ConnectionRefusedError, *_GONE):
                return False
            except OSError as error:
                # A socket of another kind than the probe is bound to it.
                if error.errno != errno.EPROTOTYPE:
                    raise
        return True

    def listen(self) -> socket.socket:
        """Return a listening socket in the place of a dead monitor's; only under the lock."""
        return unix_sockets.listen(self._socket, _BACKLOG)

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock; a DeadlineExceededError if another process holds it all the time."""
        fd = self._lock(timeout_s)
        try:
            yield
        finally:
            # Closing alone is not enough: a child forked meanwhile holds the same lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def socket_inode(self) -> int | None:
        """Return the inode of the listening socket, by which a later one differs; None for none."""
        try:
            return os.lstat(self._socket).st_ino
        except OSError:
            return None

    def remove(self) -> None:
        """Remove the directory; only under the lock."""
        parent, name = os.path.split(self.path)
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # In one step for all processes: else one could make a new lock in it, and lose that, too.
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
                    NodeDirectory(path).remove_if_stale()

    def remove_if_stale(self) -> None:
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
                # The process that had the lock may have removed the directory.
                if self._is_current(fd):
                    return fd
            except BlockingIOError:
                os.close(fd)
                raise DeadlineExceededError(
                    f"another rank has been starting the monitor for over {timeout_s:g} s"
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
                # Another process may be removing the directory under its lock in this moment.
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
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    parts = [
        str(os.geteuid()),
        os.uname().nodename,
        procfs.boot_id(),
        network,
        procfs.pid_namespace(),
        environ.get("MASTER_ADDR", ""),
        environ.get("MASTER_PORT", ""),
        *_first(environ, _JOB_NAMES),
        *_first(environ, _CYCLE_NAMES),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return next(([name, environ[name]] for name in names if environ.get(name)), ["", ""])


END_LIMIT_S = 1.0
"""How long a monitor that was killed may take to be gone."""
_STOPPED = frozenset("Tt")
_BOOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot.py")
_PIPE_BYTES = 65536


def ensure_started(environ: Mapping[str, str] = os.environ, *, needs_torch: bool = False) -> None:
    """Start the monitor of this node, unless it runs, and do not wait until it is ready."""
    deadline = Deadline.after(START_LIMIT_S)
    connect_or_start(deadline, environ, needs_torch=needs_torch).close()


def connect_or_start(
    deadline: Deadline, environ: Mapping[str, str] = os.environ, *, needs_torch: bool = False
) -> socket.socket:
    """Return a connection to the monitor of this node; one of its ranks starts it."""
    try:
        directory = NodeDirectory.find(environ)
        sock = directory.connect()
        if sock is None:
            with directory.locked(deadline.remaining()):
                sock = directory.connect()
                if sock is None:
                    _start_monitor(directory, needs_torch=needs_torch)
                    sock = directory.connect()
        if sock is None:
            raise InternalError("the monitor of this node ended as soon as it was started")
    except (OSError, NvrxError) as error:
        if isinstance(error, InternalError):
            raise
        raise InternalError(f"the monitor of this node cannot be started: {error}") from error
    try:
        require_same_user(sock)
    except NvrxError as error:
        sock.close()
        raise InternalError(f"the monitor of this node is not ours: {error}") from error
    return sock


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP."""
    stat = procfs.read_stat(pid)
    return stat is not None and stat.state in _STOPPED


def run_detached(order: Mapping[str, object], pass_fds: tuple[int, ...] = ()) -> None:
    """Run `boot.py` in a process without a parent; its `main` lists the orders."""
    if not sys.executable:
        raise InternalError("this interpreter does not know its own path, to start another one")
    paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    data = json.dumps({**order, "sys_path": paths}).encode()
    if len(data) > _PIPE_BYTES:
        raise InternalError("sys.path is too long to tell the monitor about it")
    # A pipe, because no other user can read it, unlike arguments.
    reader, writer = os.pipe()
    try:
        with open(writer, "wb") as pipe:
            pipe.write(data)
        command = [sys.executable, "-I", "-S", _BOOT, "--detach", sys.executable, _BOOT]
        with start_child(
            [*command, str(reader)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(reader, *pass_fds),
        ) as child:
            status = child.wait(START_LIMIT_S)
    finally:
        os.close(reader)
    if status is None or status.returncode != 0:
        how = "does not end" if status is None else status.describe()
        raise InternalError(f"the program that starts the monitor fails: {how}")


def _start_monitor(directory: NodeDirectory, *, needs_torch: bool) -> None:
    with directory.listen() as listener:
        order = {
            "directory": directory.path,
            "listener": listener.fileno(),
            "starter": os.getpid(),
            "needs_torch": needs_torch,
        }
        run_detached(order, (listener.fileno(),))
