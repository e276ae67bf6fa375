# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a job meet: who serves the store there, and when it can be reached."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import socket
import threading
from collections.abc import Callable

from nvidia_resiliency_ext.shared_utils import credentials
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.store_sockets import listen_at, reach

DEFAULT_PORT = 29400
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class EndpointError(NvrxError):
    """The endpoint cannot be served or reached."""


def claim(host: str, port: int, is_host: bool | None) -> socket.socket | None:
    """Listen at the endpoint if it is on this machine; None when another serves it.

    `is_host` is from `--rdzv-conf is_host=...`; None: if the address is ours. Raises EndpointError.
    """
    if is_host is False:
        return None
    problems: list[OSError] = []
    for family, address in _addresses(host, port):
        try:
            return listen_at(family, address)
        except OSError as error:
            problems.append(error)
    # Not ours, or another launcher on this machine was faster: then that one is the host.
    elsewhere = all(error.errno in _SERVED_BY_ANOTHER for error in problems)
    if is_host is None and elsewhere:
        return None
    raise EndpointError(
        f"--rdzv-endpoint {host}:{port}: the store cannot be served there:"
        f" {problems[0].strerror}; name an address of this machine and a free port, or let"
        " another machine serve it (--rdzv-conf is_host=0)"
    )


_SERVED_BY_ANOTHER = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def wait_until_reachable(  # noqa: PLR0913 - named, and each of them a fact of its own
    host: str,
    port: int,
    timeout_s: float,
    clock: Clock,
    stop: threading.Event,
    refused: Callable[[], None] = lambda: None,
    *,
    try_s: float = 5.0,
    longest_pause_s: float = LONGEST_PAUSE_S,
    spread: float = 0.2,
) -> str:
    """Wait until somebody listens at the endpoint; return the address that answered.

    `refused` is called whenever the machine answers that nobody listens: proof that nobody serves a
    store there. Raises EndpointError: nobody did in time.
    """
    deadline = clock.monotonic() + timeout_s
    pause_s, problem = FIRST_PAUSE_S, "nobody listens"
    while not stop.is_set():
        try:
            with reach((host, port), try_s) as probe:
                return str(probe.getpeername()[0])
        except (OSError, ValueError) as error:  # ValueError: no such name can be
            if isinstance(error, ConnectionRefusedError):
                refused()
            problem = getattr(error, "strerror", None) or str(error)
        left_s = deadline - clock.monotonic()
        if left_s <= 0:
            break
        factor = random.uniform(1 - spread, 1 + spread)  # noqa: S311 - spreads load
        stop.wait(min(left_s, pause_s * factor))
        pause_s = min(longest_pause_s, 2 * pause_s)
    raise EndpointError(
        f"--rdzv-endpoint {host}:{port}{_also(host, port)} is not reachable after {timeout_s:.0f}"
        f" s: {problem}; is the launcher of the first node running, and is the port open?"
    )


def _also(host: str, port: int) -> str:
    """Return the addresses of a host name on this machine, as part of an error message."""
    with contextlib.suppress(EndpointError):
        found = sorted({address for _, (address, _) in _addresses(host, port)} - {host})
        if found:
            return f" (here {', '.join(found)})"
    return ""


def _addresses(host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: no such name can be
        problem = getattr(error, "strerror", None) or error
        raise EndpointError(
            f"--rdzv-endpoint {host}:{port}: the name does not resolve: {problem};"
            " use a name or address that all nodes know"
        ) from None
    return [(family, (str(address[0]), int(address[1]))) for family, *_, address in found]


def read_token(path: str) -> bytes:
    """Return the key of digests that follows from the job's token file. Raises ConfigError."""
    token = credentials.read_token(path, "--ft-rdzv-token-file").encode()
    return hashlib.blake2b(token, digest_size=32, person=b"nvrx-rendezvous"[:16]).digest()
