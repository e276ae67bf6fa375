# SPDX-License-Identifier: Apache-2.0
"""Builds everything that a launch needs from its plan, runs the agent, and takes it all down."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._core import machine
from nvidia_resiliency_ext.fault_tolerance._core.errors import RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP
from nvidia_resiliency_ext.fault_tolerance._core.infra import infrastructure_rank
from nvidia_resiliency_ext.fault_tolerance._core.machine import ATTRIBUTION, Cause
from nvidia_resiliency_ext.fault_tolerance._core.messages import Mailbox
from nvidia_resiliency_ext.fault_tolerance._health.admission import AdmissionCheck
from nvidia_resiliency_ext.fault_tolerance._health.bad_node import BadNodeHook
from nvidia_resiliency_ext.fault_tolerance._hosting.services import CoordinatorServices
from nvidia_resiliency_ext.fault_tolerance._monitor.handle import MonitorHandle, sweep
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, timer_file
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance._rendezvous.restarts import Denylist
from nvidia_resiliency_ext.fault_tolerance._report import failures
from nvidia_resiliency_ext.fault_tolerance._report.events import EventReporter
from nvidia_resiliency_ext.fault_tolerance._report.torch_events import NO_HANDLER, TorchEvents
from nvidia_resiliency_ext.fault_tolerance._workers import output as outputs
from nvidia_resiliency_ext.fault_tolerance._workers.workers import WorkerSpec
from nvidia_resiliency_ext.fault_tolerance.progress_tracker import TrainingProgressTracker
from nvidia_resiliency_ext.shared_utils import events
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.console import write_err
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, SignalQueue, Timer
from nvidia_resiliency_ext.shared_utils.rundir import remove_stale_run_dirs

from . import run_files
from .agent import NodeAgent, Result
from .monitor_link import MonitorPerRank, SharedMonitor, longest_limit_s, needs_heartbeats
from .preemption import PreemptionController
from .prewarm import PrewarmStarter
from .rendezvous import LocalRendezvous

if TYPE_CHECKING:
    from .many_nodes import StoreEndpoint
    from .store_rendezvous import StoreRendezvous

logger = logging.getLogger("nvrx")

CLEAN_UP_DELAY_S = 0.25


class Job:
    """One launch on this node, from plan to exit code. One thread; use it as a context manager.

    Parts read other parts from its attributes, also parts that are made later: when they are used.
    Raises ConfigError where the plan asks for what cannot be done on this machine, NvrxError where
    the machine cannot run the job: a port in use, a full disk, no descriptors.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str]) -> None:
        self.plan = plan
        self.environ = environ
        self.clock = SystemClock()
        self._stack = contextlib.ExitStack()
        self._next_look: Timer | None = None
        self.denylist = Denylist()

    def __enter__(self) -> Job:  # noqa: PYI034  # Self is not in Python 3.10
        try:
            self._build()
        except BaseException as error:
            self._stack.close()
            if isinstance(error, OSError):
                raise NvrxError(f"the launch cannot be prepared: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        """Build all parts; each is taken down in the reverse order.

        Standbys start early, as they import meanwhile; the monitor leaves late, as it sweeps.
        """
        plan, stack = self.plan, self._stack
        self.infra_rank = self._ask_infra_rank()
        announcing = plan.fault_tol_cfg.preempt_signal
        extra = () if announcing is None else (announcing,)
        self._signals = SignalQueue(dict.fromkeys((*plan.signals, *extra)))
        stack.callback(self._signals.close)
        stack.enter_context(self._signals.installed())
        self.loop = EventLoop(self.clock)
        stack.callback(self.loop.close)
        endpoint = self._find_endpoint()
        address = "127.0.0.1" if endpoint is None else endpoint.host
        self._is_store_host = endpoint is None or endpoint.is_here
        self.paths = run_files.RunPaths(plan, self.environ, stack)
        self.services = self._build_services(address)
        self.cycles = run_files.CycleRecords(self, address, is_host=self._is_store_host)
        stack.callback(self.cycles.close)
        self._build_record()
        self._torch_events = self._build_torch_events()
        hook = plan.fault_tol_cfg.bad_node_hook
        self.bad_node = BadNodeHook(hook, self.environ, job=plan.run_id, host=self.paths.host)
        stack.callback(self.bad_node.close)
        self.admission = AdmissionCheck(
            plan,
            self.environ,
            host=self.paths.host,
            infra_rank=self.infra_rank,
            loop=self.loop,
            clock=self.clock,
            reporter=self.reporter,
        )
        stack.callback(self.admission.close)
        self.admission.prepare()
        self._build_environment(endpoint)
        stack.callback(_sweep, self.paths.run_id)
        self.prewarm = PrewarmStarter(self)
        stack.callback(self.prewarm.close)
        self.prewarm.hold_first_cycle()
        if self.services is not None:
            self.services.follow_attribution(self._attribution_stops, self.denylist.add)
            stack.callback(self.services.end_attribution)
        self.rendezvous = self._build_rendezvous(endpoint)
        stack.callback(self.rendezvous.shutdown)
        self.monitor = self._build_monitor()
        mailbox = Mailbox(self.paths.launcher_socket, self.loop, self._receive_mail)
        stack.callback(mailbox.close)
        self.tee = outputs.Tee(self._look_at_output)
        stack.callback(self.tee.close)
        self.controller = PreemptionController(self)
        self.agent = self._build_agent()
        stack.callback(self.agent.workers.close)
        stack.callback(self.prewarm.close)
        self.loop.watch(self._signals.fileno(), self._receive_signals)
        if self.tee.fileno() >= 0:
            self.loop.watch(self.tee.fileno(), self._look_at_output)
        self._keep_file_timers()

    def _keep_file_timers(self) -> None:
        path = self.base_env.get(_env.TIMER_FILE)
        if path is None or self.environ.get(_env.ENABLE_FILE_TIMER) != "1":
            return
        from nvidia_resiliency_ext.fault_tolerance._workers.file_timers import FileTimers

        timers = FileTimers(path, self.loop, self.clock, self.running_pids)
        self._stack.callback(timers.close)

    def _ask_infra_rank(self) -> int:
        try:
            rank = infrastructure_rank(self.environ)
        except (ValueError, RuntimeError) as error:
            raise NvrxError(str(error)) from None
        return self.plan.node_rank if rank < 0 and self.plan.node_rank is not None else rank

    def _find_endpoint(self) -> StoreEndpoint | None:
        if self.plan.max_nodes == 1:
            return None
        from .many_nodes import find_endpoint, rules_of

        rules_of(self.plan, self.environ)
        endpoint = find_endpoint(self.plan)
        if endpoint.listener is not None:
            self._stack.callback(endpoint.listener.close)
        return endpoint

    def _build_services(self, address: str) -> CoordinatorServices | None:
        if not self._is_store_host:
            return None
        services = CoordinatorServices(
            self.plan,
            self.environ,
            self.loop,
            self.clock,
            address=address,
            host=self.paths.host,
            run_dir=self.paths.run_dir.path,
            is_shared=self.plan.max_nodes > 1,
        )
        self._stack.callback(services.close)
        return services

    def _build_rendezvous(
        self, endpoint: StoreEndpoint | None
    ) -> LocalRendezvous | StoreRendezvous:
        if endpoint is None:
            return LocalRendezvous(self)
        from .many_nodes import make_rendezvous

        return make_rendezvous(self, endpoint)

    def _build_record(self) -> None:
        paths = self.paths
        self._event_log = events.EventLog.create(
            paths.record_dir,
            src="launcher",
            job_id=self.plan.run_id,
            launch_id=paths.run_id,
            host=paths.host,
        )
        self._stack.callback(self._event_log.close)
        self.reporter = EventReporter(
            self._event_log,
            failures.FailureLog(paths.record_dir),
            self.clock,
            host=paths.host,
            shows_stacks=paths.record_is_temporary,
            on_cycle_ended=self._cycle_ended,
        )

    def _build_torch_events(self) -> TorchEvents | None:
        plan = self.plan
        if plan.event_log_handler == NO_HANDLER:
            return None
        job = {"run_id": plan.run_id, "role": plan.role, "entry": plan.command.entry}
        torch_events = TorchEvents(plan.event_log_handler, self.clock, **job)
        self._stack.callback(torch_events.close)
        self.reporter.on_started = torch_events.started
        return torch_events

    def _build_environment(self, endpoint: StoreEndpoint | None) -> None:
        store = None if endpoint is None else endpoint.address
        self.base_env = {
            **run_files.shared_variables(self.plan, self.paths, self.environ, store),
            **self._event_log.environment(),
            **run_files.cycle_info_environment(self.plan),
        }
        timer_path = timer_file(self.environ, self.paths.run_dir.path)
        if timer_path is not None:
            self.base_env[_env.TIMER_FILE] = timer_path

    def _attribution_stops(self, reason: str) -> None:
        what = f"attribution says that a restart is useless: {reason}"
        cause = Cause(ATTRIBUTION, what, host=self.paths.host, detected_by="attribution")
        self.agent.post(machine.StopRequested(cause, RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP))

    def _build_monitor(self) -> SharedMonitor | MonitorPerRank:
        if not self.plan.monitors_enabled:
            return MonitorPerRank([])
        local_ranks = list(range(self.plan.nproc_per_node))
        if self.plan.fault_tol_cfg.monitor_mode == "per-rank":
            return MonitorPerRank([self._monitor_of([rank]) for rank in local_ranks])
        return self._monitor_of(local_ranks)

    def _monitor_of(self, local_ranks: list[int]) -> SharedMonitor:
        """Start a monitor; it is closed after workers and standbys, because it sweeps."""
        paths = self.paths

        def start(cycle: int, save_word: int) -> MonitorHandle:
            return MonitorHandle.launch(
                self.plan.fault_tol_cfg.to_dict(),
                [paths.monitor_sockets[rank] for rank in local_ranks],
                local_ranks=local_ranks,
                run_id=paths.run_id,
                run_dir=paths.run_dir.path,
                record_dir=paths.record_dir,
                cycle=cycle,
                host=paths.host,
                is_restarter_logger=0 in local_ranks,
                save_word=save_word,
                env={**self.environ, **self._event_log.environment()},
            )

        monitor = SharedMonitor(
            self,
            start,
            unwatched_after_s=longest_limit_s(self.plan.fault_tol_cfg),
            needs_heartbeats=needs_heartbeats(self.plan.fault_tol_cfg),
        )
        self._stack.callback(monitor.close)
        return monitor

    def _build_agent(self) -> NodeAgent:
        plan, config = self.plan, self.plan.fault_tol_cfg
        self.tracker = TrainingProgressTracker(
            min_progress_iterations=config.min_progress_iterations,
            max_no_progress_cycles=config.max_no_progress_cycles,
            checkpoint_iteration_file=config.checkpoint_iteration_file,
        )
        policy = machine.Policy(
            plan.max_restarts,
            plan.workers_stop_timeout,
            plan.term_timeout,
            plan.no_restart_exit_code,
            many_nodes=plan.max_nodes > 1,
            is_store_host=self._is_store_host,
            min_healthy=plan.restart_policy == "min-healthy",
            host=self.paths.host,
        )
        return NodeAgent(self, policy)

    def _receive_signals(self) -> None:
        for signum in self._signals.receive():
            logger.warning("received %s", signal.Signals(signum).name)
            if not self.controller.announced(signum):
                self.agent.post(machine.Signalled(signum))

    def _receive_mail(self, message: object) -> None:
        event = machine.request_event(message)
        if event is not None:
            self.agent.post(event)

    def _cycle_ended(self, cause: Cause | None) -> None:
        """Record that a cycle is over; of many nodes, the host knows when it is for all."""
        if self.plan.max_nodes == 1 and self.services is not None:
            self.services.ended(self.services.cycle, cause)

    def _look_at_output(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        wait_s = self.tee.look()
        if wait_s is not None:
            at = self.clock.monotonic() + wait_s
            self._next_look = self.loop.call_at(at, self._look_at_output)

    def post(self, event: machine.Event) -> None:
        self.agent.post(event)

    def running_pids(self) -> list[int]:
        return self.agent.workers.running_pids

    def run(self) -> Result:
        plan = self.plan
        try:
            self.reporter.job_started(
                argv=plan.command.argv,
                nnodes=f"{plan.min_nodes}:{plan.max_nodes}",
                nproc=plan.nproc_per_node,
                policy=plan.restart_policy,
            )
        except (OSError, ImportError) as problem:
            # The first event loads code: a machine without descriptors shows here at the latest.
            raise NvrxError(f"the launch cannot be prepared: {problem}") from problem
        later = self.clock.monotonic() + CLEAN_UP_DELAY_S
        self.loop.call_at(later, self._remove_stale_directories)
        result = self.agent.run()
        over = self.agent.rendezvous.is_over or None
        self.reporter.job_ended(result.reason, result.exit_code, over=over)
        if self._torch_events is not None:
            self._torch_events.ended(result.exit_code, result.failures, result.stop_signal)
        if result.exit_code != 0 and result.failures:
            error = failures.root_cause(result.failures).error
            failures.hand_up_error_file((error.path or None) if error else None, self.environ)
        if self.reporter.faults and self.paths.record_is_temporary:
            self._log_summary(has_failed=result.exit_code != 0)
        return result

    def _log_summary(self, *, has_failed: bool) -> None:
        """Log the report of a temporary event record; of a failed job only its first paragraph."""
        try:
            from nvidia_resiliency_ext.shared_utils import report

            timeline = report.build_timeline([events.read_events(self._event_log.path)])
            text = report.render_text(timeline)
        except OSError as error:
            logger.warning("the summary cannot be made: %s", error)
            return
        except Exception:
            # The job's exit code must not depend on its report.
            logger.exception("the summary cannot be made")
            return
        if has_failed:
            text = text.partition("\n\n")[0]
        logger.info("what happened (set --log-dir to keep the record for nvrx-report):\n%s", text)

    def specs(
        self, assignment: machine.Assignment, cycle_start_time: float | None
    ) -> list[WorkerSpec]:
        self.cycles.begin(assignment)
        if self.plan.max_nodes == 1 and self.services is not None:
            here = Arrival("", self.paths.host, infra_rank=0)
            self.services.begins(assignment.cycle, [here])
        times = run_files.cycle_variables(self.clock.wall(), cycle_start_time, self.infra_rank)
        env = {**self.base_env, **times}
        has_space = self._has_space(assignment.cycle)
        specs = [
            self._spec(assignment, local_rank, env, has_space=has_space)
            for local_rank in range(self.plan.nproc_per_node)
        ]
        if self.plan.output_specs is None:
            return specs
        decided = self.plan.output_specs.outputs(
            [spec.env for spec in specs], [spec.output.error_file for spec in specs]
        )
        return [
            dataclasses.replace(spec, output=output, env=env)
            for spec, (output, env) in zip(specs, decided, strict=True)
        ]

    def _has_space(self, cycle: int) -> bool:
        """Return whether workers can write their files; a full disk must not end every cycle."""
        paths = self.paths
        if paths.files is paths.spare_files:
            return True
        problem = paths.files.missing_space()
        if problem:
            logger.warning(
                "cycle %d: %s: %s; workers write to the console instead of files there",
                *(cycle, paths.files.root, problem),
            )
        return not problem

    def _spec(
        self,
        assignment: machine.Assignment,
        local_rank: int,
        env: Mapping[str, str],
        *,
        has_space: bool,
    ) -> WorkerSpec:
        plan, paths = self.plan, self.paths
        rank = assignment.rank_offset + local_rank
        files = paths.files if has_space else paths.spare_files
        directory = files.worker_directory(assignment.cycle, local_rank)
        output = outputs.worker_output(paths.output, directory, local_rank)
        if paths.output.writes_files and not has_space:
            output = outputs.console_output(directory)
        output = self.cycles.output(output, rank)
        variables = run_files.rank_variables(plan, paths, assignment, local_rank, output.error_file)
        return WorkerSpec(
            local_rank=local_rank,
            rank=rank,
            argv=plan.command.for_local_rank(local_rank),
            env={**env, **variables},
            output=output,
            line_prefix=outputs.line_prefix(
                plan.log_line_prefix_template, plan.role, rank, local_rank
            ),
        )

    def show_failures(self, result: Result) -> None:
        """Print the failure report of a job that failed for good; its directory is about to go."""
        if result.exit_code != 0 and result.failures:
            name, run_dir = self.plan.command.entry, self.paths.run_dir.path
            write_err(failures.failure_table(name, result.failures, run_dir) + "\n")

    def _remove_stale_directories(self) -> None:
        """Remove run directories of launches that were killed together with their monitor."""
        try:
            removed = remove_stale_run_dirs()
        except OSError as error:
            # Tidying up after others must not cost this job.
            logger.warning("run directories of launches that are gone stay: %s", error)
            return
        for path in removed:
            logger.info("removed the run directory of a launch that is gone: %s", path)


def _sweep(run_id: str) -> None:
    """Kill processes with the run's id in their environment; a monitor has done so before."""
    try:
        left = sweep(run_id, (), spared={os.getpid()})
    except OSError as error:  # no descriptor is left to look with
        logger.warning("processes of this job that are left cannot be looked for: %s", error)
        return
    if left:
        logger.error("processes of this job that could not be ended: %s", left)
