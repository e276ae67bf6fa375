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

from nvidia_resiliency_ext.shared_utils.abandonable import Attempt
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_sockets import (
    is_connected_to,
    reach,
    socket_names,
    tcp_sockets,
    watch_over,
)

logger = logging.getLogger("nvrx")

REACH_S = 5.0
GIVEN_UP_WAIT_S = 1.0

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


# Threads that torch still keeps.
_given_up: list[Attempt] = []


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
    with (
        _one_at_a_time,
        reach(address, min(timeout_s, REACH_S)) as witness,
    ):
        port = address[1]
        before = socket_names()
        attempt = Attempt(make)
        with contextlib.closing(attempt):
            attempt.start()
            is_made = attempt.wait(timeout_s, witness)
        if not is_made:
            attempt.give_up()
            for sock in _new_sockets(before, port):
                Link(sock).cut()
            _given_up.append(attempt)
            raise NoAnswerError(f"what listens at port {port} does not answer as a store does")
        attempt.join()
        link = Link(_own_socket(before, port))
    if attempt.error is not None:
        link.cut()
        raise attempt.error
    return attempt.client, link


def _own_socket(before: Collection[str], port: int) -> socket.socket | None:
    """Return a second descriptor of the socket of the attempt that has just been made."""
    _given_up[:] = [attempt for attempt in _given_up if attempt.is_alive()]
    found = _new_sockets(before, port)
    if len(found) > 1:
        # One that was given up has reached a store after all: it closes its socket at once.
        _close_all(found)
        for attempt in _given_up:
            attempt.join(GIVEN_UP_WAIT_S)
        found = _new_sockets(before, port)
    if len(found) != 1:
        logger.debug("%d new sockets to port %d: none is used", len(found), port)
        _close_all(found)
        return None
    watch_over(found[0])
    return found[0]


def _close_all(sockets: Collection[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _new_sockets(before: Collection[str], port: int) -> list[socket.socket]:
    """Return second descriptors of the sockets that are new and connected to `port`."""
    found = []
    for _, sock in tcp_sockets(before):
        if is_connected_to(sock, port):
            found.append(sock)
        else:
            sock.close()
    return found
