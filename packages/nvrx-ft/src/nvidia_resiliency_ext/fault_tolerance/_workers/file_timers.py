# SPDX-License-Identifier: Apache-2.0
"""Deadlines that programs set with torch's `FileTimerClient`: who misses one is signalled.

As under torchrun, requests come through a named pipe, one JSON object a line. Only processes of
this node's workers can be signalled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, Timer

logger = logging.getLogger("nvrx")

LONGEST_LINE = select.PIPE_BUF  # What a client writes at once, so that it is not cut.
MOST_TIMERS = 4096
_READ_BYTES = 1 << 16


class TimerRequest(NamedTuple):
    """A deadline of a process (unix s), or, if negative, its withdrawal."""

    pid: int
    scope: str
    expires: float
    signum: int


def parse_request(line: bytes) -> TimerRequest | None:
    try:
        raw = json.loads(line)
        found = TimerRequest(
            raw["pid"], raw["scope_id"], float(raw["expiration_time"]), raw["signal"]
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    # A NaN compares with nothing, and the loop could not wait without end.
    is_good = (
        tuple(map(type, found)) == (int, str, float, int)
        and 1 < found.pid < 2**31
        and 0 <= found.signum < signal.NSIG
        and abs(found.expires) < 2**53
    )
    return found if is_good else None


@dataclass(eq=False)
class FileTimers:
    """Reads the pipe in the launcher's loop and keeps a timer for each deadline."""

    path: str
    loop: EventLoop
    clock: Clock
    worker_pids: Callable[[], Collection[int]]

    def __post_init__(self) -> None:
        self._timers: dict[tuple[int, str], Timer] = {}
        self._rest = b""
        # One that an earlier launch has left is made anew.
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISFIFO(os.lstat(self.path).st_mode):
                os.unlink(self.path)
        os.mkfifo(self.path, 0o600)
        # For writing too: so there is always a reader, and never an end.
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.loop.watch(self._fd, self._receive)

    def close(self) -> None:
        self.loop.unwatch(self._fd)
        os.close(self._fd)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        with contextlib.suppress(OSError):  # It may be gone with its directory.
            os.unlink(self.path)

    def _receive(self) -> None:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:LONGEST_LINE]
        for line in lines:
            request = parse_request(line) if len(line) <= LONGEST_LINE else None
            if request is None:
                logger.warning("a line in %s is no request for a timer: %.100r", self.path, line)
            else:
                self._take(request)

    def _take(self, request: TimerRequest) -> None:
        key = (request.pid, request.scope)
        earlier = self._timers.pop(key, None)
        if earlier is not None:
            earlier.cancel()
        if request.expires < 0:
            return
        if len(self._timers) >= MOST_TIMERS:
            logger.warning("timer %r of process %d is one too many", request.scope, request.pid)
            return
        # The request has a wall time, the loop goes by the other clock.
        wait_s = max(0.0, request.expires - self.clock.wall())
        at = self.clock.monotonic() + wait_s
        self._timers[key] = self.loop.call_at(at, lambda: self._expired(request))

    def _expired(self, request: TimerRequest) -> None:
        self._timers.pop((request.pid, request.scope), None)
        with contextlib.suppress(ProcessLookupError):
            if request.signum and os.getsid(request.pid) in self.worker_pids():
                logger.error(
                    "timer %r of process %d expired; it gets signal %d",
                    *(request.scope, request.pid, request.signum),
                )
                os.kill(request.pid, request.signum)
