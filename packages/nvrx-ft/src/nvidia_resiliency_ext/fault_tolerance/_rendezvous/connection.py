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

from nvidia_resiliency_ext.shared_utils import store_sockets
from nvidia_resiliency_ext.shared_utils.store_sockets import (
    NoAnswerError,
    connected_sockets,
    reach,
    socket_names,
    watch_over,
)

__all__ = ["Link", "NoAnswerError", "open_client"]

logger = logging.getLogger("nvrx")

REACH_S = 5.0
GIVEN_UP_WAIT_S = 1.0

_one_at_a_time = threading.Lock()


class Link:
    """The socket under a torch client; None when it could not be identified."""

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


def open_client(
    make: Callable[[], Any], address: tuple[str, int], timeout_s: float
) -> tuple[Any, Link]:
    """Make a client with `make`, which connects to `address`.

    torch goes on trying where the store is gone: a store that was killed takes connections for some
    milliseconds more. So another connection is held meanwhile, which ends when the store does.

    Raises:
        NoAnswerError: it takes longer than `timeout_s`, or the store is gone.
        OSError: nobody listens, or no longer.
    """
    # One at a time, so that the new socket is the one that was not there before.
    with _one_at_a_time, reach(address, min(timeout_s, REACH_S)) as witness:
        before = socket_names()
        client = store_sockets.open_client(make, address[1], timeout_s, witness)
        return client, Link(_own_socket(before, address[1]))


def _own_socket(before: Collection[str], port: int) -> socket.socket | None:
    """Return a second descriptor of the socket of the attempt that has just been made."""
    found = list(connected_sockets(port, before))
    if len(found) > 1:
        # One that was given up has reached a store after all: it closes its socket at once.
        _close_all(found)
        for attempt in store_sockets.given_up:
            attempt.join(GIVEN_UP_WAIT_S)
        found = list(connected_sockets(port, before))
    if len(found) != 1:
        logger.debug("%d new sockets to port %d: none is used", len(found), port)
        _close_all(found)
        return None
    watch_over(found[0])
    return found[0]


def _close_all(sockets: Collection[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
