# SPDX-License-Identifier: Apache-2.0
"""Services beside the coordinator's store: log servers, cycle information, attribution."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.attribution import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.shared_utils.children import signal_name
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.job_metadata import job_id_from_env, task_id_from_env
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._hosting.attribution import AttributionWatch
    from nvidia_resiliency_ext.fault_tolerance._logs.servers import LogServers
    from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
    from nvidia_resiliency_ext.fault_tolerance._report.cycle_files import CycleInfoReporter
    from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop


# Said in place of a token, which is hexadecimal.
NO_SERVER = "none"
IN_A_FILE = "in a file"
_NAME = "log_token"
_ATTRSVC_ACCESS = "NVRX_ATTRSVC_TOKEN_FILE"
_TOKEN_BYTES = 32


class TokenFile(NamedTuple):
    """Where the token is, and whether the user has put it there."""

    path: str
    is_given: bool


def token_file(environ: Mapping[str, str], job_token_file: str | None, run_dir: str) -> TokenFile:
    """Return the file with the token of the log servers, which may be one that is still to come."""
    given = environ.get(_env.LOG_FUNNEL_TOKEN_FILE) or job_token_file
    return TokenFile(given, True) if given else TokenFile(os.path.join(run_dir, _NAME), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesPlan:
    """Name the services that run beside the store; a launch plan can stand for it."""

    fault_tol_cfg: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    logs: LogPlan = field(default_factory=LogPlan)
    # In files about cycles and at the service; None: the scheduler's.
    cycle_info_job_id: str | None = None
    job_name: str | None = None  # At a service where no scheduler has one.
    attribution: AttributionConfig = field(default_factory=AttributionConfig)


logger = logging.getLogger("nvrx")


@dataclass(eq=False)
class CoordinatorServices:
    """Services of a job's coordinator; `close` ends them. Report rounds from any thread.

    Raises NvrxError: a port is taken, or a directory cannot be used.
    """

    plan: ServicesPlan | LaunchPlan
    environ: Mapping[str, str]
    loop: EventLoop | None  # None: no log servers, and a STOP is told in the thread that learns it.
    clock: Clock
    _: KW_ONLY
    address: str
    host: str
    run_dir: str
    is_shared: bool

    def __post_init__(self) -> None:
        self.log_token = NO_SERVER
        self.cycle = -1
        self._servers: LogServers | None = None
        self._reporter: CycleInfoReporter | None = None
        self._watch: AttributionWatch | None = None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._open_servers()
            directory = self.plan.fault_tol_cfg.cycle_info_dir
            if directory is not None:
                from nvidia_resiliency_ext.fault_tolerance._report import cycle_files

                self._reporter = cycle_files.CycleInfoReporter(
                    directory, self.plan.logs.applog_prefix, self.plan.cycle_info_job_id
                )
            on_failure.pop_all()

    def _open_servers(self) -> None:
        server, roots = self.plan.logs.server, self.plan.logs.roots
        if server is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._logs.servers import LogServers

        token = token_file(self.environ, self.plan.fault_tol_cfg.rdzv_token_file, self.run_dir)
        self.log_token = IN_A_FILE
        if not token.is_given:
            self.log_token = os.urandom(_TOKEN_BYTES).hex()
            atomic_write(token.path, self.log_token.encode())
        if self.is_shared and not token.is_given:
            logger.info(
                "the log server's token goes through the rendezvous, which guards against mistakes "
                "and not against whoever reads the store; %s names a file on all nodes instead",
                _env.LOG_FUNNEL_TOKEN_FILE,
            )
        assert self.loop is not None
        for root in roots:
            try:
                os.makedirs(root, exist_ok=True)
            except OSError as error:
                problem = f"the log directory {root} cannot be made: {error.strerror}"
                raise NvrxError(problem) from error
        self._servers = LogServers(
            dataclasses.replace(server, allowed_roots=roots),
            *(self.address, token.path, self.environ, self.loop, self.clock),
        )
        self._servers.start()

    def follow_attribution(
        self, on_stop: Callable[[str], None], on_nodes: Callable[[tuple[str, ...], str], None]
    ) -> None:
        """Start the service, or find it, and let it follow the cycles from now on.

        `on_stop` gets the reason of a STOP to obey, on the loop; `on_nodes` hosts that are to have
        no place any more, and why, in any thread.
        """
        plan = self.plan
        if not (plan.attribution.is_enabled and plan.logs.applog_prefix):
            return
        excludes = plan.fault_tol_cfg.attribution_node_action == "exclude"
        if excludes and not self.is_shared:
            logger.info("a job of one node excludes none: bad nodes are only logged")
            excludes = False
        from nvidia_resiliency_ext.fault_tolerance._hosting import attribution

        # A job of several nodes may span the tasks of an array, and the next task takes it over.
        scheduled = job_id_from_env() if self.is_shared else task_id_from_env()
        job_id = plan.cycle_info_job_id or scheduled or plan.job_name
        token = self.environ.get(_ATTRSVC_ACCESS) or plan.fault_tol_cfg.rdzv_token_file
        manager = attribution.AttributionManager(
            plan.attribution,
            is_store_host=True,
            environ={**self.environ, _ATTRSVC_ACCESS: token} if token else self.environ,
            state_dir=attribution.state_dir(plan.attribution.log_file, job_id, self.run_dir),
        )
        self._watch = attribution.AttributionWatch(
            manager,
            base_log_file=plan.logs.applog_prefix,
            token_file=token,
            node_id=self.host,
            post=(lambda call: call()) if self.loop is None else self.loop.post,
            on_stop=on_stop,
            on_nodes=on_nodes if excludes else None,
            job_id=job_id,
            log_complete=not self.is_shared and plan.logs.server is None,
        )
        self._watch.start()

    def begins(
        self,
        cycle: int,
        active: Sequence[Arrival],
        waiting: Sequence[Arrival] = (),
        *,
        goes_on: bool = False,
    ) -> None:
        """Record that a cycle starts on the active nodes, by rank; `goes_on`: it was recorded."""
        self.cycle = cycle
        servers, watch, reporter = self._servers, self._watch, self._reporter
        if goes_on and servers is not None:
            servers.expect_nodes()
        if watch is not None:
            watch.begin(cycle)
        if reporter is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._report.cycle_files import CycleInfoRoundSnapshot

        snapshot = CycleInfoRoundSnapshot(
            cycle,
            [one.host or one.addr for one in active],
            [one.host or one.addr for one in waiting],
            [one.infra_rank if one.infra_rank >= 0 else at for at, one in enumerate(active)],
        )
        reporter.report_cycle_start(snapshot, goes_on=goes_on)

    def ended(self, cycle: int, cause: Cause | None = None) -> None:
        """Record that a cycle is over, also one that began before; it may be repeated."""
        watch, reporter = self._watch, self._reporter
        if watch is not None:
            watch.ended(evidence_of(cause))
        if reporter is not None:
            reporter.report_cycle_end(cycle)

    def end_attribution(self, *, job_goes_on: bool = False) -> None:
        """End the attribution service and its client; of a job that goes on ask for no verdict."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(asks=not job_goes_on)

    def end_cycle_info(self, *, job_goes_on: bool = False) -> None:
        """Write pending cycle files, for 2 s at most; end an open cycle unless the job goes on."""
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.shutdown(ends_cycle=not job_goes_on)

    def close(self, *, job_goes_on: bool = False) -> None:
        """End all services; log servers write the lines that they hold.

        Where the job goes on, the cycle is not over, and servers do not wait for nodes, which keep
        what was not confirmed.
        """
        self.end_attribution(job_goes_on=job_goes_on)
        self.end_cycle_info(job_goes_on=job_goes_on)
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.stop(at_once=job_goes_on)


def evidence_of(cause: Cause | None) -> tuple[str, ...]:
    """Return a fault as log lines (signal, exit code, hang), which no worker's log holds."""
    if cause is None:
        return ()
    if cause.detected_by == "monitor":
        return (cause.what,)
    who = "" if cause.rank is None else f"rank {cause.rank}: "
    if cause.signal is not None:
        return (f"{who}killed by {signal_name(cause.signal)}",)
    return (f"{who}exit code {cause.exit_code}",) if cause.exit_code else ()
