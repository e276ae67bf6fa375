# SPDX-License-Identifier: Apache-2.0
"""Starts workers from prewarmed workers where it can, from fresh interpreters where it must.

When and why is decided in `_workers.pool` and `_workers.conditions`; here it is done. One thread,
the launcher's main one: the kernel ties the lives of prewarmed workers to it.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core.local_world import IdleMeter, available_bytes
from nvidia_resiliency_ext.fault_tolerance._workers import conditions, prewarmed, workers
from nvidia_resiliency_ext.fault_tolerance._workers import pool as pools
from nvidia_resiliency_ext.fault_tolerance._workers.output import worker_output
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, ConfigError
from nvidia_resiliency_ext.shared_utils.event_loop import Timer

if TYPE_CHECKING:
    from .job import Job

logger = logging.getLogger("nvrx")

FILL_LOOK_INTERVAL_S = 1.0
FIRST_LOOK_S = pools.FILL_DELAY_S
LONGEST_LOOK_INTERVAL_S = 60.0
HEAD_START_S = 0.015
BEGIN_LIMIT_S = 5.0


class PrewarmStarter(workers.Starter):
    """Makes workers for each cycle and keeps prewarmed workers for the next one."""

    def __init__(self, job: Job) -> None:
        plan = job.plan
        super().__init__(die_with_parent=plan.fault_tol_cfg.orphan_workers == "kill")
        self._job = job
        self._plan = plan
        self._mode = plan.fault_tol_cfg.prewarm
        self._imports = conditions.import_list(plan.fault_tol_cfg.prewarm_import)
        self._pool = pools.Pool(
            [pools.SlotState.EMPTY] * plan.nproc_per_node,
            max(1, len(os.sched_getaffinity(0)) // 2),
            job.clock,
            self._start_prewarm,
            self._end_prewarm,
            refused=self._never_reason(),
        )
        self._held: dict[int, prewarmed.PrewarmedWorker] = {}
        self._activated: dict[int, prewarmed.PrewarmedWorker] = {}
        self._departure_reasons: dict[int, str] = {}
        self._head_start_ends = 0.0
        self._idle = IdleMeter()
        self._timer: Timer | None = None
        self._look_interval_s = FIRST_LOOK_S
        self._has_worked = False
        self._is_announced = False

    def _never_reason(self) -> str | None:
        """Return why no worker of this job can come from a prewarmed worker, or None."""
        plan = self._plan
        if self._mode != "off" and plan.fault_tol_cfg.orphan_workers == "keep":
            reason: str | None = "workers that outlive the launcher cannot be standbys"
        elif self._mode != "off" and plan.output_specs is not None:
            reason = "a log specification says only at the start of a cycle where output goes"
        else:
            reason = conditions.cold_reason(plan.command, self._job.base_env, self._mode)
        if reason is not None:
            self._insist(reason)
        return reason

    def _insist(self, reason: str) -> None:
        """Refuse a condition that would mean a cold start, if the user insists on prewarming."""
        if self._mode == "on":
            raise ConfigError(
                f"--ft-prewarm on: {reason}; use --ft-prewarm auto, which then starts cold"
            )

    def hold_first_cycle(self) -> None:
        """Start the first cycle's workers ahead, if they are certain to gain from it."""
        if self._pool.refused is not None:
            if self._mode != "off":
                logger.info("workers start cold: %s", self._pool.refused)
            return
        command = self._plan.command
        if self._mode == "on" or conditions.should_hold_first_cycle(command, self._imports):
            self._pool.prepare()

    def good_step(self) -> None:
        """Record that a rank works: prewarmed workers may be filled from now on."""
        if self._has_worked:  # Only the first rank may undo that prewarmed workers have failed.
            return
        self._has_worked = True
        self._look()
        self._pool.good_step()

    def _look(self) -> None:
        """Update the pool: idle cores, free memory, changed files, and ranks' use of torch."""
        if self._pool.refused is not None:
            return
        self._pool.idle(self._idle.idle_cores())
        self._pool.free_bytes = available_bytes()
        for slot, standby in list(self._held.items()):
            if standby.ready is not None and (path := standby.stale_file()) is not None:
                logger.info("standby %d is replaced: %s changed on disk", slot, path)
                self._pool.renew(slot)
        wanted = conditions.wants_prewarming(self._job.running_pids())
        self._pool.want(self._pool.wanted if wanted is None else wanted)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._job.loop.call_at(self._job.clock.monotonic() + delay_s, self._tick)

    def _arm_for_fill(self) -> None:
        """Count idle processors from now on: the job may wait for something else than them."""
        self._look_interval_s = FIRST_LOOK_S
        self._idle.idle_cores()
        self._arm(FILL_LOOK_INTERVAL_S)

    def _tick(self) -> None:
        """Look again: often while prewarmed workers are missing, later less and less often."""
        self._look()
        if self._pool.may_fill and self._pool.unheld:
            self._arm(FILL_LOOK_INTERVAL_S)
            return
        self._arm(self._look_interval_s)
        self._look_interval_s = min(2 * self._look_interval_s, LONGEST_LOOK_INTERVAL_S)

    def _announce(self) -> None:
        """Log once per cycle that every prewarmed worker is ready for the next restart."""
        slots = self._pool.slots
        if not self._is_announced and all(state is pools.SlotState.READY for state in slots):
            self._is_announced = True
            logger.info("all %d standbys are ready", len(slots))

    def _start_prewarm(self, slot: int) -> None:
        output = worker_output(self._plan.output, "", slot)
        try:
            standby = prewarmed.PrewarmedWorker(
                self._plan.command,
                self._job.base_env,
                slot,
                paths=(output.stdout.path, output.stderr.path),
                is_piped=self._plan.logs.applog_prefix is not None,
                imports=self._imports,
            )
        except (ChildStartError, prewarmed.PrewarmError) as error:
            self._pool.fail(slot, str(error))
            return
        self._held[slot] = standby
        self._job.reporter.prewarm_changed(slot, "warming", None, None)
        self._job.loop.watch(standby.fileno(), lambda: self._receive(slot))

    def _receive(self, slot: int) -> None:
        message = self._held[slot].receive()
        if isinstance(message, prewarmed.Ready) and message.problem is None:
            self._job.reporter.prewarm_changed(
                slot, "ready", message.seconds, message.private_bytes
            )
            self._pool.ready(slot, message.private_bytes or 0)
            self._announce()
        elif isinstance(message, prewarmed.Ready):
            self._pool.refuse(str(message.problem))
        elif isinstance(message, prewarmed.Failed):
            self._job.reporter.prewarm_changed(slot, "failed", None, None)
            logger.info("standby %d failed: %s", slot, message.reason)
            self._pool.fail(slot, message.reason)

    def _end_prewarm(self, slot: int) -> None:
        standby = self._held.pop(slot, None)
        if standby is not None:
            self._job.loop.unwatch(standby.fileno())
            standby.end()

    def begin(self) -> None:
        """Leave the processors to the workers that are about to start."""
        self._pool.start_ranks()

    def done(self) -> None:
        """Let prewarmed workers for the next cycle start: this cycle's workers are all started."""
        self._has_worked = self._is_announced = False
        self._pool.ranks_started()
        self._arm_for_fill()

    def start(
        self, spec: workers.WorkerSpec, stdout_fd: int | None, stderr_fd: int | None
    ) -> workers.Started:
        """Make a worker: tell its prewarmed worker to go, or start a fresh process.

        Raises ChildStartError, or ConfigError: `--ft-prewarm on`, and the environment forbids it.
        """
        slot = spec.local_rank
        standby = self._held.get(slot)
        if self._pool.refused is not None:
            self._insist(self._pool.refused)
        reason = self._pool.refused or self._pool.disabled or self._why_none(slot)
        if standby is not None:
            started, problem = self._go(standby, spec, stdout_fd, stderr_fd)
            if started is not None:
                return started
            reason = problem
        return self.start_cold(spec, stdout_fd, stderr_fd, reason)

    def _why_none(self, slot: int) -> str:
        if self._pool.slots[slot] is pools.SlotState.FAILED:
            return "its standby failed"
        if self._pool.first:
            return "the entry file does not import torch at its top level"
        if not self._pool.wanted:
            return "the workers have not loaded torch"
        return "no standby was started yet"

    def _go(
        self,
        standby: prewarmed.PrewarmedWorker,
        spec: workers.WorkerSpec,
        stdout_fd: int | None,
        stderr_fd: int | None,
    ) -> tuple[workers.Started | None, str]:
        slot = spec.local_rank
        reason = conditions.go_reason(standby.env, spec.env)
        if reason is not None:
            self._insist(f"worker {slot}: {reason}")
        if reason is None and (path := standby.stale_file()) is not None:
            reason = f"{path} changed on disk"
        if reason is None:
            try:
                standby.go(spec.env, (None, stdout_fd, stderr_fd), self._not_before(spec))
            except prewarmed.PrewarmError as error:
                message = standby.receive()
                reason = message.reason if isinstance(message, prewarmed.Failed) else str(error)
        if reason is not None:
            self._pool.fail(slot, reason)
            return None, reason
        ready = standby.ready
        self._activated[slot] = self._held.pop(slot)
        self._job.loop.unwatch(standby.fileno())
        self._job.loop.watch(standby.fileno(), lambda: self._receive_begun(slot, standby))
        self._pool.activate(slot)
        self._job.reporter.prewarm_changed(slot, "activated", None, None)
        if ready is None:
            why = workers.STILL_IMPORTING
            return workers.Started(standby.child, warm=False, cold_reason=why), ""
        at = self._job.clock.monotonic() + BEGIN_LIMIT_S
        self._job.loop.call_at(at, lambda: self._give_up(slot, standby))
        return workers.Started(standby.child, warm=True, saved_s=ready.seconds), ""

    def _give_up(self, slot: int, standby: prewarmed.PrewarmedWorker) -> None:
        """Kill a prewarmed worker that was ready and did not begin; its worker then starts cold."""
        if self._activated.get(slot) is standby:
            logger.warning("standby %d did not begin within %g s", slot, BEGIN_LIMIT_S)
            standby.child.signal(signal.SIGKILL)

    def _not_before(self, spec: workers.WorkerSpec) -> float | None:
        """Return when a warm worker may begin: rank 0, which opens the store, gets a head start.

        A rank that connects before rank 0 listens is refused, and torch waits for half a second.
        """
        now = self._job.clock.monotonic()
        if spec.rank == 0:
            self._head_start_ends = now + HEAD_START_S
            return None
        return self._head_start_ends if self._head_start_ends > now else None

    def _receive_begun(self, slot: int, standby: prewarmed.PrewarmedWorker) -> None:
        """Take the last message of an activated process; a Failed is handled at its exit."""
        message = standby.receive()
        if isinstance(message, prewarmed.Begun):
            self._forget_activated(slot, standby)
            self._pool.begin(slot)
            self._arm_for_fill()
        elif isinstance(message, prewarmed.Failed):
            self._departure_reasons[slot] = message.reason
            self._job.loop.unwatch(standby.fileno())

    def _forget_activated(self, slot: int, standby: prewarmed.PrewarmedWorker) -> None:
        self._job.loop.unwatch(standby.fileno())
        standby.release()
        if self._activated.get(slot) is standby:
            del self._activated[slot]

    def never_began(self, local_rank: int, *, is_stopped: bool) -> str | None:
        """Return why a process that just exited never became a worker, or None if it was one.

        One that the launcher ended (`is_stopped`) is no failure of a standby.
        """
        standby = self._activated.get(local_rank)
        if standby is None:
            return None
        reason = self._departure_reasons.pop(local_rank, None)
        message = None if reason is not None else standby.receive()
        while isinstance(message, prewarmed.Ready):  # Sent before it saw the order.
            message = standby.receive()
        if isinstance(message, prewarmed.Failed):
            reason = message.reason
        self._forget_activated(local_rank, standby)
        if reason is None or is_stopped:
            self._pool.gone(local_rank)
        else:
            self._job.reporter.prewarm_changed(local_rank, "failed", None, None)
            self._pool.fail(local_rank, reason)
        return reason

    def close(self) -> None:
        """End all prewarmed workers; workers that came from one are not touched."""
        if self._timer is not None:
            self._timer.cancel()
        for slot in list(self._held):
            self._end_prewarm(slot)
        for slot, standby in list(self._activated.items()):
            self._forget_activated(slot, standby)
