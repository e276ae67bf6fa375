# SPDX-License-Identifier: Apache-2.0
"""Requests that steer a running job, and the Unix socket on which rank 0 takes them.

Only processes of the same user are answered. A change takes effect on all ranks at the next
report, through the report's own exchange.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.attribution.straggler._errors import ControlError
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp
from nvidia_resiliency_ext.shared_utils.rundir import RunDir, live_run_dirs, remove_stale_run_dirs
from nvidia_resiliency_ext.shared_utils.wire import (
    MessageSet,
    receive_message,
    require_same_user,
    send_message,
)

__all__ = [
    "MESSAGES",
    "Change",
    "ControlServer",
    "Handler",
    "Refused",
    "Status",
    "StatusRequest",
    "ask",
    "find_job",
    "status_of",
]

LABEL = "straggler"

_SOCKET = "control.sock"
_TIMEOUT_S = 5.0
_RETRY_S = 1.0

logger = logging.getLogger("nvrx")


@dataclass(frozen=True)
class StatusRequest:
    """Ask for the state of the job's detectors."""


@dataclass(frozen=True)
class Change:
    """Ask for new values of settings, by name."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Status:
    """The state of the job's detectors, and the answer to an accepted change.

    Attributes:
        job: The scheduler's or launcher's name of the job.
        pid: Process of rank 0.
        world_size: Number of ranks.
        settings: Settings in force.
        pending: Settings that take effect with the next report; equal to those in force if none.
        cuda_profiling: How kernel timing stands on rank 0.
        summary: The last report as a table, empty before the first.
    """

    job: str
    pid: int
    world_size: int
    settings: dict[str, Any]
    pending: dict[str, Any]
    cuda_profiling: str
    summary: str


@dataclass(frozen=True)
class Refused:
    """The change was not accepted."""

    reason: str


MESSAGES = MessageSet(StatusRequest, Change, Status, Refused)


Handler = Callable[[object], Status | Refused]
"""Answers a request; it raises nothing."""


class ControlServer:
    """Listens for one job; answers in a thread of its own, one connection at a time.

    Args:
        answer: Answers each request, in the server's thread.

    Raises:
        OSError: There is no place for the socket.
    """

    def __init__(self, answer: Handler) -> None:
        self._answer = answer
        remove_stale_run_dirs()  # of ranks that were killed, in earlier cycles of this job too
        self._run_dir = RunDir.create(LABEL)
        self._pid = os.getpid()
        self._wake_up = WakeUp()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(self._run_dir.socket_path(_SOCKET))
            self._listener.listen()
        except OSError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._serve, name="nvrx-straggler-control")
        self._thread.daemon = True
        self._thread.start()

    @property
    def path(self) -> str:
        """The private directory of the socket."""
        return self._run_dir.path

    def close(self) -> None:
        """End the thread and remove the socket; in a forked child, only our descriptors."""
        if os.getpid() == self._pid:
            self._wake_up.set()
            self._thread.join(_TIMEOUT_S)
        self._release()

    def _release(self) -> None:
        self._listener.close()
        self._wake_up.close()
        if os.getpid() == self._pid:
            self._run_dir.remove()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while True:
            if self._wake_up.fileno() in {descriptor for descriptor, _ in poll.poll()}:
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                # The client is gone, or no descriptor is free: the connection stays pending.
                logger.warning("straggler control: a connection cannot be taken: %s", error)
                if select.select([self._wake_up], [], [], _RETRY_S)[0]:
                    return
                continue
            with connection:
                self._serve_connection(connection)

    def _serve_connection(self, connection: socket.socket) -> None:
        try:
            require_same_user(connection)
            request = receive_message(connection, MESSAGES, _TIMEOUT_S)
            send_message(connection, MESSAGES, self._answer(request), _TIMEOUT_S)
        except (NvrxError, OSError) as error:
            logger.warning("straggler control: a request was not answered: %s", error)


def find_job(run_dir: str | None) -> str:
    """Return the control directory of the job to steer.

    Args:
        run_dir: The directory; default: the only one of a live job of this user on this host.

    Raises:
        ControlError: There is none, or more than one.
    """
    if run_dir is not None:
        return run_dir
    found = [path for path in live_run_dirs(LABEL) if os.path.exists(os.path.join(path, _SOCKET))]
    if not found:
        raise ControlError(
            "no job with a straggler detector runs here; run this on the host of rank 0 as the"
            " job's user, after the first iteration"
        )
    if len(found) > 1:
        raise ControlError(f"several jobs run here, choose one with --run-dir: {', '.join(found)}")
    return found[0]


def ask(run_dir: str, request: StatusRequest | Change) -> Status:
    """Send a request to a job and return its answer.

    Raises:
        ControlError: The job cannot be reached, refuses, or runs as another user.
    """
    try:
        path = RunDir(run_dir).socket_path(_SOCKET)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_TIMEOUT_S)
            sock.connect(path)
            require_same_user(sock)
            send_message(sock, MESSAGES, request, _TIMEOUT_S)
            answer = receive_message(sock, MESSAGES, _TIMEOUT_S)
    except (NvrxError, OSError, ValueError) as error:
        raise ControlError(f"the job at {run_dir} cannot be reached: {error}") from error
    return status_of(answer, f"the job at {run_dir}")


def status_of(answer: object, place: str) -> Status:
    """Return an answer that is a status.

    Raises:
        ControlError: It is a refusal, or something else.
    """
    if isinstance(answer, Refused):
        raise ControlError(answer.reason)
    if not isinstance(answer, Status):
        raise ControlError(f"{place} answered with {type(answer).__name__}")
    return answer
