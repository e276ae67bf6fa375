# SPDX-License-Identifier: Apache-2.0
"""The sockets under torch's TCPStores, which torch neither closes nor shows.

A torch client cannot be closed, asks the kernel for no sign of life and waits for answers without a
limit. Its socket is found among this process's descriptors. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any

from .abandonable import ParkedAtExit
from .errors import DeadlineExceededError

__all__ = [
    "BACKLOG", "SILENT_S", "NoAnswerError", "connected_sockets", "is_connected_to", "listen_at",
    "open_client", "reach", "serving_options", "socket_copy", "socket_names", "tcp_socket",
    "tcp_sockets", "watch_over",
]  # fmt: skip

BACKLOG = 4096
SILENT_S = 60
"""How long a peer may leave what was sent to it unacknowledged."""

# An idle connection is asked for a sign of life after a minute, which also keeps firewalls from
# forgetting it; one that says nothing for as long is closed.
_IDLE_S = 60
_PROBE_S = 10

_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LIBUV_TAKES_A_SOCKET = (2, 8)
# Longer than a packet that is lost twice.
_PARTIAL_MESSAGE_S = 5

_LONGEST_MS = (1 << 31) - 1  # that poll() takes

given_up: list[ParkedAtExit] = []
"""Threads that make a client for which no caller waits any more, and that torch still keeps."""


class NoAnswerError(DeadlineExceededError):
    """The server at a port does not answer as a store does."""


def open_client(
    make: Callable[[], Any], port: int, timeout_s: float, witness: socket.socket | None = None
) -> Any:
    """Make a client that connects to a store; torch itself would try again, or wait, for ever.

    Args:
        make: Makes the client; it runs in a thread of its own.
        port: Port of the store.
        timeout_s: Seconds to wait at most.
        witness: Another connection to the store; when it ends the store is gone.

    Raises:
        NoAnswerError: The client was not made; its connections are ended.
        Exception: What `make` raises.
    """
    before = socket_names()
    given_up[:] = [thread for thread in given_up if thread.is_alive()]
    made: list[Any] = []
    errors: list[Exception] = []
    our_end, its_end = socket.socketpair()

    def make_client() -> None:
        with its_end:  # which hangs up when the client is made
            try:
                made.append(make())
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                errors.append(error)

    thread = ParkedAtExit("nvrx-store-connect", make_client)
    is_made = False
    with our_end:
        thread.start()
        try:
            poll = select.poll()
            for sock in filter(None, (our_end, witness)):
                poll.register(sock, select.POLLIN)
            ready = poll.poll(min(max(0.0, timeout_s) * 1000, _LONGEST_MS))
            is_made = any(number == our_end.fileno() for number, _ in ready)
        finally:
            # The caller may have been interrupted.
            if not is_made:
                given_up.append(thread)
                for sock in connected_sockets(port, before):
                    with sock, contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
    if not is_made:
        raise NoAnswerError(f"what listens at port {port} does not answer as a store does")
    thread.join()
    if errors:
        raise errors[0]
    return made[0]


def listen_at(family: int, address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that listens at `address` of `family`, with keep-alive probes.

    Raises:
        OSError: EADDRINUSE: the port is taken; EADDRNOTAVAIL: the address is not this host's.

    Example:
        >>> with listen_at(socket.AF_INET, ("127.0.0.1", 0)) as listener:
        ...     port = listener.getsockname()[1]
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _ask_for_life(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def reach(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect to a listening socket at `address` (host and port) within `timeout_s` seconds.

    Where the system takes clients' ports from a range that has the store's in it, and nobody
    listens yet, a client that asks often enough is given that very port, and connects to itself.
    Here that counts as refused, and frees the port, which else is blocked for a minute.

    Raises:
        ConnectionRefusedError: Nobody listens.
        OSError: It cannot be reached within `timeout_s` seconds.
    """
    sock = socket.create_connection(address, timeout_s)
    try:
        if sock.getsockname() != sock.getpeername():
            return sock
        # A connection that is reset is forgotten at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        sock.close()
        raise
    sock.close()
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def serving_options(
    listener: socket.socket, torch_version: str, *, without_libuv: bool = False
) -> dict[str, Any]:
    """Return options for a TCPStore to serve at a listening socket, which it owns from here on.

    Before 2.8 torch's server on libuv takes no socket (seen with 2.4.0 to 2.7.1): it opens the port
    itself, at all addresses of this host. Its other server takes it.

    Args:
        listener: The socket.
        torch_version: As torch says it.
        without_libuv: Take the other server there. It is slower with many clients, and wakes nobody
            for a `compare_set`. It has one thread, which waits for the rest of a message that was
            begun: so a client that does not send it, or does not read, is cut off after 5 s.
    """
    if tuple(map(int, re.findall(r"\d+", torch_version)[:2])) >= _LIBUV_TAKES_A_SOCKET:
        return {"is_master": True, "master_listen_fd": listener.detach()}
    if not without_libuv:
        listener.close()
        return {"is_master": True}
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        # Connections that are accepted have it from the listener.
        listener.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", _PARTIAL_MESSAGE_S, 0))
    return {"is_master": True, "master_listen_fd": listener.detach(), "use_libuv": False}


def watch_over(sock: socket.socket) -> None:
    """Let the kernel detect that the other side of the connected `sock` is gone."""
    _ask_for_life(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)


def is_connected_to(sock: socket.socket, port: int) -> bool:
    """Return whether `sock` is connected to `port`, of any host."""
    try:
        return bool(sock.getpeername()[1] == port)
    except OSError:
        return False


def connected_sockets(port: int, known: Collection[str] = frozenset()) -> Iterator[socket.socket]:
    """Yield this process's sockets that are connected to `port`, of any host, but `known` ones."""
    for _, sock in tcp_sockets(known):
        if is_connected_to(sock, port):
            yield sock
        else:
            sock.close()


def socket_names() -> frozenset[str]:
    """Return the kernel's names of all sockets of this process."""
    return frozenset(name for _, name in _named())


def tcp_sockets(known: Collection[str] = frozenset()) -> Iterator[tuple[str, socket.socket]]:
    """Yield name and second descriptor of each TCP socket of this process but the `known` ones.

    Whoever takes one closes it.
    """
    seen = set(known)
    for descriptor, listed in _named():
        found = None if listed in seen else tcp_socket(descriptor)
        if found is None:
            continue
        name, sock = found
        # A listed number may by now be one of the second descriptors.
        if name in seen:
            sock.close()
        else:
            seen.add(name)
            yield name, sock


def socket_copy(descriptor: int) -> socket.socket:
    """Return the socket `descriptor` under a second descriptor, which the caller closes.

    Raises:
        OSError: The descriptor is free, or no socket.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        # Whoever waits for the end of what it is must not wait for us.
        os.close(copy)
        raise


def tcp_socket(descriptor: int) -> tuple[str, socket.socket] | None:
    """Return the kernel's name of the TCP socket `descriptor`, and the socket under a second one.

    The caller closes the second descriptor. None is returned for a descriptor that is free or
    belongs to something else, which may happen at any time.
    """
    # Between these lines, too.
    with contextlib.suppress(OSError):
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        sock = socket_copy(descriptor)
        name = os.readlink(f"/proc/self/fd/{sock.fileno()}")
        if sock.family in _TCP_FAMILIES and sock.type == socket.SOCK_STREAM:
            return name, sock
        sock.close()
    return None


def _named() -> Iterator[tuple[int, str]]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                yield int(number), name


def _ask_for_life(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
