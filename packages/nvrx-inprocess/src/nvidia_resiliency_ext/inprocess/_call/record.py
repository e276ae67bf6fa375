# SPDX-License-Identifier: Apache-2.0
"""Puts a rank's restarts into the job's record of events, where there is one."""

from __future__ import annotations

from nvidia_resiliency_ext.inprocess import _env
from nvidia_resiliency_ext.shared_utils.events import EventLog, InprocRestart

from .report import RestartReport


class RestartRecord:
    """The record of one call; it writes nothing where no launcher keeps one.

    Args:
        call: The call's number in its launch cycle.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self._log = EventLog.join(src="wrapper")
        self._cycle = _env.launch_cycle()

    def add(self, report: RestartReport, rank: int) -> None:
        """Record a restart. One rank does it for all."""
        event = InprocRestart(
            call=self._call,
            iteration=report.iteration,
            cause=report.cause,
            ranks=report.ranks,
            phases={name: seconds for name, seconds in report.seconds.items() if seconds},
            kept_ranks=report.kept,
            lost_ranks=report.terminated,
            hang=report.hang or None,
            culprits=report.culprits or None,
        )
        self._log.record(event, cycle=self._cycle, rank=rank)

    def close(self) -> None:
        """Let the file go."""
        self._log.close()
