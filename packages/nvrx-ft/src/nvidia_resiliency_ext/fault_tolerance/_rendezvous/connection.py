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
from nvidia_resiliency_ext.shared_utils.store_sockets import (
    is_connected_to,
    socket_names,
    tcp_sockets,
    watch_over,
)

logger = logging.getLogger("nvrx")

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
        before = socket_names()
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
    for _, sock in tcp_sockets(before):
        if is_connected_to(sock, port):
            found.append(sock)
        else:
            sock.close()
    if len(found) != 1:
        logger.debug("%d new sockets to port %d: none is used", len(found), port)
        for copy in found:
            copy.close()
        return None
    watch_over(found[0])
    return found[0]
