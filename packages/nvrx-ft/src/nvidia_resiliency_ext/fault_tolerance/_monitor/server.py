# SPDX-License-Identifier: Apache-2.0
"""Owns the loop of the monitor process and its line to the launcher; the ranks are in `port`."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, WorkerThread
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel

from . import messages
from .handle import sweep
from .hang_report import HEALTH_RULES, cause_kind, found_in_words
from .inquiry import Inquiry
from .node_watch import NodeWatch
from .port import RankPort, RestartLines
from .session import RankSession

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance import rank_monitor_state_machine

logger = logging.getLogger("nvrx")


class MonitorServer:
    """Watches the ranks of one node in one thread; what may block goes to `slow`."""

    def __init__(
        self,
        start: messages.Start,
        launcher: socket.socket | None,
        lines: SimpleQueue[messages.LogLine] | None = None,
        restarter: rank_monitor_state_machine.RestarterEventLogger | None = None,
    ) -> None:
        self.cycle = start.cycle
        self.host = start.host or os.uname().nodename.split(".", 1)[0]
        self.run_dir = start.run_dir
        self.record_dir = start.record_dir
        self.config = start.config
        self._start = start
        self._lines = lines
        self._lease_until: float | None = None
        self._is_leaving = False
        self._is_told_to_leave = False
        self._is_launcher_gone = False
        self.loop = EventLoop(call=self._guard)
        self.slow = WorkerThread()
        self.loop.watch(self.slow, self.slow.collect)
        self.workers = messages.WorkersChanged(start.cycle, [])
        # Of the last workers that there were: when each began (clock ticks), or None if unknown.
        self._groups: dict[int, int | None] = {}
        self.inquiries: list[Inquiry] = []
        self._launcher = None if launcher is None else Channel(launcher, messages.LAUNCHER_MESSAGES)
        local_ranks = start.local_ranks or list(range(len(start.socket_paths)))
        interval_s = float(start.config["restart_check_interval"])
        # One rank speaks for its node: layered restarts follow nodes.
        speaker = (restarter or self) if start.is_restarter_logger else None
        self.ports = [
            RankPort(self, rank, path, RestartLines(None if rank else speaker, interval_s))
            for rank, path in zip(local_ranks, start.socket_paths, strict=True)
        ]
        for port in self.ports:
            port.save(start.save_word)
        self._node_watch = NodeWatch(local_ranks, start.config, self._record_unfit)

    @property
    def is_dismissed(self) -> bool:
        """Whether the launcher is gone or said `Leave`: nobody needs the run directory any more."""
        return self._is_told_to_leave or self._is_launcher_gone

    def announce(self) -> None:
        """Announce to the launcher that ranks may connect, and start reading its messages."""
        if self._launcher is not None:
            self._launcher.send(messages.Ready(), [port.memory.fd for port in self.ports])
            self._watch_launcher()

    def run(self) -> None:
        """Serve until it gets `Leave` or the launcher is gone; then sweep what the run left behind.

        Whoever gets an exception out of this has a monitor that is gone and ranks that live on.
        """
        self._node_watch.start()
        try:
            while not self._is_leaving:
                self.loop.run_once(until=self._next_wake())
                for port in self.ports:
                    self._guard(partial(port.tick, time.monotonic()))
                self._guard(self._evaluate_lease)
                self._pass_on_lines()
        finally:
            self._close()

    def _record_unfit(self, local_rank: int, rule: str, reason: str) -> None:
        """Take a finding of the node watch, in its thread."""
        [port] = [port for port in self.ports if port.local_rank == local_rank]
        self.loop.post(partial(port.hold_at_fault, rule, reason))

    def leave(self) -> None:
        """End `run` soon; from any thread and from a signal handler."""
        self._is_leaving = True
        self.loop.wake()

    def notify_launcher(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message to the launcher, if there is one; never waits."""
        if self._launcher is not None and self._start.run_id:
            self._launcher.send(message, fds, is_droppable=isinstance(message, messages.LogLine))
            self._watch_launcher()

    def open_inquiry(self, session: RankSession) -> None:
        Inquiry(self, session).begin()

    def take_evidence(self, session: RankSession) -> None:
        """Record that the evidence on a rank is complete, or that the rank is gone."""
        for inquiry in self.inquiries.copy():
            inquiry.take_evidence(session)

    def log_restarter_event(self, message: str) -> None:
        logger.info("%s", message)

    def record_fault(self, report: Mapping[str, Any]) -> None:
        """Write the event of a hang; never waits."""
        if not self._start.run_id:
            return
        at, wall = time.monotonic(), time.time()

        def job() -> None:
            # Loaded now and not at start: most monitors never see a fault.
            from nvidia_resiliency_ext.shared_utils.events import EventLog, Fault

            events = EventLog.join(src="monitor")
            fault = Fault(  # what each rank did would be cut off here; the failure record has it
                cause=cause_kind(report),
                what=found_in_words(report),
                detected_by="monitor",
                deadline_s=report["limit"],
                late_s=report["late_s"],
            )
            is_reported = report["culprits"] or report["rule"] in HEALTH_RULES
            rank = report["rank"] if is_reported else None
            events.record(fault, cycle=report["cycle"], rank=rank, t=wall, m=at)
            events.close()

        self.slow.submit(job, lambda _: None)

    def _next_wake(self) -> float | None:
        wakes = [port.next_wake() for port in self.ports]
        wakes.append(self._lease_until)
        return min((at for at in wakes if at is not None), default=None)

    def _guard(self, callback: Callable[[], None]) -> None:
        # The loop's boundary: a defect in the care of one rank must not leave the others unwatched.
        try:
            callback()
        except Exception:
            logger.exception("a defect in the rank monitor")

    def _pass_on_lines(self) -> None:
        if self._lines is not None:
            # Not until it is empty: a line that cannot be sent makes a new one.
            for _ in range(self._lines.qsize()):
                self._guard(partial(self.notify_launcher, self._lines.get()))

    def _watch_launcher(self) -> None:
        channel = self._launcher
        if channel is not None:
            self.loop.watch(channel, self._read_launcher, write=channel.wants_to_write)

    def _read_launcher(self) -> None:
        channel = self._launcher
        assert channel is not None
        channel.flush()
        for message in channel.receive():
            self._obey(message)
        if channel.is_over:
            self._is_leaving = True
            self._is_launcher_gone = not channel.is_garbled
            self.loop.unwatch(channel)
        else:
            self._watch_launcher()

    def _obey(self, message: object) -> None:
        match message:
            case messages.CycleChanged(cycle):
                self.cycle = cycle
                # The error files of the workers before are those of another cycle.
                self.workers = messages.WorkersChanged(cycle, [])
                self.notify_launcher(message)
            case messages.WorkersChanged():
                self.cycle = message.cycle
                self._groups = {
                    pgid: self._groups.get(pgid) if rank in message.left else _start_of(pgid)
                    for rank, pgid in enumerate(message.pgids)
                }
                self.workers = message
            case messages.Examine():
                # An inquiry of our own looks at the same ranks.
                if all(inquiry.is_of_health for inquiry in self.inquiries):
                    Inquiry(self, None).begin()
            case messages.EndRanks(local_ranks):
                for inquiry in self.inquiries.copy():
                    inquiry.end_ranks(local_ranks)
            case messages.LeaseHeld(until):
                self._lease_until = until
            case messages.Save(word):
                for port in self.ports:
                    port.save(word)
                self.notify_launcher(message)
            case messages.Leave():
                self._is_leaving = True
                self._is_told_to_leave = True
            case _:
                logger.error("unexpected message %s", type(message).__name__)

    def _evaluate_lease(self) -> None:
        if self._lease_until is None or time.monotonic() < self._lease_until:
            return
        self._lease_until = None
        logger.error(
            "the launcher did not renew this node's lease: the workers are killed before the other"
            " nodes replace them"
        )
        self._sweep({os.getppid()})

    def _sweep(self, spared: set[int]) -> None:
        # The number of a worker that ended long ago may be somebody else's by now.
        members = procfs.running_in_groups(self._groups)
        pgids = [
            pgid
            for pgid, start in self._groups.items()
            if (now := _start_of(pgid)) == start is not None
            or (now is None and any(stat.sid == pgid for stat in members))
        ]
        left = sweep(self._start.run_id, pgids, spared=spared)
        if left:
            logger.error("still there after SIGKILL: %s", left)

    def _close(self) -> None:
        self._node_watch.close()
        for port in self.ports:
            self._guard(port.close)  # whatever happens there, the sweep follows
        # Not without an order: a monitor that fails must not take healthy ranks with it.
        if self._start.run_id and (
            self._is_told_to_leave
            or (self._is_launcher_gone and self.config["orphan_workers"] != "keep")
        ):
            self._sweep({os.getppid()} if self._is_told_to_leave else set())
        self._pass_on_lines()
        self.loop.unwatch(self.slow)
        self.slow.close()
        if self._launcher is not None:
            self.loop.unwatch(self._launcher)
            self._launcher.close()
        self.loop.close()


def _start_of(pid: int) -> int | None:
    """Return when the process with that number began, or None if there is none."""
    stat = procfs.read_stat(pid)
    return None if stat is None else stat.start_ticks
