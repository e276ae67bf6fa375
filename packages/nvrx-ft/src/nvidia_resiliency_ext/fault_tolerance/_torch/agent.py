# SPDX-License-Identifier: Apache-2.0
"""Torch's elastic agent with our rank monitors, restart rules and requests of ranks.

For programs that build torch's agent themselves; the loop of our launcher is `_agent.agent`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent as torch_agent
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core import errors
from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector
from nvidia_resiliency_ext.fault_tolerance.progress_tracker import TrainingProgressTracker
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer
from nvidia_resiliency_ext.shared_utils.rundir import RunDir

from .handler import StoreRendezvousHandler

logger = logging.getLogger("nvrx")

ANY_FAILED = "any-failed"
MIN_HEALTHY = "min-healthy"
_DONE = frozenset({WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.UNHEALTHY})
_MONITOR_END_S = 5.0
_MAILBOX = "launcher.sock"
_MONITOR = "rmon{}.sock"


class LocalElasticAgent(torch_agent.LocalElasticAgent):
    """Torch's agent of one node: watches its ranks, and restarts with the job's other nodes.

    Args:
        spec: What the workers run; its handler must be one of ours.
        fault_tol_cfg: How faults are noticed and handled.
        logs_specs: Where the workers' output goes.
        start_method: How functions are started.
        exit_barrier_timeout: Seconds to wait for other nodes when all is done here.
        log_line_prefix_template: Prefix of the workers' lines on the console.
        term_timeout: Seconds from SIGTERM to SIGKILL when this process was signalled.
        workers_stop_timeout: Seconds from SIGTERM to SIGKILL when workers are restarted.
        restart_policy: `any-failed`, or `min-healthy` with the handler of `_ft_rendezvous`.
        is_store_host: Not used: the handler knows it.
        rank_monitors: Socket paths of running monitors by local rank; None starts own ones.

    Raises:
        ValueError: the handler does not fit, or the policy is none of these.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the signature is public
        self,
        spec: WorkerSpec,
        fault_tol_cfg: FaultToleranceConfig,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        term_timeout: float = 1800,
        workers_stop_timeout: float = 30,
        restart_policy: str = ANY_FAILED,
        is_store_host: bool = False,  # noqa: ARG002 - as its documentation says
        rank_monitors: Mapping[int, str] | None = None,
    ) -> None:
        self._handler = _our_handler(spec, restart_policy)
        super().__init__(
            spec, logs_specs, start_method, exit_barrier_timeout, log_line_prefix_template
        )
        self._shutdown_timeout = int(term_timeout)
        self._config = fault_tol_cfg
        self._workers_stop_timeout = workers_stop_timeout
        self._min_healthy = restart_policy == MIN_HEALTHY
        self._given_monitors = dict(rank_monitors or {})
        missing = set(range(spec.local_world_size)) - self._given_monitors.keys()
        if self._given_monitors and missing:
            raise ValueError(f"rank_monitors: the local ranks {sorted(missing)} have none")
        self._mailbox: IpcConnector | None = None
        self._reported: RunResult | None = None
        self._tracker = TrainingProgressTracker(
            min_progress_iterations=fault_tol_cfg.min_progress_iterations,
            max_no_progress_cycles=fault_tol_cfg.max_no_progress_cycles,
            checkpoint_iteration_file=fault_tol_cfg.checkpoint_iteration_file,
        )

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run this node's part of the job; None when it stood by to the end.

        Metrics name `role`.

        Raises:
            NoRestartRequested: the job must not be started again.
            TerminalWorkerGroupFailure: another node ended the job as failed.
            RendezvousError: torch's, as the handler's `next_rendezvous`.
        """
        with contextlib.ExitStack() as stack:
            self._prepare(stack)
            # None, whatever torch's annotation says, after a graceful exit.
            result: RunResult = super().run(role)
            return result

    def fetch_control_requests(self) -> list[object]:
        """Return the requests of ranks since the last call, which the handler then carries out."""
        return [] if self._mailbox is None else self._mailbox.fetch_received()

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        """Listen to ranks, start their monitors, and let workers know the sockets."""
        run_dir = RunDir.create("agent")
        stack.callback(run_dir.remove)
        stack.callback(self._tracker.close)
        self._mailbox = IpcConnector(run_dir.socket_path(_MAILBOX))
        self._mailbox.start_receiving()
        stack.callback(self._mailbox.stop_receiving)
        self._handler.set_agent(self)
        spec = self._worker_group.spec
        is_watched = not os.environ.get(_env.DISABLE_RANK_MONITORS)
        for rank in range(spec.local_world_size if is_watched else 0):
            path = run_dir.socket_path(_MONITOR.format(rank))
            if self._given_monitors:
                os.symlink(os.path.abspath(self._given_monitors[rank]), path)
                continue
            process = RankMonitorServer.run_in_subprocess(
                self._config, path, is_restarter_logger=rank == 0
            )
            stack.callback(process.join, _MONITOR_END_S)
            stack.callback(process.terminate)
        for name in ("entrypoint", "args"):
            stack.callback(setattr, spec, name, getattr(spec, name))
        _pass_sockets(spec, run_dir.path, is_watched=is_watched)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next round; the number of a round is the number of restarts of the job."""
        self._reported = None
        self._handler.set_worker_group(worker_group)
        super()._rendezvous(worker_group)
        restarts = self._handler.round()
        self._tracker.sync_cycle_number(restarts)
        self._remaining_restarts = max(0, worker_group.spec.max_restarts - restarts)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return how the workers are, as far as torch's loop is to act on it."""
        result = self._reported or super()._monitor_workers(worker_group)
        if self._handler.is_closed():
            return self._after_the_end(worker_group, result)
        if self._handler.attribution_stop_requested():
            self._stop_workers(worker_group)
            self._handler.signal_no_restart(errors.RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP)
            raise errors.NoRestartRequested(errors.RDZV_SHUTDOWN_REASON_ATTRIBUTION_STOP)
        if not self._min_healthy or result.state not in _DONE:
            return result
        if self._reported is None:
            self._reported = result
            self._handler.try_set_worker_state(result.state)
        # The rendezvous host decides what follows from the states of all nodes.
        return RunResult(state=WorkerState.HEALTHY)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the workers and join the next round, unless that makes no sense any more."""
        self._tracker.analyze_previous_cycle()
        if self._tracker.should_terminate_early():
            self._stop_workers(worker_group)
            self._handler.signal_no_restart(errors.RDZV_SHUTDOWN_REASON_NO_PROGRESS)
            raise errors.NoRestartRequested(errors.RDZV_SHUTDOWN_REASON_NO_PROGRESS)
        if self._handler.round() > worker_group.spec.max_restarts:
            self._stop_workers(worker_group)
            raise errors.TerminalWorkerGroupFailure(
                "no restart is left for the round that was opened"
            )
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        """Stop the workers within the time that a restart has for it."""
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, int(self._workers_stop_timeout))
        super()._stop_workers(worker_group, *args, **kwargs)

    def _after_the_end(self, worker_group: WorkerGroup, result: RunResult) -> RunResult:
        """Return or raise the workers' outcome after another node ended the job for all."""
        reason = self._handler.get_shutdown_reason() or ""
        if result.state is WorkerState.SUCCEEDED:
            if self._min_healthy:
                # All that were needed are done: there is nobody to wait for at the exit barrier.
                self._exit_barrier_timeout = 0.0
            return result
        self._stop_workers(worker_group)
        if reason in errors.RDZV_NO_RESTART_REASONS:
            raise errors.NoRestartRequested(reason)
        if reason != errors.RDZV_SHUTDOWN_REASON_GRACEFUL:
            raise errors.TerminalWorkerGroupFailure(f"the job was ended as failed ({reason})")
        if result.state in _DONE and not self._min_healthy:
            # Its own failure; there is no round to restart in.
            self._remaining_restarts = 0
            return result
        raise RendezvousGracefulExitError("the job ended well without this node's workers")


def _our_handler(spec: WorkerSpec, restart_policy: str) -> Any:
    if restart_policy not in {ANY_FAILED, MIN_HEALTHY}:
        raise ValueError(f"restart_policy={restart_policy!r}: use {ANY_FAILED} or {MIN_HEALTHY}")
    handler = spec.rdzv_handler
    if not isinstance(handler, StoreRendezvousHandler):
        what = f"a handler of this package is needed, not {type(handler).__name__}"
        raise ValueError(what)  # noqa: TRY004 - the documented one for what does not fit
    if restart_policy == MIN_HEALTHY and not hasattr(handler, "try_set_worker_state"):
        raise ValueError(f"{MIN_HEALTHY} needs the handler of _ft_rendezvous")
    if getattr(spec, "virtual_local_rank", False) and callable(spec.entrypoint):
        # A function finds its monitor by LOCAL_RANK, which is then 0 for all.
        raise ValueError("virtual_local_rank: with this agent for programs only, not for functions")
    return handler


def _pass_sockets(spec: WorkerSpec, directory: str, *, is_watched: bool) -> None:
    """Let each worker of `spec` find its sockets: torch's agent has no variables of one worker.

    So a program is started through `env`, whose words may name the local rank, and a function is
    called through an object that sets them.
    """
    if callable(spec.entrypoint):
        spec.entrypoint = _WithSockets(spec.entrypoint, directory, is_watched)
        return
    assert spec.entrypoint is not None
    sockets = _sockets(directory.replace("$", "$$"), "${local_rank}", is_watched)
    words = (f"{name}={path}" for name, path in sockets.items())
    spec.args = (*words, spec.entrypoint.replace("$", "$$"), *spec.args)
    spec.entrypoint = shutil.which("env") or "/usr/bin/env"


def _sockets(directory: str, local_rank: str, is_watched: bool) -> dict[str, str]:
    """Return the variables of a rank that name its sockets."""
    sockets = {_env.FT_LAUNCHER_IPC_SOCKET: f"{directory}/{_MAILBOX}"}
    if is_watched:
        sockets[_env.FT_RANK_MONITOR_IPC_SOCKET] = f"{directory}/{_MONITOR.format(local_rank)}"
    return sockets


class _WithSockets:
    """A function that finds the sockets of its rank in its environment; it can be pickled."""

    def __init__(self, function: Callable[..., Any], directory: str, is_watched: bool) -> None:
        self._function = function
        self._directory = directory
        self._is_watched = is_watched
        # torch names the workers' entry point by these.
        self.__name__ = getattr(function, "__name__", repr(function))
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __call__(self, *args: Any) -> Any:
        local_rank = os.environ[_env.LOCAL_RANK]
        os.environ.update(_sockets(self._directory, local_rank, self._is_watched))
        return self._function(*args)
