# SPDX-License-Identifier: Apache-2.0
"""Unix stream sockets by path: listen on one with nobody else, connect to one within a time."""

import errno
import os
import socket
import stat
import struct

from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError
from nvidia_resiliency_ext.shared_utils.rundir import MAX_SOCKET_PATH_BYTES

__all__ = ["connect", "listen", "set_ipc_socket_timeouts"]

_TIMEVAL = struct.Struct("@ll")


def listen(path: str, backlog: int = 128) -> socket.socket:
    """Return a non-blocking listening socket at `path` that only this user may connect to.

    A socket that a dead process left at `path` is removed first.

    Args:
        path: Path of the socket.
        backlog: Length of the queue of connections that wait. Default 128.

    Raises:
        ValueError: The path is too long for a socket.
        FileExistsError: The path is no socket, or a process listens there.
    """
    _check_length(path)
    _remove_stale(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before bind: the file then never exists with more permissions.
        os.fchmod(server.fileno(), 0o600)
        server.bind(path)
        server.listen(backlog)
        server.setblocking(False)
    except BaseException:  # whatever happens, the descriptor must not stay behind
        server.close()
        raise
    return server


def connect(path: str, timeout_s: float) -> socket.socket:
    """Return a blocking socket connected to `path`.

    Args:
        path: Path of the listening socket.
        timeout_s: Seconds to wait for room in the listener's queue.

    Raises:
        ValueError: The path is too long for a socket.
        FileNotFoundError: The path does not exist.
        ConnectionRefusedError: No process listens there.
        DeadlineExceededError: The listener's queue stays full.
    """
    _check_length(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A non-blocking connect to a full queue fails at once; only this limit lets it wait.
        # It takes 0 for "never"; to us it means that the time is up.
        set_ipc_socket_timeouts(sock.fileno(), max(timeout_s, 1e-6))
        sock.connect(path)
        set_ipc_socket_timeouts(sock.fileno(), 0.0)
    except BlockingIOError as error:
        sock.close()
        raise DeadlineExceededError(f"{path}: no room to connect within {timeout_s} s") from error
    except BaseException:  # whatever happens, the descriptor must not stay behind
        sock.close()
        raise
    return sock


def set_ipc_socket_timeouts(fileno: int, timeout: float) -> None:
    """Limit how long sends and receives on a blocking socket may take.

    Args:
        fileno: Descriptor of the socket; it stays open.
        timeout: The limit in seconds; 0: no limit.
    """
    whole = int(timeout)
    microseconds = int((timeout - whole) * 1e6)
    if timeout > 0 and whole == 0 and microseconds == 0:
        microseconds = 1
    limit = _TIMEVAL.pack(whole, microseconds)
    sock = socket.socket(fileno=fileno)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    finally:
        sock.detach()


def _check_length(path: str) -> None:
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"socket path {path!r} has {size} bytes, the system allows"
            f" {MAX_SOCKET_PATH_BYTES}: choose a shorter directory, for example with TMPDIR"
        )


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "not a socket, left alone", path)
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except BlockingIOError:
        raise FileExistsError(errno.EEXIST, "somebody listens on this socket", path) from None
    else:
        raise FileExistsError(errno.EEXIST, "somebody listens on this socket", path)
    finally:
        probe.close()
