# SPDX-License-Identifier: Apache-2.0
"""Owns what the host of a job runs beside the store: log servers, cycle information, attribution.

It follows the rounds. What is switched off is not imported, and nothing here waits for a file
system or a service while the job runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.job_metadata import task_id_from_env

from .plan import IN_A_FILE, NO_SERVER, HostPlan, make_token, token_file

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._attribution.watch import AttributionWatch
    from nvidia_resiliency_ext.fault_tolerance._core.cause import Cause
    from nvidia_resiliency_ext.fault_tolerance._logs.servers import LogServers, Loop
    from nvidia_resiliency_ext.fault_tolerance._report.cycle_reporter import CycleInfoReporter

    from .plan import CycleNodes

__all__ = ["HostPlace", "HostServices", "evidence_of"]

logger = logging.getLogger("nvrx")


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where the host is.

    Attributes:
        address: Where its servers listen, as other nodes reach it.
        host: The machine's name.
        run_dir: A private directory, for a token that is made here.
    """

    address: str
    host: str
    run_dir: str


class HostServices:
    """What a job's host runs; `close` ends all of it. Rounds may be told from any thread.

    Args:
        plan: What is asked for.
        environ: The program's environment.
        place: Where the host is.
        is_shared: Whether other nodes send to its log servers.
        loop: Where servers are watched and verdicts arrive.
        clock: The clock of the loop.

    Attributes:
        log_token: What nodes are told of the log servers: a token, or one of the words in
            `log_token`.
        cycle: The cycle that was begun last.

    Raises:
        NvrxError: A port is taken, or a directory cannot be used.
    """

    def __init__(
        self,
        plan: HostPlan,
        environ: Mapping[str, str],
        place: HostPlace,
        loop: Loop,
        clock: Clock,
        *,
        is_shared: bool,
    ) -> None:
        self._plan = plan
        self._environ = environ
        self._place = place
        self._is_shared = is_shared
        self._loop = loop
        self.log_token = NO_SERVER
        self.cycle = -1
        self._servers: LogServers | None = None
        self._reporter: CycleInfoReporter | None = None
        self._watch: AttributionWatch | None = None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._open_servers(clock)
            self._open_info()
            on_failure.pop_all()

    def _open_servers(self, clock: Clock) -> None:
        server, roots = self._plan.logs.server, self._plan.logs.roots
        if server is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._logs.servers import (
            LogServers,
            ServerPlan,
        )

        token = token_file(self._environ, self._plan.token_file, self._place.run_dir)
        self.log_token = IN_A_FILE if token.is_given else make_token(token.path)
        if self._is_shared and not token.is_given:
            logger.info(
                "the log server's token goes through the rendezvous, which guards against mistakes "
                "and not against whoever reads the store; %s names a file on all nodes instead",
                _env.LOG_FUNNEL_TOKEN_FILE,
            )
        for root in roots:
            _make_directory(root)
        settings = ServerPlan(
            ports=server.ports,
            allowed_roots=roots,
            leaf_queue_chunks=server.leaf_queue_chunks,
            log_prefix=server.log_prefix,
            grace_s=server.grace_s,
        )
        servers = LogServers(
            settings, self._place.address, token.path, self._environ, self._loop, clock
        )
        servers.start()
        self._servers = servers

    def _open_info(self) -> None:
        plan = self._plan
        if plan.cycle_info_dir is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._report.cycle_reporter import CycleInfoReporter

        self._reporter = CycleInfoReporter(
            plan.cycle_info_dir, plan.logs.applog_prefix, plan.cycle_info_job_id
        )

    def follow_attribution(
        self,
        on_stop: Callable[[str], None],
        on_nodes: Callable[[tuple[str, ...], str], None],
    ) -> None:
        """Start the service, or find it, and let it follow the cycles from now on.

        Args:
            on_stop: Called on the loop with the reason of a STOP that is to be obeyed.
            on_nodes: Called in any thread with hosts that are to have no place any more, where
                that was asked for.
        """
        plan = self._plan
        if not (plan.attribution.is_enabled and plan.logs.applog_prefix):
            return
        excludes = plan.excludes_named
        if excludes and not self._is_shared:
            logger.info("a job of one node excludes none: bad nodes are only logged")
            excludes = False
        from nvidia_resiliency_ext.fault_tolerance._attribution.service import (
            AttributionManager,
            state_dir,
        )
        from nvidia_resiliency_ext.fault_tolerance._attribution.watch import AttributionWatch

        job_id = plan.cycle_info_job_id or task_id_from_env() or plan.job_name
        manager = AttributionManager(
            plan.attribution,
            is_store_host=True,
            environ=self._environ,
            state_dir=state_dir(plan.attribution.log_file, job_id, self._place.run_dir),
        )
        self._watch = AttributionWatch(
            manager,
            base_log_file=plan.logs.applog_prefix,
            token_file=plan.token_file,
            node_id=self._place.host,
            loop=self._loop,
            on_stop=on_stop,
            on_nodes=on_nodes if excludes else None,
            job_id=job_id,
            log_complete=not self._is_shared and plan.logs.server is None,
        )
        self._watch.start()

    # While the job runs ------------------------------------------------------------------------

    def begins(self, cycle: int, nodes: CycleNodes) -> None:
        """Take note that the workers of a cycle start now."""
        self.cycle = cycle
        if self._watch is not None:
            self._watch.begin(cycle)
        if self._reporter is not None:
            self._reporter.report_cycle_start(nodes.snapshot(cycle))

    def goes_on(self, cycle: int, nodes: CycleNodes) -> None:
        """Take note that a cycle goes on that a host before this one saw begin."""
        self.cycle = cycle
        if self._servers is not None:
            self._servers.expect_nodes()
        if self._watch is not None:
            self._watch.begin(cycle)
        if self._reporter is not None:
            self._reporter.report_cycle_goes_on(nodes.snapshot(cycle))

    def ended(self, cycle: int, cause: Cause | None = None) -> None:
        """Take note that a cycle is over, also one that began before; it may be told again.

        Args:
            cycle: Which one.
            cause: Why, where that is known.
        """
        if self._watch is not None:
            self._watch.ended(evidence_of(cause))
        if self._reporter is not None:
            self._reporter.report_end_of(cycle)

    # The end -----------------------------------------------------------------------------------

    def end_attribution(self, *, job_goes_on: bool = False) -> None:
        """End the service and what asks it; a job that goes on is not asked about."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(asks=not job_goes_on)

    def close(self, *, job_goes_on: bool = False) -> None:
        """End all of it; what log servers have is written.

        Args:
            job_goes_on: Whether another host is to take over: the present cycle is not over, and
                servers do not wait for nodes, which keep what was not confirmed.
        """
        self.end_attribution(job_goes_on=job_goes_on)
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.shutdown(ends_cycle=not job_goes_on)
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.stop(at_once=job_goes_on)


def evidence_of(cause: Cause | None) -> tuple[str, ...]:
    """Return what launchers saw of a fault, as lines of a log: workers do not write of it."""
    if cause is None:
        return ()
    if cause.detected_by == "monitor":
        return (cause.what,)
    who = "" if cause.rank is None else f"rank {cause.rank}: "
    if cause.signal is not None:
        return (f"{who}killed by {_signal_name(cause.signal)}",)
    return (f"{who}exit code {cause.exit_code}",) if cause.exit_code else ()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _make_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise NvrxError(f"the log directory {path} cannot be made: {error.strerror}") from error
