# SPDX-License-Identifier: Apache-2.0
"""A torch client of a TCPStore whose waits can be ended from outside.

A torch client has no way to be closed, asks the kernel for no sign of life, and waits for answers
without a limit: one whose host vanishes, or that reached a program which is no store, blocks its
thread for good. Its socket is found among this process's descriptors when it connects, and kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

logger = logging.getLogger("nvrx")

# An idle connection is asked for a sign of life after a minute, which also keeps firewalls from
# forgetting it; one that says nothing for as long is closed.
_IDLE_S = 60
_PROBE_S = 10
_SILENT_S = 60

_one_at_a_time = threading.Lock()


class NoAnswerError(NvrxError):
    """Something listens but does not behave as a store does."""


class Link:
    """The socket under a torch client; None when it could not be told from others."""

    def __init__(self, sock: socket.socket | None) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1 if sock is None else sock.detach()

    def cut(self) -> None:
        """End the connection and every wait on it; more than once is fine."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with socket.socket(fileno=descriptor) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        # The client closes its own descriptor of the socket, and this is the other one.
        if self._descriptor >= 0:
            os.close(self._descriptor)


def open_client(make: Callable[[], Any], port: int, timeout_s: float) -> tuple[Any, Link]:
    """Make a client with `make`, which connects to `port`.

    Raises:
        NoAnswerError: it takes longer than `timeout_s`.
    """
    # One at a time, so that the new socket is the one that was not there before.
    with _one_at_a_time:
        before = _sockets().keys()
        made: list[Any] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                made.append(make())
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                failed.append(error)

        thread = threading.Thread(target=work, name="nvrx-store-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        link = Link(_new_socket(before, port))
        if thread.is_alive():
            link.cut()
            thread.join(1.0)
            raise NoAnswerError(f"what listens at port {port} does not answer as a store does")
    if failed:
        link.cut()
        raise failed[0]
    return made[0], link


def _new_socket(before: Collection[str], port: int) -> socket.socket | None:
    """Return a second descriptor of the one socket that is new and connected to `port`."""
    found = []
    for inode, descriptor in _sockets().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(descriptor))
            # Meanwhile the descriptor may have become another one's.
            if _name(copy.fileno()) == inode and _is_connected_to(copy, port):
                found.append(copy)
            else:
                copy.close()
    if len(found) != 1:
        logger.debug("%d new sockets to port %d: none is used", len(found), port)
        for copy in found:
            copy.close()
        return None
    _watch_over(found[0])
    return found[0]


def _is_connected_to(sock: socket.socket, port: int) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    try:
        return bool(sock.getpeername()[1] == port)
    except OSError:
        return False


def _watch_over(sock: socket.socket) -> None:
    """Let the kernel notice when the other side is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)


def _name(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _sockets() -> dict[str, int]:
    """Return a descriptor of each of this process's open sockets, by the kernel's name of it."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = _name(int(name))
            if target.startswith("socket:"):
                found[target] = int(name)
    return found
