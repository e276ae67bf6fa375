# SPDX-License-Identifier: Apache-2.0
"""What a launch keeps of each cycle beside the record of events: cycle logs and cycle information.

It owns them from the launch's start to its end, and the log servers where this node runs them.
What is switched off is not imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

from .node_state import Assignment
from .output import Target, WorkerOutput

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._cycleinfo.reporter import CycleInfoReporter
    from nvidia_resiliency_ext.fault_tolerance._cyclelogs.collector import CycleLogs
    from nvidia_resiliency_ext.fault_tolerance._cyclelogs.servers import Loop
    from nvidia_resiliency_ext.fault_tolerance._cyclelogs.sinks import FunnelAddress
    from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import Placement

    from .log_plan import LogServerPlan
    from .place import Place
    from .plan import LaunchPlan

__all__ = ["CycleNodes", "CycleRecords", "StoreHost", "nodes_of"]

logger = logging.getLogger("nvrx")

_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class StoreHost:
    """The node that runs the job's servers and writes what is written once per job.

    Attributes:
        is_here: Whether it is this one.
        address: Where its servers listen, as other nodes reach it.
        is_shared: Whether other nodes send to its servers.
    """

    is_here: bool = True
    address: str = "127.0.0.1"
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class CycleNodes:
    """The nodes of a cycle: those that work, each one's rank, and those that wait."""

    active: Sequence[str]
    ranks: Sequence[int]
    standby: Sequence[str] = ()


def nodes_of(placement: Placement, hosts: Mapping[str, str]) -> CycleNodes:
    """Return the nodes of a closed round by their hosts' names."""
    return CycleNodes(
        active=[hosts.get(one.node, one.addr) for one in placement.active],
        ranks=[
            one.infra_rank if one.infra_rank >= 0 else rank
            for rank, one in enumerate(placement.active)
        ],
        standby=[
            hosts.get(one.node, one.addr) for one in (*placement.standby, *placement.excluded)
        ],
    )


class CycleObserver(Protocol):
    """Who is told of cycles, on the store host and from any thread."""

    def begin(self, cycle: int) -> None:
        """Take note that a cycle begins; told again when this node starts its workers."""

    def ended(self) -> None:
        """Take note that the present cycle is over."""


class CycleRecords:
    """Cycle logs, cycle information and log servers of one launch; `close` ends all of it.

    Attributes:
        log_token: What the log server here asks for, when other nodes must be told; else None.
        lacks_log_token: Whether this node must be told.

    Raises:
        NvrxError: A port is taken, or a directory cannot be used.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        environ: Mapping[str, str],
        place: Place,
        loop: Loop,
        clock: Clock,
        store_host: StoreHost | None = None,
    ) -> None:
        self._plan = plan
        self._environ = environ
        self._place = place
        self._store_host = store_host or StoreHost()
        self.log_token: str | None = None
        self.lacks_log_token = False
        self._logs: CycleLogs | None = None
        self._reporter: CycleInfoReporter | None = None
        self._info_path: str | None = None
        self._observer: CycleObserver | None = None
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._stack.close)
            self._open_logs(loop, clock)
            self._open_info()
            on_failure.pop_all()

    def _open_logs(self, loop: Loop, clock: Clock) -> None:
        logs = self._plan.logs
        if logs.applog_prefix is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._cyclelogs.collector import CycleLogs

        self._logs = CycleLogs(
            logs.applog_prefix,
            workers=self._plan.nproc_per_node,
            funnel=self._open_funnel(logs.server, loop, clock),
            spill_dir=self._environ.get(_env.NODE_LOCAL_TMPDIR),
        )
        self._stack.callback(self._close_logs)
        if logs.launcher_log_file is not None and logs.launcher_pipe_fd is not None:
            self._logs.read_own(logs.launcher_pipe_fd, logs.launcher_log_file)
        elif logs.launcher_log_file is not None:
            self._logs.capture_own_streams(logs.launcher_log_file)

    def _open_funnel(
        self, server: LogServerPlan | None, loop: Loop, clock: Clock
    ) -> FunnelAddress | None:
        """Start the log servers, if they belong here; return the one that this node sends to."""
        logs, host = self._plan.logs, self._store_host
        if server is None and logs.server_endpoint is None:
            return None
        from nvidia_resiliency_ext.fault_tolerance._cyclelogs.sinks import FunnelAddress

        node_id = logs.node_id or self._place.host
        given = (
            self._environ.get(_env.LOG_FUNNEL_TOKEN_FILE)
            or self._plan.fault_tolerance.rdzv_token_file
        )
        if server is None:
            return FunnelAddress(str(logs.server_endpoint), node_id, given)
        from nvidia_resiliency_ext.fault_tolerance._cyclelogs.servers import (
            LogServers,
            ServerPlan,
            endpoint_of,
        )

        token_file = given or os.path.join(self._place.run_dir.path, "log_token")
        self.lacks_log_token = given is None and not host.is_here
        if host.is_here:
            if given is None:
                self._make_token()
            settings = ServerPlan(
                ports=server.ports,
                allowed_roots=logs.roots,
                leaf_queue_chunks=server.leaf_queue_chunks,
                log_prefix=server.log_prefix,
                grace_s=server.grace_s,
            )
            for root in logs.roots:
                _make_directory(root)
            servers = LogServers(settings, host.address, token_file, self._environ, loop, clock)
            servers.start()
            self._stack.callback(servers.stop)
        port = server.ports.client_connect_port()
        return FunnelAddress(endpoint_of(host.address, port), node_id, token_file)

    def _make_token(self) -> None:
        """Make a token; of several nodes the others get it through the rendezvous."""
        token = os.urandom(_TOKEN_BYTES).hex()
        self.take_log_token(token)
        if self._store_host.is_shared:
            self.log_token = token
            logger.info(
                "the log server's token goes through the rendezvous, which guards against mistakes "
                "and not against whoever reads the store; %s names a file on all nodes instead",
                _env.LOG_FUNNEL_TOKEN_FILE,
            )

    def _open_info(self) -> None:
        directory = self._plan.fault_tolerance.cycle_info_dir
        if directory is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._cycleinfo.reporter import (
            CycleInfoReporter,
        )
        from nvidia_resiliency_ext.shared_utils.job_metadata import job_id_from_env

        job_id = job_id_from_env() or ""
        self._info_path = CycleInfoReporter.current_cycle_info_path(directory, job_id)
        if self._store_host.is_here:
            self._reporter = CycleInfoReporter(directory, self._plan.logs.applog_prefix, job_id)
            self._stack.callback(self._reporter.shutdown)

    def tell(self, observer: CycleObserver) -> None:
        """Let somebody follow the cycles from now on."""
        self._observer = observer

    # While the job runs ------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Return what workers are told of it; the same for all of them and all cycles."""
        return {} if self._info_path is None else {_env.CURRENT_CYCLE_INFO: self._info_path}

    def take_log_token(self, token: str) -> None:
        """Take the token of the log server; from any thread."""
        atomic_write(os.path.join(self._place.run_dir.path, "log_token"), token.encode())

    def no_log_server(self) -> None:
        """Take note that nobody serves logs in this job; from any thread."""
        logger.warning("the store host runs no log server: this node writes its logs itself")
        if self._logs is not None:
            self._logs.write_files_instead()

    def begin(self, assignment: Assignment) -> None:
        """Take note that the workers of a cycle are about to start on this node."""
        if self._logs is not None:
            self._logs.begin_cycle(assignment.cycle, assignment.world_size)
        if not self._store_host.is_shared:
            self.round_closed(assignment.cycle, CycleNodes([self._place.host], [0]))

    def round_closed(self, cycle: int, nodes: CycleNodes) -> None:
        """Take note of a cycle's nodes, on the store host; from any thread."""
        if self._observer is not None:
            self._observer.begin(cycle)
        if self._reporter is None:
            return
        from nvidia_resiliency_ext.fault_tolerance._cycleinfo.reporter import (
            CycleInfoRoundSnapshot,
        )

        self._reporter.report_cycle_start(
            CycleInfoRoundSnapshot(cycle, nodes.active, nodes.standby, nodes.ranks)
        )

    def output(self, output: WorkerOutput, rank: int) -> WorkerOutput:
        """Return where a worker's streams go: into its pipe, if there are cycle logs."""
        logs = self._logs
        if logs is None:
            return output
        piped = Target(open_pipe=lambda: logs.open_pipe(rank))
        return dataclasses.replace(output, stdout=piped, stderr=piped)

    def ended(self) -> None:
        """Take note that the present cycle is over."""
        if self._observer is not None:
            self._observer.ended()
        if self._reporter is not None:
            self._reporter.report_cycle_end()

    # The end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left, for some seconds at most, and end log servers and threads."""
        self._stack.close()

    def _close_logs(self) -> None:
        logs, self._logs = self._logs, None
        if logs is not None and not logs.close():
            logger.error("not all output of the workers is in %s", self._plan.logs.applog_prefix)


def _make_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise NvrxError(f"the log directory {path} cannot be made: {error.strerror}") from error
