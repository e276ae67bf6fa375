# SPDX-License-Identifier: Apache-2.0
"""Time stamps of a rank's progress under the names that programs know; see `_call/watchdog.py`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

from ._call.watchdog import Watchdog
from ._inputs import check_duration

__all__ = ["ProgressWatchdog", "Timestamp"]


@dataclass(frozen=True)
class Timestamp:
    """When a rank last showed progress, in seconds of the monotonic clock.

    Attributes:
        auto: When its main thread last ran bytecode.
        manual: When its function last called `ping`; `None` before the first call.

    Example:
        >>> Timestamp(auto=time.monotonic()).is_timed_out(timedelta(seconds=60))
        False
    """

    auto: float | None = None
    manual: float | None = None

    def is_timed_out(self, timeout: timedelta) -> bool:
        """Return whether one of the two time stamps is older than `timeout`."""
        oldest = time.monotonic() - timeout.total_seconds()
        return any(value is not None and value < oldest for value in (self.auto, self.manual))


class _Receiver(Protocol):
    def send_timestamp(self, timestamp: Timestamp, /) -> object: ...


class ProgressWatchdog:
    """Sends a time stamp for every progress signal.

    Args:
        rank: For messages.
        monitor_process: Its `send_timestamp` gets every stamp, in whichever thread it is made.
        interval: Time between two automatic stamps.
    """

    def __init__(self, rank: int, monitor_process: _Receiver, interval: timedelta) -> None:
        check_duration("interval", interval)
        self.rank = rank
        self._receiver = monitor_process
        self._watchdog = Watchdog(self.stamp_auto, interval.total_seconds())
        # Guards the stamp, so that none goes out in front of an older one.
        self._lock = threading.Lock()
        self._timestamp = Timestamp()
        self._paused = threading.Event()
        self._is_shut_down = False

    def start(self) -> None:
        """Start to send automatic time stamps."""
        self._watchdog.start()

    def stamp_auto(self) -> None:
        """Stamp that the main thread runs bytecode, and send the stamp."""
        self._send(auto=time.monotonic())

    def ping(self) -> None:
        """Stamp that the function makes progress, and send the stamp."""
        self._send(manual=time.monotonic())

    def reset(self) -> None:
        """Reset: a missing `ping` counts again only after the next call of `ping`."""
        self._send(auto=time.monotonic(), manual=None)

    def send(self) -> None:
        """Send the last stamp again."""
        self._send()

    def _send(self, **changes: float | None) -> None:
        with self._lock:
            self._timestamp = replace(self._timestamp, **changes)
            self._receiver.send_timestamp(self._timestamp)

    def pause_and_synchronize(self) -> None:
        """Reset with one stamp, then send no automatic stamp until `resume`."""
        with self._lock:
            self._timestamp = Timestamp(self._timestamp.auto)
        self._watchdog.pause()
        self._paused.set()

    def spin_till_paused(self) -> None:
        """Wait until the watchdog is paused."""
        self._paused.wait()

    def resume(self) -> None:
        """Continue after a pause, if there is one; raise `RuntimeError` if it was shut down."""
        if self._is_shut_down:
            raise RuntimeError("the progress watchdog was shut down")
        self._paused.clear()
        self._watchdog.resume()

    def shutdown(self, timeout: float | None = None) -> None:
        """End, with one more stamp, within `timeout` seconds; harmless when repeated."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._watchdog.stop(timeout)
        self.stamp_auto()
