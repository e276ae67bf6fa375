# SPDX-License-Identifier: Apache-2.0
"""What a node waits for before it joins a round, and before its workers start.

Before it joins: its health checks, which begin as soon as workers are being stopped. Before its
workers start: GPU memory that the last ones still hold, and the pause of a crash loop; both overlap
with the rendezvous. What may block, as long as a driver or a mount does, runs in threads.

A crash loop is a row of cycles that each ended within `SHORT_CYCLE_S` and without a step (programs
without heartbeats or sections report none). The first restarts at once, the second waits
`FIRST_DELAY_S`, each further one twice as long, up to a limit.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._core.errors import UnhealthyNodeException
from nvidia_resiliency_ext.fault_tolerance._core.infra import has_adapters, has_gpu_driver
from nvidia_resiliency_ext.fault_tolerance._core.local_world import count_gpus, count_visible
from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.shared_utils import health_check
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, Timer, WorkerThread

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan
    from nvidia_resiliency_ext.fault_tolerance._report.events import EventReporter
    from nvidia_resiliency_ext.shared_utils.health_check import Check, HealthResult, NodeHealthCheck


SHORT_CYCLE_S = 10.0
FIRST_DELAY_S = 1.0

_FREE_CRASHES = 1
# Kinds of causes that say nothing about the program: a machine went, or somebody wanted it so.
_NOT_THE_PROGRAM = frozenset({"node_lost", "drained", "left", "unhealthy", "start", "opened"})
_SENT_BY_OTHERS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)


def crashes_after(crashes: int, cause: Cause, lived_s: float, *, has_stepped: bool) -> int:
    if has_stepped or lived_s >= SHORT_CYCLE_S:
        return 0
    is_crash = cause.kind not in _NOT_THE_PROGRAM and cause.signal not in _SENT_BY_OTHERS
    return crashes + is_crash


def delay_s(crashes: int, limit_s: float) -> float:
    doublings = crashes - _FREE_CRASHES - 1
    if doublings < 0:
        return 0.0
    # 2.0 ** 1024 does not exist.
    return min(limit_s, FIRST_DELAY_S * 2.0 ** min(doublings, 64))


logger = logging.getLogger("nvrx")

# Each check has a tighter limit of its own; this one holds whatever they do.
DEADLINE_S = 30.0
SERVICE_DEADLINE_S = 75.0
MAX_EVIDENCE_CHARS = 2000


class NodeChecks:
    """The checks of one node, kept over its rounds: some compare with what they saw first."""

    def __init__(
        self, config: FaultToleranceConfig, endpoint: str | None, environ: Mapping[str, str]
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._environ = environ
        self._must_have_gpus = bool(environ.get(_env.EXPECTED_GPUS))
        self._checks: dict[str, Check] = {}

    def run(self) -> list[HealthResult]:
        """Ask all checks for which there is something to look at. May block, and never raises."""
        checks = self._wanted()
        if not checks:
            return []
        deadline_s = SERVICE_DEADLINE_S if "service" in self._checks else DEADLINE_S
        return health_check.run_checks(checks, deadline_s)

    def _wanted(self) -> list[Check]:
        """Return the checks to ask, made when they are first needed."""
        config, checks = self._config, self._checks
        if "gpu" not in checks and (self._must_have_gpus or has_gpu_driver()):
            checks["gpu"] = health_check.GPUHealthCheck()
        template = config.link_state_path_template
        if "nic" not in checks and config.enable_nic_healthcheck and (template or has_adapters()):
            checks["nic"] = health_check.NicLinkStateHealthCheck(template)
        if "storage" not in checks and config.enable_dist_storage_healthcheck:
            checks["storage"] = health_check.DistributedStorageHealthCheck()
        if "paths" not in checks and config.storage_healthcheck_path:
            paths = config.storage_healthcheck_path.split(",")
            checks["paths"] = health_check.StoragePathHealthCheck(paths)
        if "segment" not in checks and config.segment_health_check_dir:
            from .segment_health import SegmentHealthCheck

            checks["segment"] = SegmentHealthCheck(config.segment_health_check_dir, self._environ)
        if "service" not in checks:
            service = (
                health_check.NodeHealthCheck(endpoint=self._endpoint)
                if self._endpoint
                else _service
            )
            if service is not None:
                checks["service"] = service
        return list(checks.values())


def unfit(results: Sequence[HealthResult], host: str) -> Cause | None:
    """Return why a node must not join, or None when nothing is wrong."""
    bad = [result for result in results if not result]
    if not bad:
        return None
    said = "; ".join(f"health check {result.name}: {result.reason}" for result in bad)
    evidence = json.dumps({result.name: dict(result.evidence) for result in bad}, default=str)
    return _unhealthy(host, said, check=bad[0].name, evidence=evidence[:MAX_EVIDENCE_CHARS])


def _unhealthy(host: str, said: str, **detail: str) -> Cause:
    what = f"host {host} is unhealthy: {said}"
    return Cause("unhealthy", what, host=host, detected_by="health check", detail=detail)


def injected_failure(
    cycle: int, infra_rank: int, host: str, environ: Mapping[str, str]
) -> Cause | None:
    """Return a failure that the environment wants in this cycle on this node; for tests."""
    if not environ.get(_env.INJECT_GPU_FAILURE):
        return None
    from nvidia_resiliency_ext.testing_utils import health_check_injector

    for kind in health_check_injector.KINDS:
        if health_check_injector.should_inject_failure(cycle, infra_rank, kind):
            said = f"health check {kind}: failed on purpose, see {_env.INJECT_GPU_FAILURE}"
            return _unhealthy(host, said, check=kind)
    return None


def ensure_node_is_healthy(
    config: FaultToleranceConfig | None = None, endpoint: str | None = None
) -> None:
    """Run the checks that a node must pass before it joins a rendezvous; may block.

    Args:
        config: Which checks are wanted; None takes the defaults.
        endpoint: Socket of a service that evaluates this node; None takes that of
            `init_node_health_check`, if it was called.

    Raises:
        UnhealthyNodeException: One of them failed; the message says which and why.
    """
    wanted = FaultToleranceConfig() if config is None else config
    results = NodeChecks(wanted, endpoint, os.environ).run()
    cause = unfit(results, os.uname().nodename.split(".", 1)[0])
    if cause is not None:
        raise UnhealthyNodeException(cause.what)


# The service that programs name for the launches of this process.
_service: NodeHealthCheck | None = None


def init_node_health_check(endpoint: str | None) -> None:
    """Name the service that evaluates this node, for all launches of this process.

    `endpoint` is the path of its Unix socket, also as `unix://...`; None forgets it.
    """
    global _service  # noqa: PLW0603 - the one object of the process
    _service = health_check.NodeHealthCheck(endpoint=endpoint) if endpoint else None


def get_node_health_check() -> NodeHealthCheck | None:
    """Return the check that asks the service named last, or None."""
    return _service


@dataclass(eq=False)
class GpuMemory:
    """How much memory of this node's workers' GPUs is in use. It may block; one thread only.

    A process that was killed gives it back a little later: new workers would run out of it before.
    """

    nproc: int
    environ: Mapping[str, str]
    config: FaultToleranceConfig
    is_unknown: bool = False  # That was said.

    def ranks(self) -> Sequence[int]:
        if not has_gpu_driver():
            return ()
        present = len(health_check.PynvmlMixin().get_gpu_pci_mapping())
        if present == 0 and count_gpus(self.environ):
            self._say_unknown("the driver does not tell which GPUs there are")
        return range(min(self.nproc, count_visible(self.environ, present)))

    def used_mb(self, ranks: Sequence[int]) -> dict[int, float] | None:
        """Return the megabytes in use by local rank, or None when the driver does not say."""
        from nvidia_resiliency_ext.shared_utils.memory import GPUMemoryLogger

        used: dict[int, float] = {}
        for rank in ranks:
            found = GPUMemoryLogger().get_gpu_memory(device_index=rank)
            if found is None:
                self._say_unknown(f"the GPU of local rank {rank} cannot be read")
                return None
            used[rank] = found["used_mb"]
        return used

    def _say_unknown(self, why: str) -> None:
        if not self.is_unknown:
            self.is_unknown = True
            logger.warning("restarts do not wait for GPU memory, it is unknown: %s", why)

    def wait(self, clock: Clock, stopped: threading.Event) -> float | None:
        """Wait until the memory is free; return the seconds, None where there is no such memory."""
        config, ranks = self.config, self.ranks()
        if not ranks:
            return None
        began = clock.monotonic()
        while True:
            used = self.used_mb(ranks)
            if used is None:
                return None
            tolerated_mb = config.gpu_memory_tolerance_mb
            waiting_for = {rank: mb for rank, mb in used.items() if mb > tolerated_mb}
            waited_s = clock.monotonic() - began
            if not waiting_for:
                return waited_s
            left_s = config.gpu_memory_reclaim_timeout - waited_s
            if left_s <= 0:
                which = ", ".join(f"rank {rank}: {mb:.0f} MB" for rank, mb in waiting_for.items())
                logger.error(
                    "GPU memory is still in use after %.0f s (%s; %.0f MB are tolerated): "
                    "the workers start all the same",
                    *(waited_s, which, tolerated_mb),
                )
                return waited_s
            if stopped.wait(min(config.gpu_memory_poll_interval, left_s)):
                return waited_s


CLOSE_WAIT_S = 0.2


class _Checking(enum.Enum):
    """How far the health checks for the next round are."""

    NOT_BEGUN = "not begun"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class AdmissionCheck:
    """Lets a node join and its workers start when nothing speaks against it.

    The loop's thread only. Callbacks come from the loop, or at once.
    """

    plan: LaunchPlan
    environ: Mapping[str, str]
    _: KW_ONLY
    host: str
    infra_rank: int
    loop: EventLoop
    clock: Clock
    reporter: EventReporter

    def __post_init__(self) -> None:
        plan = self.plan
        self._config = plan.fault_tol_cfg
        self.checks = NodeChecks(self._config, plan.node_health_check_endpoint, self.environ)
        self.memory = GpuMemory(plan.nproc_per_node, self.environ, self._config)
        self._checking = _Checking.NOT_BEGUN
        self._finding: Cause | None = None
        self._joining: tuple[int, Callable[[Cause | None], None]] | None = None
        self._crashes = 0
        self._not_before = 0.0
        self._reclaiming = False
        self._starting: Callable[[], None] | None = None
        self._pause: Timer | None = None
        self._stopped = threading.Event()
        # A check that hangs must not hold up what the other thread does.
        self._check_thread = WorkerThread("nvrx-health")
        self._memory_thread = WorkerThread("nvrx-reclaim")
        for thread in (self._check_thread, self._memory_thread):
            self.loop.watch(thread.fileno(), thread.collect)

    def prepare(self) -> None:
        """Begin the health checks for the next round, unless they have begun."""
        if self._checking is not _Checking.NOT_BEGUN:
            return
        self._checking = _Checking.RUNNING
        try:
            self._check_thread.submit(self.checks.run, self._checked)
        except RuntimeError as error:
            logger.warning("the health checks cannot run now: %s", error)
            self._checking, self._finding = _Checking.DONE, None

    def admit(self, cycle: int, answer: Callable[[Cause | None], None]) -> None:
        """Report the admission result to `answer`; a newer call replaces a pending one."""
        self._joining = (cycle, answer)
        self.prepare()
        self._answer()

    def _checked(self, results: list[HealthResult] | None) -> None:
        if self._checking is not _Checking.RUNNING:
            return
        found = results or []
        self._checking, self._finding = _Checking.DONE, unfit(found, self.host)
        self.reporter.node_checked(found)
        self._answer()

    def _answer(self) -> None:
        if self._checking is not _Checking.DONE or self._joining is None:
            return
        (cycle, answer), self._joining = self._joining, None
        self._checking = _Checking.NOT_BEGUN
        finding = self._finding
        # With many nodes only the rendezvous knows which round it is: see `store_rendezvous.py`.
        if finding is None and self.plan.max_nodes == 1:
            finding = injected_failure(cycle, max(0, self.infra_rank), self.host, self.environ)
        answer(finding)

    def cycle_failed(self, cause: Cause, lived_s: float, *, has_stepped: bool) -> None:
        """Record how a cycle ended: the next start may have to wait."""
        self._crashes = crashes_after(self._crashes, cause, lived_s, has_stepped=has_stepped)
        pause_s = delay_s(self._crashes, self._config.restart_backoff)
        self._not_before = self.clock.monotonic() + pause_s

    def workers_gone(self) -> None:
        """Begin to wait for the GPU memory of workers that were stopped."""
        if self._config.gpu_memory_reclaim_timeout <= 0 or self._reclaiming:
            return
        self._reclaiming = True
        wait = partial(self.memory.wait, self.clock, self._stopped)
        try:
            self._memory_thread.submit(wait, self._reclaimed)
        except RuntimeError as error:
            logger.warning("the restart does not wait for GPU memory: %s", error)
            self._reclaiming = False

    def _reclaimed(self, seconds: float | None) -> None:
        self._reclaiming = False
        if seconds is not None:
            self.reporter.record_phase("reclaim", round(seconds, 6))
        self._let_start()

    def start(self, begin: Callable[[], None]) -> None:
        """Call `begin` when workers may start."""
        self._starting = begin
        self._let_start()

    def _let_start(self) -> None:
        if self._starting is None or self._reclaiming:
            return
        wait_s = self._not_before - self.clock.monotonic()
        if wait_s > 0:
            if self._pause is None:
                logger.warning(
                    "%d cycles in a row failed within %g s and without a step: "
                    "the next one waits %d s before it starts",
                    self._crashes,
                    SHORT_CYCLE_S,
                    math.ceil(wait_s),
                )
            self._cancel_pause()
            self._pause = self.loop.call_at(self._not_before, self._let_start)
            return
        self._pause = None
        begin, self._starting = self._starting, None
        begin()

    def shut(self) -> None:
        """Drop the pending start of workers, which another decision replaced."""
        self._starting = None
        self._cancel_pause()

    def _cancel_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def close(self) -> None:
        """Leave the threads behind; a check that hangs holds nothing up."""
        self.shut()
        self._joining = None
        self._stopped.set()
        for thread in (self._check_thread, self._memory_thread):
            self.loop.unwatch(thread.fileno())
            thread.close(CLOSE_WAIT_S)
