# SPDX-License-Identifier: Apache-2.0
"""The launcher's side of the rank monitor: its reports, its slots, and another one when it dies.

Ranks connect to that one by themselves. A monitor that does not answer when a cycle begins is
killed, and so replaced. A launch begins with a monitor or not at all; later no restart depends on
one: where none can be started, ranks go unwatched, and it is tried again every second.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.fault_tolerance._monitor.handle import MonitorHandle
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import NO_STEPS, SlotView, Steps, read_slot
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import Timer

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig

    from .job import Job

logger = logging.getLogger("nvrx")

READY_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 3.0
MIN_RESTART_INTERVAL_S = 1.0
# Ranks that start wait longer than that for a monitor to come.
RETRY_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 2.0
# A program may import and set up for so long before it opens a client.
SHORTEST_SILENCE_S = 60.0
LATE_S = 0.5
_UNKNOWN = -1


def longest_limit_s(config: FaultToleranceConfig) -> float | None:
    """Return the longest time that a rank may stay silent, 60 s at least; None without a limit."""
    limits = [
        config.initial_rank_heartbeat_timeout,
        config.rank_heartbeat_timeout,
        config.rank_out_of_section_timeout,
        *config.rank_section_timeouts.values(),
    ]
    given = [limit for limit in limits if limit is not None]
    return max(SHORTEST_SILENCE_S, *given) if given else None


def needs_heartbeats(config: FaultToleranceConfig) -> bool:
    """Return whether a rank is watched only from its first heartbeat on."""
    others = [config.initial_rank_heartbeat_timeout, config.rank_out_of_section_timeout]
    others += config.rank_section_timeouts.values()
    return config.rank_heartbeat_timeout is not None and not any(others)


@dataclass(eq=False)
class SharedMonitor:
    """One monitor process for all local ranks of this node; another one when it dies."""

    job: Job
    start: Callable[[int, int], MonitorHandle]  # Takes the cycle and the save word.
    _: KW_ONLY
    # From the workers' start, said once; None: no limit is set.
    unwatched_after_s: float | None = None
    needs_heartbeats: bool = False  # A client alone is not enough then.

    def __post_init__(self) -> None:
        self.loop, self.clock = self.job.loop, self.job.clock
        self._has_client = False
        self._unwatched: Timer | None = None
        self._save_word = 0
        self._acknowledged_word = 0
        self._prepared_at = 0.0
        self._cycle = 0
        self._workers: messages.WorkersChanged | None = None
        self._lease: messages.LeaseHeld | None = None
        self._hang: dict[str, Any] = {}
        self._closing = False
        self._is_dispensable = False
        self._is_missed = False
        self._reopening: Timer | None = None
        self._unanswered: Timer | None = None
        self._handle = self._open()

    def _open(self) -> MonitorHandle:
        self._started_at = self.clock.monotonic()
        handle = self.start(self._cycle, self._save_word)
        self.loop.watch(handle.fileno(), self._receive)
        return handle

    def prepare(self, cycle: int) -> None:
        """Name the cycle and wait until the sockets listen, not until the monitor is awake.

        Raises MonitorStartError for the first one; a cycle begins without one that takes its place.
        """
        self._cycle = cycle
        self._prepared_at = self.clock.monotonic()
        self._receive()  # A monitor that died just now must not be taken for a ready one.
        self._hang = {}
        self._is_dispensable |= cycle > 0  # The first round of a spare node is a restart, too.
        if self._reopening is not None:
            self._reopening.cancel()
            if self._is_dispensable:
                self._retry()
            else:
                self._reopen()
        if self._reopening is None and self._wait_ready() and cycle > 0:
            self._handle.send(messages.CycleChanged(cycle))
            if self._unanswered is None:
                self._expect_answer()

    def _wait_ready(self) -> bool:
        """Wait until the sockets listen; replace a monitor that fails to, once one has listened."""
        try:
            self._handle.wait_ready(READY_TIMEOUT_S)
        except NvrxError as error:
            if not self._is_dispensable:
                raise
            logger.warning("%s", error)
            self._replace()
            return False
        self._is_dispensable = True
        self._receive()  # What came together with "ready" does not wake the loop again.
        return self._reopening is None

    def workers_changed(self, workers: messages.WorkersChanged) -> None:
        """Send the monitor the workers: to sweep if this launcher dies, to examine in a hang."""
        self._workers = workers
        self._handle.send(workers)
        if self.unwatched_after_s is not None and self._unwatched is None:
            at = self.clock.monotonic() + self.unwatched_after_s
            self._unwatched = self.loop.call_at(at, self._say_unwatched)

    def _say_unwatched(self) -> None:
        """Warn that limits are set, but no rank of any cycle has opened or used a client."""
        if self._unwatched is None or self.unwatched_after_s is None:
            return
        self._unwatched.cancel()
        self.unwatched_after_s = None
        if self._has_client:
            logger.warning(
                "limits for heartbeats are set, but no rank has sent one: hangs are not found. Call"
                " send_heartbeat() in each step, or set --ft-initial-rank-heartbeat-timeout"
            )
            return
        logger.warning(
            "limits for heartbeats or sections are set, but no rank has opened a client: hangs are"
            " not found. Call RankMonitorClient().init_workload_monitoring() in each rank, then"
            " send_heartbeat() or start_section() and end_section() in each step"
        )

    def send(self, message: messages.LeaseHeld | messages.Examine | messages.EndRanks) -> None:
        """Send a message to the monitor; a monitor that starts later gets the newest lease."""
        if isinstance(message, messages.LeaseHeld):
            self._lease = message
        self._handle.send(message)

    def hang_report(self) -> dict[str, Any]:
        """Return the report of a hang in this cycle, or {}; it was sent before the kill."""
        self._receive()
        return self._hang

    def last_iteration(self) -> int | None:
        views = (self._view(index) for index in range(len(self._handle.slots)))
        iterations = (view.iteration for view in views if view is not None)
        return max((iteration for iteration in iterations if iteration is not None), default=None)

    def steps_of_rank0(self) -> Steps:
        """Return how far local rank 0 has come; heartbeats count where it opens no section."""
        view = self._view(0)
        return NO_STEPS if view is None else view.steps

    def save(self, word: int) -> None:
        """Put the word for `should_checkpoint` into the slots; a new monitor gets it, too."""
        self._save_word = word
        self._handle.send(messages.Save(word))

    @property
    def is_save_acknowledged(self) -> bool:
        return self._acknowledged_word == self._save_word

    def save_calls(self) -> dict[int, int]:
        """Return how often each rank has called `should_checkpoint`, by place in this monitor."""
        views = {index: self._view(index) for index in range(len(self._handle.slots))}
        return {index: view.save_calls for index, view in views.items() if view is not None}

    def _view(self, index: int) -> SlotView | None:
        """Return the content of a rank's slot; None while it is still that of an earlier cycle."""
        handle = self._handle
        if index >= len(handle.slots):
            return None
        view = read_slot(handle.slots[index], handle.layout)
        if view.session_start is None or view.session_start < self._prepared_at:
            return None
        return view

    def _expect_answer(self) -> None:
        at = self.clock.monotonic() + ANSWER_TIMEOUT_S
        self._unanswered = self.loop.call_at(at, self._evaluate_silence)

    def _evaluate_silence(self) -> None:
        timer = self._unanswered
        self._receive()
        if timer is None or timer is not self._unanswered:
            return  # It answered, or another one takes its place.
        self._unanswered = None
        if self.clock.monotonic() - timer.at > LATE_S:
            # We were frozen ourselves, and the monitor perhaps with us: it has a new chance.
            self._handle.send(messages.CycleChanged(self._cycle))
            self._expect_answer()
            return
        logger.warning(
            "the rank monitor (pid %d) has not answered for %g s; killing it",
            self._handle.child.pid,
            ANSWER_TIMEOUT_S,
        )
        self._handle.child.signal(signal.SIGKILL)

    def _forget_answer(self) -> None:
        if self._unanswered is not None:
            self._unanswered.cancel()
            self._unanswered = None

    def _receive(self) -> None:
        if self._reopening is not None:
            return
        for message in self._handle.receive():
            self._handle_message(message)
        if self._handle.is_over and not self._closing:
            self._replace()

    def _handle_message(self, message: object) -> None:
        if isinstance(message, messages.FirstStep):
            self.unwatched_after_s = None
            self.job.reporter.first_step(message.local_rank, message.t)
            self.job.prewarm.good_step()
        elif isinstance(message, messages.RankJoined):
            self._has_client = True
            if not self.needs_heartbeats:
                self.unwatched_after_s = None
        elif isinstance(message, messages.HangFound):
            self._take_report(message.report)
        elif isinstance(message, messages.RankStates):
            self.job.agent.ranks_examined(message.ranks, {})
        elif isinstance(message, messages.Save):
            self._acknowledged_word = message.word
            self.job.controller.acknowledged()
        elif isinstance(message, messages.RankUnkillable):
            where = f"state {message.state} in {message.wchan or 'an unknown call'}"
            self.job.agent.rank_stuck(message.local_rank, where)
        elif isinstance(message, messages.CycleChanged):
            self._forget_answer()
            if message.cycle != self._cycle:
                self._expect_answer()  # That was the answer for an earlier cycle.

    def _take_report(self, report: dict[str, Any]) -> None:
        # One that was found while its cycle was being stopped says nothing of the next.
        if report["cycle"] != self._cycle:
            return
        if report.get("is_held"):
            self.job.agent.ranks_examined(report["ranks"], report)
        elif not self._hang.get("culprits"):
            self._hang = report

    def _replace(self) -> None:
        self._forget_answer()
        self.loop.unwatch(self._handle.fileno())
        status = self._handle.child.wait(timeout_s=1.0)
        logger.warning(
            "the rank monitor (pid %d) ended: %s; starting another",
            self._handle.child.pid,
            status.describe() if status else "it closed its socket",
        )
        self._handle.close()
        self._acknowledged_word = _UNKNOWN
        earliest = self._started_at + MIN_RESTART_INTERVAL_S
        self._reopening = self.loop.call_at(earliest, self._retry)

    def _retry(self) -> None:
        """Start another monitor; a machine that cannot right now is asked again."""
        try:
            self._reopen()
        except (NvrxError, OSError) as error:
            if not self._is_missed:
                self._is_missed = True
                logger.warning(
                    "no rank monitor can be started, ranks go unwatched until one can: %s", error
                )
            again = self.clock.monotonic() + RETRY_INTERVAL_S
            self._reopening = self.loop.call_at(again, self._retry)

    def _reopen(self) -> None:
        self._reopening = None
        self._handle = self._open()
        self._is_missed = False
        if self._workers is not None:
            self._handle.send(dataclasses.replace(self._workers, cycle=self._cycle))
        if self._lease is not None:
            self._handle.send(self._lease)
        if self._save_word:
            self._handle.send(messages.Save(self._save_word))

    def close(self) -> None:
        """Let the monitor sweep the run's processes and leave; kill it if it does not."""
        self._closing = True
        self._forget_answer()
        if self._reopening is not None:
            self._reopening.cancel()
            return
        self._receive()
        self._say_unwatched()
        if self._reopening is None:
            self.loop.unwatch(self._handle.fileno())
            self._handle.leave(LEAVE_TIMEOUT_S)


class MonitorPerRank:
    """A monitor for each local rank (`--ft-monitor-mode per-rank`), or none; others close them."""

    def __init__(self, monitors: Sequence[SharedMonitor]) -> None:
        self._monitors = monitors

    def prepare(self, cycle: int) -> None:
        for monitor in self._monitors:
            monitor.prepare(cycle)

    def workers_changed(self, workers: messages.WorkersChanged) -> None:
        """Send the workers to all monitors: the first that sees the launcher die sweeps."""
        # Each evaluates its rank without the other nodes: it sees no stacks but that rank's.
        standalone = dataclasses.replace(workers, world_size=0)
        for monitor in self._monitors:
            monitor.workers_changed(standalone)

    def send(self, message: messages.LeaseHeld | messages.Examine | messages.EndRanks) -> None:
        """Send a lease to all monitors; none has more than one rank to compare in a hang."""
        for monitor in self._monitors if isinstance(message, messages.LeaseHeld) else ():
            monitor.send(message)

    def hang_report(self) -> dict[str, Any]:
        """Return the report of a monitor that names a culprit, else of any that found a hang."""
        reports = [report for monitor in self._monitors if (report := monitor.hang_report())]
        return next((r for r in reports if r["culprits"]), reports[0] if reports else {})

    def last_iteration(self) -> int | None:
        iterations = [monitor.last_iteration() for monitor in self._monitors]
        return max((iteration for iteration in iterations if iteration is not None), default=None)

    def steps_of_rank0(self) -> Steps:
        return self._monitors[0].steps_of_rank0() if self._monitors else NO_STEPS

    def save(self, word: int) -> None:
        for monitor in self._monitors:
            monitor.save(word)

    @property
    def is_save_acknowledged(self) -> bool:
        return all(monitor.is_save_acknowledged for monitor in self._monitors)

    def save_calls(self) -> dict[int, int]:
        return {
            rank: calls
            for rank, monitor in enumerate(self._monitors)
            for calls in monitor.save_calls().values()
        }
