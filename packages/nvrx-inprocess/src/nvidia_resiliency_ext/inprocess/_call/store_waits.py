# SPDX-License-Identifier: Apache-2.0
"""Ends the wait of a thread at a torch TCPStore, which no signal and no exception ends.

The kernel tells for which descriptor the thread waits. The wait is ended as torch itself ends one
whose time is up: the server is asked, over the same connection, to cancel it. So the store stays
of use, which may be one that the program keeps over its iterations.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import struct
import time

from nvidia_resiliency_ext.inprocess._abort.kernel_call import Wait, kernel_wait, own_memory
from nvidia_resiliency_ext.inprocess._store.greeting import greet
from nvidia_resiliency_ext.shared_utils.store_sockets import tcp_socket

__all__ = ["StoreWaits"]

logger = logging.getLogger("nvrx")

_POLL_FD = struct.Struct("=ihh")
# Of torch's protocol. The answer is one byte, in the place of the one that the wait would have had.
_CANCEL_WAIT = b"\x0c"
_PROBE_S = 1.0
# A server answers within milliseconds; one that does not is no use any more.
_ANSWERED_WITHIN_S = 1.0


class StoreWaits:
    """Ends waits of one thread, each once.

    Args:
        native_id: The thread, by the kernel's number.
    """

    def __init__(self, native_id: int) -> None:
        self._native_id = native_id
        self._cancelled: dict[str, float] = {}

    def end(self) -> bool:
        """End the wait in which the thread is now, if it waits at a store; return whether."""
        descriptor = self._waited_for()
        found = None if descriptor is None else tcp_socket(descriptor)
        if found is None:
            return False
        name, connection = found
        with connection, contextlib.suppress(OSError):
            # It has been this descriptor all the time, so it is this connection.
            return self._waited_for() == descriptor and self._end(name, connection)
        return False

    def _end(self, name: str, connection: socket.socket) -> bool:
        asked_s = self._cancelled.get(name)
        now = time.monotonic()
        if asked_s is not None and now - asked_s < _ANSWERED_WITHIN_S:
            return False
        peer = _peer_of(connection) if asked_s is None else _Peer.DEAD
        if peer is _Peer.STRANGER:
            return False
        self._cancelled[name] = now
        if peer is _Peer.STORE:
            connection.send(_CANCEL_WAIT, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        else:
            logger.warning("%s does not answer: disconnected", connection.getpeername())
            connection.shutdown(socket.SHUT_RDWR)
        return True

    def _waited_for(self) -> int | None:
        """Return the only descriptor for which the thread waits in poll()."""
        wait, address, count = kernel_wait(self._native_id)
        if wait is not Wait.POLL or count != 1:
            return None
        try:
            descriptor, _, _ = _POLL_FD.unpack(own_memory(address, _POLL_FD.size))
        except (OSError, struct.error):
            return None  # the thread has gone on
        return int(descriptor)


class _Peer(enum.Enum):
    STORE = enum.auto()
    STRANGER = enum.auto()
    DEAD = enum.auto()


def _peer_of(connection: socket.socket) -> _Peer:
    """Say who listens where a connection leads; who says nothing is as good as dead."""
    host, port = connection.getpeername()[:2]
    try:
        with socket.create_connection((host, port), _PROBE_S) as probe:
            return _ask(probe)
    except OSError:
        return _Peer.DEAD


def _ask(probe: socket.socket) -> _Peer:
    """See whether a store answers."""
    try:
        return _Peer.STORE if greet(probe) else _Peer.STRANGER
    except TimeoutError:
        return _Peer.DEAD
    except OSError:
        return _Peer.STRANGER
