# SPDX-License-Identifier: Apache-2.0
"""Unix sockets by path, and one non-blocking stream of messages and descriptors.

Sending on a channel never waits: messages that the peer does not take are kept, up to a bound.
Beyond that the oldest droppable ones are dropped, or the channel ends.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import DeadlineExceededError, MalformedFrameError, WireError
from .rundir import MAX_SOCKET_PATH_BYTES
from .wire import FrameReader, MessageSet, receive_once, rights

__all__ = ["Channel", "connect", "listen", "set_ipc_socket_timeouts"]

_TIMEVAL = struct.Struct("@ll")
MAX_WAITING = 256
_MAX_WAITING_BYTES = 16 << 20
_READ_BYTES = 65536
_MAX_READS = 16  # for each `receive`: a peer that never stops sending cannot keep its caller
_MAX_FDS = 64
_NEVER_WAITS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


def listen(path: str, backlog: int = 128) -> socket.socket:
    """Return a non-blocking socket at `path` that only this user may connect to.

    A socket that a dead process left there is removed first; `backlog` connections may wait.

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
    """Return a blocking socket connected to `path`; wait `timeout_s` for space in its queue.

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
    except BaseException as error:  # whatever happens, the descriptor must not stay behind
        sock.close()
        if isinstance(error, BlockingIOError):
            raise DeadlineExceededError(f"{path}: its queue was full for {timeout_s} s") from error
        raise
    return sock


def set_ipc_socket_timeouts(fileno: int, timeout: float) -> None:
    """Limit sends and receives on the blocking socket `fileno` to `timeout` s; 0: no limit.

    Example:
        >>> with socket.socket(socket.AF_UNIX) as client:
        ...     set_ipc_socket_timeouts(client.fileno(), timeout=5.0)
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        error = probe.connect_ex(path)
    if error not in (0, errno.EAGAIN, errno.ECONNREFUSED):
        raise OSError(error, os.strerror(error), path)
    if error != errno.ECONNREFUSED:
        raise FileExistsError(errno.EEXIST, "somebody listens on this socket", path)
    os.unlink(path)


@dataclass(slots=True)
class _Outgoing:
    data: bytes
    fds: list[int]
    is_droppable: bool


class Channel:
    """A connected Unix socket that is read and written without ever blocking.

    Not thread-safe. Owns the socket and every received descriptor that was not taken.

    Attributes:
        sock: The socket.
        is_over: Nothing more comes or goes.
        is_garbled: It is over because the peer sent what is no message; the peer may well live.
    """

    def __init__(
        self,
        sock: socket.socket,
        incoming: MessageSet,
        outgoing: MessageSet | None = None,
        *,
        max_fds: int = _MAX_FDS,
        ends_when_full: bool = False,
    ) -> None:
        """Take over a connected stream socket.

        Args:
            sock: The socket.
            incoming: Messages that the peer may send.
            outgoing: Messages that may be sent; default: the same.
            max_fds: Descriptors that may wait for `take_fds`; with more the channel ends.
            ends_when_full: End the channel when 16 MiB wait for the peer; default: drop messages
                when 256 wait, droppable ones first.
        """
        sock.setblocking(False)
        self.sock = sock
        self.is_over = False
        self.is_garbled = False
        self._incoming = incoming
        self._outgoing = outgoing or incoming
        self._max_fds = max_fds
        self._ends_when_full = ends_when_full
        self._reader = FrameReader()
        self._fds: deque[int] = deque()
        self._waiting: deque[_Outgoing] = deque()
        self._waiting_bytes = 0

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits for the peer to take it."""
        return bool(self._waiting) and not self.is_over

    def receive(self) -> list[object]:
        """Return messages that arrived, of at most 1 MiB; never waits.

        A peer that closed, or sent anything but well-formed frames, ends the channel: `is_over`
        is then true, and the owner closes it. The messages before that are still returned.
        """
        received: list[object] = []
        # Also after a failed send: what the peer sent before its end is still to be read.
        for _ in range(0 if self.is_garbled else _MAX_READS):
            try:
                data, fds = receive_once(self.sock, _READ_BYTES, self._max_fds)
            except BlockingIOError:
                break
            except (OSError, WireError) as exc:
                self.is_over = True
                self.is_garbled = isinstance(exc, MalformedFrameError)
                break
            self._fds.extend(fds)
            if not data or len(self._fds) > self._max_fds:
                self.is_over = True
                break
            try:
                for payload in self._reader.feed(data):
                    received.append(self._incoming.decode(payload))  # noqa: PERF401 - may raise
            except WireError:
                self.is_over = self.is_garbled = True
                break
        return received

    def take_fds(self, count: int) -> list[int]:
        """Return the next `count` received descriptors, or all; the caller owns them."""
        return [self._fds.popleft() for _ in range(min(count, len(self._fds)))]

    def send(self, message: object, fds: Sequence[int] = (), *, is_droppable: bool = False) -> None:
        """Send `message`, of the channel's set, or keep it until the peer takes it; never waits.

        Of the attached descriptors `fds` the caller keeps its own. What `is_droppable` may be
        thrown away first when too much waits.

        Raises:
            WireError: The message cannot be encoded.
            OSError: There are no descriptors left.
        """
        if self.is_over:
            return
        data = self._outgoing.encode(message)
        self._waiting.append(_Outgoing(data, _duplicate(fds), is_droppable))
        self._waiting_bytes += len(data)
        self.flush()
        if self._ends_when_full:
            if self._waiting_bytes > _MAX_WAITING_BYTES:
                self.is_over = True
            return
        while len(self._waiting) > MAX_WAITING:
            # The first one may be half sent: dropping it would tear the stream.
            rest = list(self._waiting)[1:]
            victim = next((item for item in rest if item.is_droppable), rest[0])
            self._waiting.remove(victim)
            self._waiting_bytes -= len(victim.data)
            _close_all(victim.fds)

    def flush(self) -> None:
        """Send waiting frames, as far as the peer takes them."""
        while self._waiting and not self.is_over:
            first = self._waiting[0]
            try:
                sent = self.sock.sendmsg([first.data], rights(first.fds), _NEVER_WAITS)
            except OSError as error:
                self.is_over = not isinstance(error, BlockingIOError)
                return
            self._waiting_bytes -= sent
            _close_all(first.fds)
            first.data, first.is_droppable = first.data[sent:], False
            if not first.data:
                self._waiting.popleft()

    def close(self) -> None:
        """Close socket and untaken descriptors; idempotent. Take it out of its selector first."""
        self.is_over = True
        self.sock.close()
        _close_all(self._fds)
        while self._waiting:
            _close_all(self._waiting.popleft().fds)


def _duplicate(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 - may raise half-way
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(fds: deque[int] | list[int]) -> None:
    while fds:
        os.close(fds.pop())
