# SPDX-License-Identifier: Apache-2.0
"""The sockets under torch's stores: where they listen, how long a client waits for an answer."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
import time
from typing import Any

from nvidia_resiliency_ext.shared_utils.store_sockets import (
    connected_sockets,
    listen_at,
    reach,
    tcp_sockets,
    watch_over,
)

_PROBE_S = 10
_SHORTEST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_LONGEST_TRY_S = 10.0

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen(host: str, port: int) -> socket.socket:
    """Listen at the address that a name means here; an OSError if it is in use or not ours."""
    problems: list[OSError] = []
    for family, address in _addresses(host, port):
        try:
            return listen_at(family, address)
        except OSError as error:
            problems.append(error)
    # That it is in use says more than that the name's other address is not ours.
    raise next((error for error in problems if error.errno not in _NOT_OURS), problems[0])


def is_ours(host: str) -> bool:
    """Return whether a name means an address of this host."""
    for family, address in _addresses(host, 0):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
            return True
    return False


def is_reachable_from_elsewhere(host: str) -> bool:
    """Return whether other hosts can use a name's address; many hosts name themselves 127.0.1.1."""
    addresses = [ipaddress.ip_address(str(address[0])) for _, address in _addresses(host, 0)]
    return not all(address.is_loopback for address in addresses)


def is_listening(store: Any) -> bool:
    """Return whether the server of a TCPStore, also of one below prefixes, still listens."""
    while not hasattr(store, "port"):
        below = getattr(store, "base_store", None) or getattr(store, "underlying_store", None)
        if below is None:
            return False
        store = below
    try:
        reach((store.host, store.port), _PROBE_S).close()
    except OSError:
        return False
    return True


def wait_until_listening(host: str, port: int, limit_s: float) -> bool:
    """Try to connect until the limit; return whether a server listens."""
    deadline = time.monotonic() + limit_s
    pause_s = _SHORTEST_PAUSE_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            reach((host, port), min(left_s, _LONGEST_TRY_S)).close()
        except (OSError, UnicodeError):
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return True
    return False


def limit_answers(port: int, timeout_s: float, known: frozenset[str] = frozenset()) -> int:
    """Fail operations of clients connected to `port` after so long; a `wait` gets it on top."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    count = 0
    for sock in connected_sockets(port, known):
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            watch_over(sock)
            count += 1
    return count


def count_served(port: int, most: int) -> int:
    """Return how many connections this process serves at `port`, counting to `most`."""
    count = 0
    for _, sock in tcp_sockets():
        with sock, contextlib.suppress(OSError):
            if sock.getsockname()[1] == port and sock.getpeername():
                count += 1
        if count >= most:
            break
    return count


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        # Names are encoded before anybody is asked.
        raise socket.gaierror(socket.EAI_NONAME, f"no name of a host: {error}") from None
    return [(int(family), address) for family, *_, address in found]
