# SPDX-License-Identifier: Apache-2.0
"""Builds everything that a launch needs from its plan, runs the agent, and takes it all down.

The order matters: standby workers of the first cycle start before anything else, so that their
imports overlap with the rest; the monitor leaves last, because it sweeps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._infra.rank import infrastructure_rank
from nvidia_resiliency_ext.fault_tolerance._ipc.mailbox import Mailbox
from nvidia_resiliency_ext.fault_tolerance._monitor.handle import MonitorHandle
from nvidia_resiliency_ext.fault_tolerance.progress_tracker import TrainingProgressTracker
from nvidia_resiliency_ext.shared_utils import events, procfs
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

from .agent import NodeAgent, Parts, Result
from .chronicle import Chronicle
from .decide import Assignment, Policy, Signalled
from .env import (
    RUN_ID_ENV_VAR,
    CycleStamp,
    JobEnvironment,
    rank_variables,
    shared_variables,
)
from .loop import EventLoop
from .monitor_link import NoMonitor, SharedMonitor
from .output import (
    LOOK_INTERVAL_S,
    OutputFiles,
    OutputSettings,
    Tee,
    line_prefix,
    worker_output,
)
from .plan import LaunchPlan
from .records import FailureLog, hand_up_error_file
from .rendezvous import LocalRendezvous
from .requests import request_event
from .signals import SignalInbox
from .standbys import StandbyStarter
from .workers import WorkerSpec

logger = logging.getLogger("nvrx")

SWEEP_ROUNDS = 20


@dataclass(slots=True)
class _Place:
    """Where this launch keeps its things."""

    run_dir: RunDir
    run_id: str
    host: str
    record_dir: str
    record_is_temporary: bool
    files: OutputFiles
    monitor_sockets: tuple[str, ...]


class Job:
    """One launch on this node, from plan to exit code. One thread; use it as a context manager.

    Everything it starts is ended when the context is left, in whatever state it is.

    Raises:
        NvrxError: on a machine that cannot run the job: a port in use, a log directory that
            cannot be written. Nothing is left behind.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str]) -> None:
        self._plan = plan
        self._environ = environ
        self._clock = SystemClock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Job:
        """Start what the workers need: directory, standbys, monitor, sockets."""
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End and remove everything."""
        self._stack.close()

    def _build(self) -> None:
        plan, stack = self._plan, self._stack
        try:
            self._infra_rank = infrastructure_rank(self._environ)
        except (ValueError, RuntimeError) as error:
            raise NvrxError(str(error)) from None
        inbox = SignalInbox(plan.signals_to_handle)
        stack.callback(inbox.close)
        stack.enter_context(inbox.installed())
        self._loop = EventLoop(self._clock)
        stack.callback(self._loop.close)
        rendezvous = LocalRendezvous(
            nproc=plan.nproc_per_node,
            master_addr=plan.local_addr or plan.master_addr,
            master_port=plan.master_port,
        )
        stack.callback(rendezvous.shutdown)
        place = self._place = self._make_place()
        self._event_log = events.EventLog.create(
            place.record_dir,
            src="launcher",
            job_id=plan.run_id,
            launch_id=place.run_id,
            host=place.host,
        )
        stack.callback(self._event_log.close)
        self._chronicle = Chronicle(
            self._event_log, FailureLog(place.record_dir), self._clock, host=place.host
        )
        self._environment = self._job_environment()
        base_env = {
            **self._environ,
            **shared_variables(self._environment, self._environ),
            **self._event_log.environment(),
        }
        self._base_env = base_env
        self._standbys = StandbyStarter(
            plan,
            base_env,
            self._loop,
            self._clock,
            self._chronicle,
            self._output_settings,
            self._running_pids,
        )
        stack.callback(self._sweep_unmonitored)
        stack.callback(self._close_monitor)
        self._monitor: SharedMonitor | NoMonitor = NoMonitor()
        stack.callback(self._standbys.close)
        self._standbys.hold_first_cycle()
        if plan.monitors_enabled:
            self._monitor = SharedMonitor(
                self._start_monitor, self._loop, self._clock, on_first_step=self._first_step
            )
        mailbox = stack.enter_context(Mailbox(self._environment.launcher_socket))
        tee = Tee()
        stack.callback(tee.close)
        self._agent = NodeAgent(
            Parts(
                policy=Policy(
                    plan.max_restarts,
                    plan.workers_stop_timeout_s,
                    plan.term_timeout_s,
                    plan.no_restart_exit_code,
                ),
                loop=self._loop,
                clock=self._clock,
                rendezvous=rendezvous,
                starter=self._standbys,
                specs=self._specs,
                monitor=self._monitor,
                tracker=self._tracker(),
                chronicle=self._chronicle,
                tee=tee,
                host=place.host,
            )
        )
        stack.callback(self._agent.workers.close)
        self._watch(inbox, mailbox, tee)

    def _make_place(self) -> _Place:
        plan = self._plan
        run_dir = RunDir.create("ft")
        self._stack.callback(run_dir.remove)
        run_id = os.urandom(8).hex()
        event_dir = self._environ.get("NVRX_EVENT_DIR") or plan.log_dir
        settings = self._output_settings = OutputSettings(
            plan.redirects, plan.tee, plan.local_ranks_filter
        )
        if plan.log_dir is not None:
            files = OutputFiles.beneath(plan.log_dir, f"{plan.run_id}_{run_id[:8]}")
        elif settings.writes_files:
            files = OutputFiles.in_new_folder()
            logger.info("logs of the workers: %s", files.root)
        else:
            files = OutputFiles(os.path.join(run_dir.path, "attempts"))
        sockets = tuple(
            run_dir.socket_path(f"rmon{local_rank}.sock")
            for local_rank in range(plan.nproc_per_node if plan.monitors_enabled else 0)
        )
        return _Place(
            run_dir=run_dir,
            run_id=run_id,
            host=socket.gethostname(),
            record_dir=event_dir or run_dir.path,
            record_is_temporary=event_dir is None,
            files=files,
            monitor_sockets=sockets,
        )

    def _job_environment(self) -> JobEnvironment:
        plan, place = self._plan, self._place
        return JobEnvironment(
            nproc=plan.nproc_per_node,
            role=plan.role,
            job_id=plan.run_id,
            run_id=place.run_id,
            max_restarts=plan.max_restarts,
            launcher_socket=place.run_dir.socket_path("launcher.sock"),
            monitor_sockets=place.monitor_sockets,
            omp_num_threads=plan.omp_num_threads,
        )

    def _tracker(self) -> TrainingProgressTracker:
        config = self._plan.fault_tolerance
        return TrainingProgressTracker(
            min_progress_iterations=config.min_progress_iterations,
            max_no_progress_cycles=config.max_no_progress_cycles,
            checkpoint_iteration_file=config.checkpoint_iteration_file,
        )

    def _start_monitor(self, cycle: int) -> MonitorHandle:
        place = self._place
        return MonitorHandle.launch(
            self._plan.fault_tolerance.to_dict(),
            list(place.monitor_sockets),
            run_id=place.run_id,
            run_dir=place.run_dir.path,
            record_dir=place.record_dir,
            cycle=cycle,
            host=place.host,
            events=self._event_log.environment(),
        )

    def _watch(self, inbox: SignalInbox, mailbox: Mailbox, tee: Tee) -> None:
        def signalled() -> None:
            for signum in inbox.receive():
                logger.warning("received %s", signal.Signals(signum).name)
                self._agent.post(Signalled(signum))

        def mail() -> None:
            for message in mailbox.receive():
                event = request_event(message)
                if event is not None:
                    self._agent.post(event)

        def look() -> None:
            tee.look()
            self._loop.call_at(self._clock.monotonic() + LOOK_INTERVAL_S, look)

        self._loop.watch(inbox.fileno(), signalled)
        self._loop.watch(mailbox.fileno(), mail)
        grew = tee.fileno()
        if grew is not None:
            self._loop.watch(grew, tee.look)
        elif any(self._output_settings.tee.values()):
            look()

    # The run -------------------------------------------------------------------------------

    def run(self) -> Result:
        """Run the job to its end and return how it ended here."""
        plan = self._plan
        self._chronicle.job_started(
            argv=plan.command.argv,
            nnodes=f"{plan.min_nodes}:{plan.max_nodes}",
            nproc=plan.nproc_per_node,
            policy=plan.restart_policy,
        )
        result = self._agent.run()
        self._chronicle.job_ended(result.reason, result.exit_code)
        if result.exit_code != 0 and result.failures:
            error = result.root_cause.error
            hand_up_error_file(error.path if error else None, self._environ)
        if self._chronicle.faults and self._place.record_is_temporary:
            self._log_summary()
        return result

    def _log_summary(self) -> None:
        """Say what the record holds, before it goes with the run directory."""
        from nvidia_resiliency_ext.shared_utils import report

        text = report.render_text(report.build_timeline([events.read_events(self._event_log.path)]))
        logger.info("what happened (set --log-dir to keep the record):\n%s", text)

    def _specs(self, assignment: Assignment, cycle_start_time: float | None) -> list[WorkerSpec]:
        plan = self._plan
        stamp = CycleStamp(
            self._clock.wall(), cycle_start_time, self._infra_rank
        )
        specs = []
        for local_rank in range(plan.nproc_per_node):
            directory = self._place.files.worker_directory(assignment.cycle, local_rank)
            output = worker_output(self._output_settings, directory, local_rank)
            rank = assignment.rank_offset + local_rank
            variables = rank_variables(
                self._environment, assignment, local_rank, stamp, output.error_file
            )
            specs.append(
                WorkerSpec(
                    local_rank=local_rank,
                    rank=rank,
                    argv=plan.command.for_local_rank(local_rank),
                    env={**self._base_env, **variables},
                    output=output,
                    line_prefix=line_prefix(
                        plan.log_line_prefix_template, plan.role, rank, local_rank
                    ),
                )
            )
        return specs

    def _running_pids(self) -> list[int]:
        return self._agent.workers.running_pids

    def _first_step(self, local_rank: int, at: float) -> None:
        self._chronicle.first_step(local_rank, at)
        self._standbys.good_step()

    def _close_monitor(self) -> None:
        self._monitor.close()

    def _sweep_unmonitored(self) -> None:
        """Kill what carries the run's id: the monitor does it, unless there is none."""
        if self._plan.monitors_enabled or self._plan.fault_tolerance.orphan_workers == "keep":
            return
        for _ in range(SWEEP_ROUNDS):
            pids = procfs.pids_with_environ(RUN_ID_ENV_VAR, self._place.run_id)
            pids = [pid for pid in pids if pid != os.getpid() and procfs.is_running(pid)]
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def show_failures(name: str, result: Result) -> None:
    """Print the failure report of a job that failed for good on stderr."""
    from .faults import failure_table

    if result.exit_code != 0 and result.failures:
        print(failure_table(name, result.failures), file=sys.stderr, flush=True)
