# SPDX-License-Identifier: Apache-2.0
"""What the launcher keeps of what its monitor says."""

import os
from collections.abc import Iterator

import pytest

from nvidia_resiliency_ext.fault_tolerance._launch.loop import EventLoop
from nvidia_resiliency_ext.fault_tolerance._launch.monitor_link import SharedMonitor
from nvidia_resiliency_ext.fault_tolerance._monitor import control
from nvidia_resiliency_ext.shared_utils.clock import SystemClock


class TalkingHandle:
    """Stands for a monitor's process: says what it is told to say."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self.said: list[object] = []
        self.is_over = False
        self.slots: list[object] = []

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


@pytest.fixture
def handle() -> Iterator[TalkingHandle]:
    """Return a monitor's end."""
    handle = TalkingHandle()
    yield handle
    handle.close()


def test_a_hang_of_the_last_cycle_is_none_of_this_one(handle: TalkingHandle) -> None:
    """Two ranks hang at once; the report on the second comes after the restart and is dropped."""
    clock = SystemClock()
    monitor = SharedMonitor(
        lambda _cycle, _word: handle,  # type: ignore[arg-type, return-value]
        EventLoop(clock),
        clock,
        on_first_step=lambda _rank, _at: None,
        on_stuck=lambda _rank, _where: None,
    )
    monitor.prepare(0)
    handle.said = [control.HangFound({"local_rank": 0, "cycle": 0})]
    assert monitor.hang_report(0) == {"local_rank": 0, "cycle": 0}
    monitor.prepare(1)
    handle.said = [control.HangFound({"local_rank": 1, "cycle": 0})]
    assert monitor.hang_report(1) == {}
    handle.said = [control.HangFound({"local_rank": 1, "cycle": 1})]
    assert monitor.hang_report(1) == {"local_rank": 1, "cycle": 1}
