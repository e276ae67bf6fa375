# SPDX-License-Identifier: Apache-2.0
"""Owns the rank's connection to its monitor and keeps it up in a thread; training never waits."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from nvidia_resiliency_ext.shared_utils import wire
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError, WireError

from .messages import RANK_MESSAGES, Accepted, Answer, Hello, Refused

logger = logging.getLogger("nvrx")

HANDSHAKE_LIMIT_S = 30.0
RECONNECT_PAUSE_S = 1.0
ABSENT_LIMIT_S = 5.0  # How long a rank that starts waits for a monitor in place of a dead one.
_ABSENT_PAUSE_S = 0.05
_RECONNECT_LIMIT_S = 5.0
_JOIN_LIMIT_S = 2.0
_READ_BYTES = 65536
_EXPECTED_FDS = 2


class LinkError(Exception):
    """The monitor cannot be reached, or refused the session."""


class _AbsentError(LinkError):
    """No monitor listens, or the one that did is gone: another may be starting."""


@dataclass(eq=False)
class RankLink:
    """A session with the monitor that outlives the monitor; thread-safe. `open` makes it."""

    path: str
    _: KW_ONLY
    # Gives the first message and the descriptors to hand over, per attempt.
    make_hello: Callable[[], tuple[Hello, list[int]]]
    # Takes the monitor's answer and its descriptors, which it owns then, before anything else is
    # read; may raise LinkError.
    take: Callable[[Accepted, list[int]], None]
    # Called when the monitor is gone: whether to look for another one.
    on_lost: Callable[[], bool]
    on_restored: Callable[[], None]

    def __post_init__(self) -> None:
        self.sock: socket.socket | None = None  # None while there is no monitor.
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._answers: dict[int, Answer | None] = {}
        self._last_request = 0
        self._thread: threading.Thread | None = None

    def open(self, timeout_s: float = HANDSHAKE_LIMIT_S) -> None:
        """Connect, introduce the rank, start the thread; wait while a monitor is replaced."""
        deadline = Deadline.after(timeout_s)
        patience = Deadline.after(min(ABSENT_LIMIT_S, timeout_s))
        reader = None
        while reader is None:
            try:
                self.sock, reader = self._shake_hands(max(0.001, deadline.remaining()))
            except _AbsentError:
                if patience.expired() or self._closing.wait(_ABSENT_PAUSE_S):
                    raise
        self._thread = threading.Thread(
            target=self._serve, args=(reader,), name="nvrx-monitor-link", daemon=True
        )
        self._thread.start()

    def post(self, message: object) -> None:
        """Send without waiting and without an answer; dropped when the monitor does not read."""
        try:
            self._send(message)
        except (OSError, LinkError):
            logger.debug("a message to the rank monitor was dropped")

    def request(self, make_message: Callable[[int], object], timeout_s: float) -> Answer | None:
        """Send the message of a request number; return the answer, None if none came in time."""
        with self._changed:
            self._last_request += 1
            number = self._last_request
            self._answers[number] = None
        try:
            self._send(make_message(number))
            sock = self.sock
            with self._changed:
                self._changed.wait_for(
                    lambda: self._answers[number] is not None or self.sock is not sock, timeout_s
                )
                return self._answers[number]
        except (OSError, LinkError):
            return None
        finally:
            with self._changed:
                del self._answers[number]

    def wait_connected(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.sock is not None, timeout_s)

    def close(self) -> None:
        """End the session and the thread; waits for neither peers nor the monitor."""
        self._closing.set()
        with self._changed:
            if self.sock is not None:
                _shut_down(self.sock)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_LIMIT_S)
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def disown(self) -> None:
        """Drop the inherited socket in a forked child; send the monitor nothing."""
        self._closing.set()
        sock, self.sock, self._thread = self.sock, None, None
        if sock is not None:
            sock.close()

    def _send(self, message: object) -> None:
        data = RANK_MESSAGES.encode(message)
        with self._changed:
            sock = self.sock
            if sock is None:
                raise LinkError("there is no monitor at present")
            if sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) != len(data):
                _shut_down(sock)  # a torn frame: the thread opens a new session

    def _shake_hands(self, timeout_s: float) -> tuple[socket.socket, wire.FrameReader]:
        deadline = Deadline.after(timeout_s)
        fds: list[int] = []
        with contextlib.ExitStack() as on_failure:
            sock = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            on_failure.callback(_close_all, fds)
            try:
                sock.settimeout(timeout_s)
                sock.connect(self.path)
                wire.require_same_user(sock)
                hello, handed = self.make_hello()
                wire.send_with_fds(sock, RANK_MESSAGES.encode(hello), handed, timeout_s)
                reader = wire.FrameReader()
                answer = _receive_accepted(sock, reader, deadline, fds)
            except (OSError, NvrxError, LinkError) as exc:
                is_absent = isinstance(exc, _AbsentError | ConnectionError)
                kind = _AbsentError if is_absent else LinkError
                raise kind(f"no session with the rank monitor at {self.path}: {exc}") from exc
            if self._closing.is_set():
                # Nobody would give back what `take` takes.
                raise LinkError("the link was closed while it was being made")
            taken = fds.copy()
            fds.clear()
            self.take(answer, taken)
            sock.settimeout(None)
            on_failure.pop_all()
        return sock, reader

    def _serve(self, reader: wire.FrameReader | None) -> None:
        while reader is not None and not self._closing.is_set():
            assert self.sock is not None
            self._read_until_end(self.sock, reader)
            with self._changed:
                sock, self.sock = self.sock, None
                self._changed.notify_all()
            sock.close()
            if self._closing.is_set() or not self.on_lost():
                return
            reader = self._reconnect()

    def _read_until_end(self, sock: socket.socket, reader: wire.FrameReader) -> None:
        try:
            while data := sock.recv(_READ_BYTES):
                for payload in reader.feed(data):
                    message = RANK_MESSAGES.decode(payload)
                    if isinstance(message, Answer):
                        with self._changed:
                            if message.request in self._answers:
                                self._answers[message.request] = message
                                self._changed.notify_all()
        except (OSError, WireError) as exc:
            logger.debug("the connection to the rank monitor broke: %s", exc)

    def _reconnect(self) -> wire.FrameReader | None:
        next_try_at = time.monotonic()
        while not self._closing.wait(max(0.0, next_try_at - time.monotonic())):
            next_try_at = time.monotonic() + RECONNECT_PAUSE_S
            try:
                sock, reader = self._shake_hands(_RECONNECT_LIMIT_S)
            except LinkError as exc:
                logger.debug("%s", exc)
                continue
            with self._changed:
                self.sock = sock
                self._changed.notify_all()
                if self._closing.is_set():
                    _shut_down(sock)
            self.on_restored()
            logger.info("the rank monitor is back: a new session is open")
            return reader
        return None


def _receive_accepted(
    sock: socket.socket, reader: wire.FrameReader, deadline: Deadline, fds: list[int]
) -> Accepted:
    """Return the monitor's answer; add its descriptors to `fds`, also when this raises."""
    payloads: list[bytes] = []
    while not payloads:
        limit_s = max(0.001, deadline.remaining())
        data, more = wire.receive_with_fds(sock, _READ_BYTES, _EXPECTED_FDS, limit_s)
        fds += more
        if not data:
            raise _AbsentError("the monitor closed the connection")
        payloads = reader.feed(data)
    answer = RANK_MESSAGES.decode(payloads[0])
    if isinstance(answer, Refused):
        raise LinkError(answer.reason)
    if not isinstance(answer, Accepted) or len(fds) != _EXPECTED_FDS:
        raise LinkError("the monitor gave an answer that makes no sense")
    return answer


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It may have ended by itself.
        sock.shutdown(socket.SHUT_RDWR)
