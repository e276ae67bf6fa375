# SPDX-License-Identifier: Apache-2.0
"""Requests that steer a running job, and the Unix socket on which rank 0 takes them.

Only processes of the same user are answered, and none waits for another one. A change takes effect
on all ranks at the next report, through the report's own exchange.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.attribution.straggler._errors import ControlError
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError, NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop
from nvidia_resiliency_ext.shared_utils.rundir import RunDir, live_run_dirs, remove_stale_run_dirs
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel, connect, listen
from nvidia_resiliency_ext.shared_utils.wire import (
    MessageSet,
    receive_message,
    require_same_user,
    send_message,
)

LABEL = "straggler"

_SOCKET = "control.sock"
DEFAULT_TIMEOUT_S = 5.0
"""How long `nvrx-straggler` waits for an answer, unless it is told."""
_MOST_CLIENTS = 16
_CLOSE_TIMEOUT_S = 5.0
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
    """Listens for one job and answers in a thread of its own.

    A client that says nothing holds up no other one; when many are connected, the oldest goes.

    Args:
        answer: Answers each request, in the server's thread.

    Raises:
        OSError: There is no place or no descriptor for the socket.
        RuntimeError: The system gives no thread.
    """

    def __init__(self, answer: Handler) -> None:
        self._answer = answer
        remove_stale_run_dirs()  # of ranks that were killed, in earlier cycles of this job too
        self._pid = os.getpid()
        self._is_closed = False
        self._clients: deque[Channel] = deque()
        self._thread = threading.Thread(
            target=self._serve, name="nvrx-straggler-control", daemon=True
        )
        with ExitStack() as parts:  # closed in reverse order, here if one of them fails
            self._run_dir = RunDir.create(LABEL)
            parts.callback(self._remove_dir)
            self._loop = EventLoop()
            parts.callback(self._loop.close)
            self._listener = parts.enter_context(listen(self._run_dir.socket_path(_SOCKET)))
            self._thread.start()
            self._parts = parts.pop_all()

    @property
    def path(self) -> str:
        """The private directory of the socket."""
        return self._run_dir.path

    def close(self) -> None:
        """End the thread and remove the socket; in a forked child, only our descriptors."""
        if os.getpid() == self._pid:
            self._is_closed = True
            self._loop.wake()
            self._thread.join(_CLOSE_TIMEOUT_S)
        for client in self._clients:
            client.close()
        self._parts.close()

    def _remove_dir(self) -> None:
        if os.getpid() == self._pid:
            self._run_dir.remove()

    def _serve(self) -> None:
        self._loop.watch(self._listener, self._accept)
        while not self._is_closed:
            self._loop.run_once()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # The client is gone, or no descriptor is free: the connection stays pending.
            logger.warning("straggler control: a connection cannot be taken: %s", error)
            self._loop.unwatch(self._listener)
            watch_again = functools.partial(self._loop.watch, self._listener, self._accept)
            self._loop.call_at(time.monotonic() + _RETRY_S, watch_again)
            return
        client = Channel(sock, MESSAGES, max_fds=0)
        self._clients.append(client)
        try:
            require_same_user(sock)
        except (NvrxError, OSError) as error:
            self._end(client, f"a request was not answered: {error}")
            return
        if len(self._clients) > _MOST_CLIENTS:
            self._end(self._clients[0], f"more than {_MOST_CLIENTS} clients: the oldest must go")
        self._loop.watch(client, functools.partial(self._advance, client))

    def _advance(self, client: Channel) -> None:
        """Answer a client's request, if it is whole; what is left to send, it may still read."""
        client.flush()
        try:
            for request in client.receive():
                client.send(self._answer(request))
        except (NvrxError, OSError) as error:
            self._end(client, f"a request was not answered: {error}")
            return
        if client.is_garbled:
            self._end(client, "a request was not answered: it is no message")
        elif client.is_over:
            self._end(client)
        else:
            advance = functools.partial(self._advance, client)
            self._loop.watch(client, advance, write=client.wants_to_write)

    def _end(self, client: Channel, reason: str = "") -> None:
        if reason:
            logger.warning("straggler control: %s", reason)
        self._loop.unwatch(client)
        self._clients.remove(client)
        client.close()


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


def ask(run_dir: str, request: StatusRequest | Change, timeout_s: float) -> Status:
    """Send a request to a job and return its answer.

    Args:
        run_dir: The job's control directory.
        request: What to ask.
        timeout_s: How long the job may take for each step.

    Raises:
        ControlError: The job cannot be reached, refuses, or runs as another user.
    """
    try:
        path = RunDir(run_dir).socket_path(_SOCKET)
        with connect(path, timeout_s) as sock:
            require_same_user(sock)
            send_message(sock, MESSAGES, request, timeout_s)
            answer = receive_message(sock, MESSAGES, timeout_s)
    except (DeadlineExceededError, TimeoutError) as error:
        raise ControlError(
            f"the job at {run_dir} has not answered within {timeout_s:g} s; a busy one may need a"
            " longer --timeout"
        ) from error
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
