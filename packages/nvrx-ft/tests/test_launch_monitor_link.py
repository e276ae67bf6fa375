# SPDX-License-Identifier: Apache-2.0
"""What the launcher keeps of what its monitor says."""

import contextlib
import os
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.monitor_link import SharedMonitor
from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop


class _Child:
    pid = 1

    def wait(self, timeout_s: float) -> None:
        """Say nothing of how it ended."""


class TalkingHandle:
    """Stands for a monitor's process: says what it is told to say."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self.said: list[object] = []
        self.is_over = False
        self.slots: list[object] = []
        self.child = _Child()

    def fileno(self) -> int:
        """Return what the loop watches."""
        return self._reading

    def receive(self) -> list[object]:
        """Return what was said since the last time."""
        said, self.said = self.said, []
        return said

    def wait_ready(self, limit_s: float) -> None:
        """Be ready."""

    def send(self, message: object) -> None:
        """Take what the launcher says."""

    def close(self) -> None:
        """Let the descriptors go."""
        os.close(self._reading)
        os.close(self._writing)


def test_no_restart_depends_on_a_monitor() -> None:
    """One that died and cannot be started again is tried again, and the cycle begins without it."""
    clock = SystemClock()
    loop = EventLoop(clock)
    handles: list[TalkingHandle] = []
    starts: list[bool] = []
    is_refused = False

    def start(_cycle: int, _word: int) -> TalkingHandle:
        starts.append(is_refused)
        if is_refused:
            raise OSError(11, "Resource temporarily unavailable")
        handles.append(TalkingHandle())
        return handles[-1]

    monitor = SharedMonitor(
        Mock(loop=loop, clock=clock),
        start,  # type: ignore[arg-type]
    )
    monitor.prepare(0)
    handles[0].is_over = is_refused = True
    monitor.prepare(1)
    monitor.workers_changed(messages.WorkersChanged(1, [7]))
    assert monitor.hang_report() == {}
    assert monitor.last_iteration() is None
    assert starts == [False, True]
    is_refused = False
    while len(handles) < 2:
        loop.run_once(until=clock.monotonic() + 10)
    monitor.prepare(2)
    assert len(handles) == 2
    handles[1].close()
    loop.close()


@pytest.mark.parametrize(("first", "is_silent"), [(5, False), (0, True)])
def test_only_the_first_launch_needs_a_monitor(first: int, is_silent: bool) -> None:
    """A spare node whose monitor has died takes part, and so does one whose monitor is not ready.

    In the round before, nobody needed its monitor, or all went well.
    """
    clock = SystemClock()
    loop = EventLoop(clock)
    handles: list[TalkingHandle] = []
    is_refused = False

    class Silent(TalkingHandle):
        def wait_ready(self, limit_s: float) -> None:
            if is_refused:
                raise NvrxError(f"the monitor is not ready after {limit_s:g} s")

    def start(_cycle: int, _word: int) -> TalkingHandle:
        if is_refused and not is_silent:
            raise OSError(11, "Resource temporarily unavailable")
        handles.append(Silent())
        return handles[-1]

    monitor = SharedMonitor(
        Mock(loop=loop, clock=clock),
        start,  # type: ignore[arg-type]
    )
    if first == 0:
        monitor.prepare(0)
    handles[0].is_over = is_refused = True
    monitor.prepare(first + 1)
    assert monitor.hang_report() == {}
    for handle in handles:
        with contextlib.suppress(OSError):
            handle.close()
    loop.close()


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    """Return the launcher's loop."""
    loop = EventLoop(SystemClock())
    yield loop
    loop.close()


def test_a_launch_without_a_monitor_does_not_begin(loop: EventLoop) -> None:
    """A monitor that is never there is an error of the first cycle, not a warning."""

    def start(_cycle: int, _word: int) -> TalkingHandle:
        raise OSError(11, "Resource temporarily unavailable")

    with pytest.raises(OSError, match="temporarily"):
        SharedMonitor(
            Mock(loop=loop, clock=SystemClock()),
            start,  # type: ignore[arg-type]
        )


@pytest.fixture
def handle() -> Iterator[TalkingHandle]:
    """Return a monitor's end."""
    handle = TalkingHandle()
    yield handle
    handle.close()


def report(rank: int, cycle: int, culprits: list[int]) -> dict[str, object]:
    """Return what the link reads of a report."""
    return {"local_rank": rank, "cycle": cycle, "culprits": culprits}


def test_a_hang_of_the_last_cycle_is_none_of_this_one(
    handle: TalkingHandle, loop: EventLoop
) -> None:
    """A report that comes after the restart is dropped; one that names a culprit is kept."""
    monitor = SharedMonitor(
        Mock(loop=loop, clock=SystemClock()),
        lambda _cycle, _word: handle,  # type: ignore[arg-type, return-value]
    )
    monitor.prepare(0)
    handle.said = [messages.HangFound(report(0, 0, [0]))]
    assert monitor.hang_report() == report(0, 0, [0])
    monitor.prepare(1)
    handle.said = [messages.HangFound(report(1, 0, [1]))]
    assert monitor.hang_report() == {}
    handle.said = [
        messages.HangFound(report(1, 1, [])),
        messages.HangFound(report(2, 1, [2])),
        messages.HangFound(report(3, 1, [3])),
    ]
    assert monitor.hang_report() == report(2, 1, [2])
