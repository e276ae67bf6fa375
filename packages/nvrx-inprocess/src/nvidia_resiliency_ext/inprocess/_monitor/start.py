# SPDX-License-Identifier: Apache-2.0
"""Starts the one monitor of a node, by exec, or connects to the one that is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.inprocess._monitor.place import NodePlace
from nvidia_resiliency_ext.inprocess._monitor.settings import START_LIMIT_S
from nvidia_resiliency_ext.inprocess.exception import InternalError
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.wire import require_same_user

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

__all__ = [
    "START_LIMIT_S",
    "connect_or_start",
    "end_if_stopped",
    "ensure_started",
    "is_stopped",
    "run_detached",
]

END_LIMIT_S = 1.0
"""How long a monitor that was killed may take to be gone."""

_STOPPED = frozenset("Tt")
_HERE = os.path.dirname(os.path.abspath(__file__))
_PIPE_BYTES = 65536


def ensure_started(environ: Mapping[str, str] = os.environ, *, needs_torch: bool = False) -> None:
    """Start the monitor of this node, unless it runs, and do not wait until it is ready.

    Args:
        environ: Says where.
        needs_torch: It will have to make a store for which it needs torch, and may import it now.

    Raises:
        InternalError: It cannot be started.
    """
    deadline = Deadline.after(START_LIMIT_S)
    connect_or_start(deadline, environ, needs_torch=needs_torch).close()


def connect_or_start(
    deadline: Deadline, environ: Mapping[str, str] = os.environ, *, needs_torch: bool = False
) -> socket.socket:
    """Return a connection to the monitor of this node; of all who come, one starts it.

    It listens from the moment it is started, and answers as soon as it can.

    Args:
        deadline: For all of it.
        environ: Says where.
        needs_torch: As in `ensure_started`.

    Raises:
        InternalError: It cannot be started.
    """
    try:
        place = NodePlace.find(environ)
        sock = place.connect()
        if sock is None:
            with place.locked(deadline.remaining()):
                sock = place.connect()
                if sock is None:
                    _start(place, needs_torch=needs_torch)
                    sock = place.connect()
        if sock is None:
            raise InternalError("the monitor of this node ended as soon as it was started")
    except (OSError, NvrxError) as error:
        if isinstance(error, InternalError):
            raise
        raise InternalError(f"the monitor of this node cannot be started: {error}") from error
    try:
        require_same_user(sock)
    except NvrxError as error:
        sock.close()
        raise InternalError(f"the monitor of this node is not ours: {error}") from error
    return sock


def is_stopped(pid: int) -> bool:
    """Return whether the kernel lets a process do nothing until somebody continues it."""
    stat = procfs.read_stat(pid)
    return stat is not None and stat.state in _STOPPED


def end_if_stopped(environ: Mapping[str, str] = os.environ) -> bool:
    """End the monitor of this node if it is stopped; return whether it was.

    It must not go on later, beside the one that takes its place.
    """
    handle = NodePlace.find(environ).find_monitor()
    if handle is None:
        return False
    with handle:
        if not is_stopped(handle.pid):
            return False
        handle.signal(signal.SIGKILL)
        handle.wait(END_LIMIT_S)
    return True


def run_detached(order: Mapping[str, object], pass_fds: tuple[int, ...] = ()) -> None:
    """Run our program as nobody's child; `boot` says what an order may be.

    Args:
        order: What it is to do; plain values, and not too long.
        pass_fds: Descriptors that it gets, and no others.

    Raises:
        InternalError: It cannot be started.
        OSError: No descriptors are left.
    """
    if not sys.executable:
        raise InternalError("this interpreter does not know its own path, to start another one")
    paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    data = json.dumps({**order, "sys_path": paths}).encode()
    if len(data) > _PIPE_BYTES:
        raise InternalError("sys.path is too long to tell the monitor about it")
    # A pipe, because no other user can read it, unlike arguments.
    reader, writer = os.pipe()
    try:
        try:
            os.write(writer, data)
        finally:
            os.close(writer)
        _spawn(reader, pass_fds)
    finally:
        os.close(reader)


def _start(place: NodePlace, *, needs_torch: bool) -> None:
    with place.listen() as listener:
        fd = listener.fileno()
        order = {
            "directory": place.path,
            "listener": fd,
            "starter": os.getpid(),
            "needs_torch": needs_torch,
        }
        run_detached(order, (fd,))


def _spawn(order_fd: int, pass_fds: tuple[int, ...]) -> None:
    detach, boot = (os.path.join(_HERE, name) for name in ("detach.py", "boot.py"))
    with start_child(
        [sys.executable, "-I", "-S", detach, sys.executable, boot, str(order_fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(order_fd, *pass_fds),
    ) as child:
        status = child.wait(START_LIMIT_S)
        if status is None or status.returncode != 0:
            how = "does not end" if status is None else status.describe()
            raise InternalError(f"the program that starts the monitor fails: {how}")
