# SPDX-License-Identifier: Apache-2.0
"""Find and end waits of a thread that no signal ends: the kernel's view, waits at torch's stores.

A wait at a TCPStore is ended as torch ends an expired one: the server is asked over the same
connection to cancel it, so the store stays usable. torch's client for `env://` and `tcp://` keeps
trying to connect, and its host waits for all clients; neither ends on a signal. So during a call
the client waits in Python until the port listens, and the host, whose groups wait for each other's
keys anyway, does not wait.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import importlib
import logging
import os
import platform
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint
from nvidia_resiliency_ext.inprocess.store import connect_client
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.attribute_wrapping import WrappedAttribute
from nvidia_resiliency_ext.shared_utils.store_client import StoreLostError, handshake
from nvidia_resiliency_ext.shared_utils.store_sockets import tcp_socket


class Wait(enum.Enum):
    """System calls in which torch's threads wait."""

    POLL = enum.auto()
    FUTEX = enum.auto()


# poll and ppoll, futex.
_CALLS = {
    "x86_64": {7: Wait.POLL, 271: Wait.POLL, 202: Wait.FUTEX},
    "aarch64": {73: Wait.POLL, 98: Wait.FUTEX},
}

# A wait that was held up, as by SIGSTOP and SIGCONT, goes on in this call, with its own arguments.
_RESTART = {"x86_64": 219, "aarch64": 128}

# The second argument tells which one it was: poll's count of descriptors, or futex's operation
# FUTEX_WAIT or FUTEX_WAIT_BITSET between threads of one process, by either clock.
_RESTARTED = {0x1: Wait.POLL, **dict.fromkeys((0x80, 0x89, 0x180, 0x189), Wait.FUTEX)}

# FUTEX_WAIT_BITSET between threads of one process, by either clock: glibc's wait for a condition.
_CONDITION_WAITS = frozenset({0x89, 0x189})
_FIELDS = 7  # the number of a call, then its arguments


def system_call(native_id: int | str) -> tuple[int, ...]:
    """Return number and arguments of the call that a thread is in; nothing where it is in none."""
    try:
        call = procfs.syscall(os.getpid(), int(native_id)) or ()
    except OSError:  # no descriptor is left
        return ()
    return call if len(call) == _FIELDS else ()


def thread_name(native_id: int | str) -> str:
    """Return the kernel's name of a thread of this process; "" when it has ended."""
    try:
        with open(f"/proc/self/task/{native_id}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def kernel_wait(native_id: int) -> tuple[Wait | None, int, int]:
    """Return how a thread waits, and the call's first two arguments; `None` where it does not."""
    return wait_of(system_call(native_id))


def wait_of(call: tuple[int, ...]) -> tuple[Wait | None, int, int]:
    """Classify a system call as a wait, with its first two arguments: see `kernel_wait`."""
    if not call:
        return None, 0, 0
    number, first, second = call[:3]
    machine = platform.machine()
    if number == _RESTART.get(machine):
        return _RESTARTED.get(second), first, second
    return _CALLS.get(machine, {}).get(number), first, second


def own_memory(address: int, size: int) -> bytes:
    """Return bytes of this process by the kernel: memory that is gone is an error and no crash."""
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, size, address)
    except OverflowError as error:
        raise OSError(errno.EFAULT, f"no address: {error}") from None
    finally:
        os.close(memory)


def is_in_futex(native_id: int) -> bool:
    """Return whether a thread waits for another one, as in a condition variable of C++."""
    return kernel_wait(native_id)[0] is Wait.FUTEX


def is_in_untimed_condition(native_id: int | str) -> bool:
    """Return whether a thread waits for a condition variable of C or C++, and without a limit."""
    call = system_call(native_id)
    if not call or _CALLS.get(platform.machine(), {}).get(call[0]) is not Wait.FUTEX:
        return False
    _, _, operation, _, timeout = call[:5]
    return operation in _CONDITION_WAITS and timeout == 0


logger = logging.getLogger("nvrx")
_POLL_FD = struct.Struct("=ihh")

# Of torch's protocol. The answer is one byte, in the place of the one that the wait would have had.
_CANCEL_WAIT = b"\x0c"
_PROBE_S = 1.0

# A server answers within milliseconds; one that does not is no use any more.
_ANSWERED_WITHIN_S = 1.0


class StoreWaits:
    """Ends waits of one thread, each once."""

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
        is_store = _is_store(connection) if asked_s is None else None
        if is_store is False:
            return False
        self._cancelled[name] = now
        if is_store:
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


def _is_store(connection: socket.socket) -> bool | None:
    """Return whether a connection's server is a store; None for one that is dead or silent."""
    host, port = connection.getpeername()[:2]
    is_connected = False
    try:
        with socket.create_connection((host, port), _PROBE_S) as probe:
            is_connected = True
            return handshake(probe)
    except OSError as error:
        is_silent = not is_connected or isinstance(error, TimeoutError)
        return None if is_silent else False


_NAME = "TCPStore"

# Of its arguments after host and port; torch 2.4 gives three of them without names.
_POSITIONS = (
    "world_size",
    "is_master",
    "timeout",
    "wait_for_workers",
    "multi_tenant",
    "master_listen_fd",
    "use_libuv",
)
_LIMIT = timedelta(seconds=300)


class RendezvousError(StoreLostError, RuntimeError):
    """No store answers for a process group; a RuntimeError, like torch's own error."""


@contextlib.contextmanager
def patient_rendezvous() -> Iterator[None]:
    """Make torch's rendezvous interruptible inside."""
    # As an attribute of the package it is the function of the same name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    if not hasattr(rendezvous, _NAME):
        yield  # a torch that does it in another way
        return

    def make(wrapped: WrappedAttribute) -> Any:
        def connect_patiently(host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
            kwargs |= dict(zip(_POSITIONS, args, strict=False))
            kwargs["wait_for_workers"] = False
            connect = functools.partial(wrapped.original, host_name, port, **kwargs)
            if kwargs.get("is_master", False):
                return connect()
            limit_s = (kwargs.get("timeout") or _LIMIT).total_seconds()
            try:
                return connect_client(connect, Endpoint(host_name, port, is_served=True), limit_s)
            except StoreLostError as error:
                raise RendezvousError(str(error)) from None

        return connect_patiently

    with contextlib.ExitStack() as stack:
        stack.callback(WrappedAttribute(rendezvous, _NAME, make).restore)
        yield
