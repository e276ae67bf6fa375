# SPDX-License-Identifier: Apache-2.0
"""Owns when the lines of layered restarts are written for one rank; not what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance.rank_monitor_state_machine import (
        RankMonitorStateMachine,
    )

__all__ = ["RestartLines"]


class RestartLines:
    """Feeds the state machine of one rank; does nothing without one."""

    def __init__(self, machine: RankMonitorStateMachine | None, interval_s: float) -> None:
        """Follow a rank.

        Args:
            machine: Writes the lines; None for none.
            interval_s: Pause between two lines while a restart lasts.
        """
        self._machine = machine
        self._interval_s = interval_s
        self.next_check: float | None = None
        """When `check` is due, on the monotonic clock."""

    def alive(self) -> None:
        """The rank showed its first sign of life in a session."""
        if self._machine is not None and self._machine.state.name not in ("ABORTED", "FINALIZED"):
            self._machine.handle_heartbeat_msg()
            self.next_check = None

    def lost(self, now: float) -> None:
        """The session ended."""
        if self._machine is not None:
            self._machine.handle_ipc_connection_lost()
            self.next_check = now + self._interval_s if self._machine.is_restarting() else None

    def check(self, now: float) -> None:
        """Say that a restart still lasts, if it is time."""
        if self._machine is None or self.next_check is None or now < self.next_check:
            return
        self._machine.periodic_restart_check()
        self.next_check = now + self._interval_s

    def finish(self) -> None:
        """The monitor ends in order."""
        if self._machine is not None:
            self._machine.handle_signal()
