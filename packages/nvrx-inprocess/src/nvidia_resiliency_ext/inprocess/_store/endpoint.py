# SPDX-License-Identifier: Apache-2.0
"""Where a job's store is: its endpoint, its sockets, the keys of a call; errors of values.

How long a client waits for an answer is set at its socket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import json
import re
import socket
import struct
import time
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.inprocess.exception import RestartError
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError
from nvidia_resiliency_ext.shared_utils.store_sockets import (
    connected_sockets,
    listen_at,
    reach,
    tcp_sockets,
    watch_over,
)

STORE_VARIABLE = "NVRX_INPROCESS_STORE"
LAST_PORT = 65535
_LONGEST_NAME = 64

# torchrun's own name for a job to which nobody has given one.
_NAMELESS = ("", "none")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a store listens; `is_served` if somebody else serves it already."""

    host: str
    port: int
    is_served: bool

    def is_here(self) -> bool:
        """Return whether its address is one of this host; a ConfigError if its name means none."""
        try:
            return is_ours(self.host)
        except OSError as error:
            raise ConfigError(
                f"the store's host {self.host!r} (MASTER_ADDR, or host_name in store_kwargs)"
                f" does not resolve: {error.strerror or error}"
            ) from None

    def __str__(self) -> str:
        """Return the endpoint in the form of `NVRX_INPROCESS_STORE`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_endpoint(
    environ: Mapping[str, str], host: str | None = None, port: int | None = None
) -> Endpoint:
    """Return the endpoint of the environment, else that of the arguments and `MASTER_*`."""
    text = environ.get(STORE_VARIABLE)
    if not text:
        return named_endpoint(environ, host, port)
    host, colon, port_text = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host:
        raise ConfigError(f"{STORE_VARIABLE}={text!r}: expected host:port or [address]:port")
    return Endpoint(host, _parse_port(STORE_VARIABLE, port_text), is_served=True)


def named_endpoint(
    environ: Mapping[str, str], host: str | None = None, port: int | None = None
) -> Endpoint:
    """Return the endpoint of the arguments; what is missing comes from `MASTER_*`."""
    if host is None:
        host = environ.get("MASTER_ADDR")
        if not host:
            raise ConfigError("MASTER_ADDR is not set, and no host_name is given for the store")
    if port is None:
        port = _parse_port("MASTER_PORT", environ.get("MASTER_PORT", ""))
    return Endpoint(host, port, is_served=False)


def port_is_held(port: int) -> str:
    """Describe a port that is in use although no server listens there."""
    return (
        f"port {port} is taken all the same (EADDRINUSE), as by a connection that another program"
        " has made: give another port, or keep it free of those"
        " (sysctl net.ipv4.ip_local_reserved_ports)"
    )


def job_name(environ: Mapping[str, str]) -> str:
    """Return a name of the job that is the same on all its nodes and in all its cycles."""
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    slurm = environ.get("SLURM_JOB_ID", "")
    # A job without a name is named after its rendezvous address; ports may change with the cycle.
    address = f"{environ.get('MASTER_ADDR', '')}-{environ.get('MASTER_PORT', '')}"
    return next((_plain(name) for name in (elastic, slurm) if name not in _NAMELESS), None) or (
        _plain(address)
    )


def cycle_prefix(environ: Mapping[str, str]) -> str:
    """Return the prefix of all keys of this job in this launch cycle."""
    counters = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    cycle = ".".join(_plain(environ.get(name) or "0") for name in counters)
    return f"nvrx/{job_name(environ)}/{cycle}/"


def _parse_port(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) <= LAST_PORT:  # noqa: PLR2004
        return int(text)
    raise ConfigError(f"{name}: {text!r} is no port, expected 1 to {LAST_PORT}")


def _plain(name: str) -> str:
    """Return a name without characters that mean something in keys, and not too long."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST_NAME]
    if plain == name:
        return name
    # Two names must not become one.
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


# `outcome` is `completed`, or `interrupted;` and the first records; `reported` counts ranks that
# have reported, or arrived and do not go on; `all_reported` has all records. Outcome, all_reported
# and decision are set once.
IterationKeys = namedtuple(  # noqa: PYI024 - all are texts
    "IterationKeys",
    "outcome completions completed interruption_records reported all_reported arrivals arrived"
    " decision",
)


def iteration_prefix(iteration: int) -> str:
    """Return the prefix of all keys of an iteration, below the prefix of the call."""
    return f"_inprocess_{iteration}"


def iteration_keys(prefix: str, iteration: int) -> IterationKeys:
    """Return the keys of an iteration of the call whose keys begin with `prefix`."""
    below = f"{prefix}{iteration_prefix(iteration)}/"
    return IterationKeys(*(below + name for name in IterationKeys._fields))


_SHOWN = 200


class NobodyListensError(StoreLostError):
    """No server listens at the store's port."""


class ForeignValueError(RestartError):
    """A key holds what none of us has written; the message shows the value's beginning."""

    def __init__(self, key: str, value: str) -> None:
        super().__init__(key, value[:_SHOWN])
        self.key = key
        self.value = value[:_SHOWN]

    def __str__(self) -> str:
        return f"the store holds at {self.key!r} what no rank of this job writes: {self.value!r}"


_MOST_DIGITS = 9


def require_number(key: str, text: str) -> int:
    """Return the number of up to nine digits that a key holds; else a ForeignValueError."""
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise ForeignValueError(key, text)


def require_json(key: str, text: str) -> Any:
    """Return the JSON that a key holds; a ForeignValueError for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ForeignValueError(key, text) from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class name where there is no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


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
