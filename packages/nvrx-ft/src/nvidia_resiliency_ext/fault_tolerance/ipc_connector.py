# SPDX-License-Identifier: Apache-2.0
"""A one-way mailbox between processes of one user on one host: a thread receives, anyone sends."""

import logging
import threading
from collections import deque

from nvidia_resiliency_ext.shared_utils import wire
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import PeerClosedError, WireError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.unix_sockets import connect
from nvidia_resiliency_ext.shared_utils.wire import MessageSet

from ._core.messages import MESSAGES, Mailbox
from .data import ErrorMsg, OkMsg

__all__ = ["IpcConnector"]

logger = logging.getLogger("nvrx")


class IpcConnector:
    """One end of a mailbox at a socket path: the receiver starts it, senders just send.

    Plain data, tuples, sets and the messages of `data` may be sent; nothing else, and never code.
    All methods may be called from any thread; the receiver's thread ends with `stop_receiving`.

    Example:
        >>> receiver = IpcConnector("/tmp/example.sock")
        >>> receiver.start_receiving()
        >>> IpcConnector("/tmp/example.sock").send({"step": 1})
        >>> receiver.fetch_received()
        [{'step': 1}]
        >>> receiver.stop_receiving()

    Args:
        socket_path: path of the Unix socket, at most 107 bytes.
        messages: what may be sent; the same on both ends.
    """

    THREAD_FINISH_TIMEOUT = 60
    """Seconds that `stop_receiving` waits for the thread."""

    SEND_TIMEOUT_S = 60.0
    """Seconds that `send` waits for the receiver unless told otherwise."""

    def __init__(self, socket_path: str, messages: MessageSet = MESSAGES) -> None:
        self.socket_path = socket_path
        self._messages = messages
        self._received: deque[object] = deque()
        # Guards starting and stopping; the deque is safe by itself.
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._thread: threading.Thread | None = None

    def start_receiving(self) -> None:
        """Listen in a separate thread.

        Raises:
            RuntimeError: it already listens.
            ValueError: the path is too long for a socket.
            FileExistsError: another process listens there, or it is no socket.
        """
        with self._lock:
            if self._loop is not None:
                raise RuntimeError(f"{self.socket_path}: receiving was started already")
            loop = EventLoop()
            try:
                mailbox = Mailbox(self.socket_path, loop, self._received.append, self._messages)
            except (ValueError, OSError):
                loop.close()
                raise
            thread = threading.Thread(
                target=self._receive, args=(mailbox, loop), name="nvrx-ipc-receiver", daemon=True
            )
            self._loop = loop  # the thread ends when it is another one
            try:
                thread.start()
            except RuntimeError:
                self._loop = None
                mailbox.close()
                loop.close()
                raise
            self._thread = thread

    def stop_receiving(self) -> None:
        """End the thread and remove the socket, but keep received messages. May be repeated."""
        with self._lock:
            loop, self._loop = self._loop, None
            thread, self._thread = self._thread, None
        if loop is not None and thread is not None:
            loop.wake()
            thread.join(self.THREAD_FINISH_TIMEOUT)
            if thread.is_alive():
                logger.error("%s: the receiver thread does not end", self.socket_path)

    def fetch_received(self) -> list[object]:
        """Return and remove all received messages, oldest first."""
        fetched: list[object] = []
        while True:
            try:
                fetched.append(self._received.popleft())
            except IndexError:
                return fetched

    def peek_received(self) -> list[object]:
        """Return all received messages and keep them."""
        return list(self._received.copy())

    def clear(self) -> None:
        """Remove all received messages."""
        self._received.clear()

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Send a `message` of the closed set in `data`, and wait until the receiver has it.

        The acknowledgement may take `timeout_s` seconds; None: `SEND_TIMEOUT_S`.

        Raises:
            FileNotFoundError: there is no receiver: no socket at the path.
            ConnectionRefusedError: there is no receiver: nobody listens on the socket.
            RuntimeError: the receiver did not accept the message.
            DeadlineExceededError: no answer in time (a `TimeoutError`); it may still arrive.
            WireError: the message holds something that may not be sent, or is over 1 MiB.
        """
        self._messages.encode(message)  # what cannot be sent is the caller's fault, not the peer's
        deadline = Deadline.after(self.SEND_TIMEOUT_S if timeout_s is None else timeout_s)
        with connect(self.socket_path, deadline.remaining()) as sock:
            wire.require_same_user(sock)
            try:
                wire.send_message(sock, self._messages, message, deadline.remaining())
                answer = wire.receive_message(sock, self._messages, deadline.remaining())
            except PeerClosedError as error:
                raise RuntimeError(f"{self.socket_path}: closed without an answer") from error
            except WireError as error:
                raise RuntimeError(f"{self.socket_path}: not an answer: {error}") from error
        if not isinstance(answer, OkMsg):
            cause = answer.cause if isinstance(answer, ErrorMsg) else repr(answer)[:200]
            raise RuntimeError(  # noqa: TRY004 - the public exception
                f"{self.socket_path}: message not accepted: {cause}"
            )

    def _receive(self, mailbox: Mailbox, loop: EventLoop) -> None:
        """Serve `mailbox` until another loop, or none, is this connector's (body of the thread)."""
        try:
            while self._loop is loop:
                loop.run_once()
        except Exception:
            # The thread's boundary: senders then find nobody listening, and the log says why.
            logger.exception("%s: receiving ended", self.socket_path)
        finally:
            mailbox.close()
            loop.close()
