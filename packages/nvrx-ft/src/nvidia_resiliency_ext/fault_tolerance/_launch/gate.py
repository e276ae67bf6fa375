# SPDX-License-Identifier: Apache-2.0
"""What a node waits for before it joins a round, and before its workers start.

Before it joins: its health checks, which begin as soon as workers are being stopped. Before its
workers start: GPU memory that the last ones still hold, and the pause of a crash loop; both overlap
with the rendezvous. What blocks runs in threads; the answers come back to the launcher's loop.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._process.slow_thread import SlowThread
from nvidia_resiliency_ext.shared_utils.clock import Clock

from .backoff import SHORT_CYCLE_S, crashes_after, delay_s
from .cause import Cause
from .fitness import NodeChecks, injected_failure, unfit
from .loop import EventLoop, Timer
from .reclaim import GpuMemory, MemoryRules, wait_for_memory

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
    from nvidia_resiliency_ext.shared_utils.health_check import HealthResult

    from .chronicle import Chronicle
    from .plan import LaunchPlan

__all__ = ["GateSettings", "NodeGate", "make_gate"]

logger = logging.getLogger("nvrx")

CLOSE_WAIT_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """What a gate needs to know. Times are seconds.

    Attributes:
        host: This node's name.
        backoff_limit_s: Longest pause of a crash loop; 0 never pauses.
        memory: When GPU memory is free again.
        injected: Returns the failure that a test wants in a cycle.
    """

    host: str
    backoff_limit_s: float
    memory: MemoryRules
    injected: Callable[[int], Cause | None]


class _Checking(enum.Enum):
    """How far the health checks for the next round are."""

    NOT_BEGUN = "not begun"
    RUNNING = "running"
    DONE = "done"


class NodeGate:
    """Lets a node join and its workers start when nothing speaks against it.

    The loop's thread only. Callbacks come from the loop, or at once when there is nothing to wait
    for.

    Args:
        settings: What it goes by.
        check: Runs the health checks; called in a thread.
        memory: What is known of GPU memory; used in a thread.
        loop: Where answers arrive.
        clock: The clock of the loop.
        chronicle: Where results of checks, and waits, are recorded.
    """

    def __init__(
        self,
        settings: GateSettings,
        check: Callable[[], list[HealthResult]],
        memory: GpuMemory,
        *,
        loop: EventLoop,
        clock: Clock,
        chronicle: Chronicle,
    ) -> None:
        self._settings = settings
        self._check = check
        self._memory = memory
        self._loop = loop
        self._clock = clock
        self._chronicle = chronicle
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
        self._check_thread = SlowThread("nvrx-health")
        self._memory_thread = SlowThread("nvrx-reclaim")
        for thread in (self._check_thread, self._memory_thread):
            loop.watch(thread.fileno(), thread.collect)

    # Before joining --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Begin the health checks for the next round, unless they have begun."""
        if self._checking is not _Checking.NOT_BEGUN:
            return
        self._checking = _Checking.RUNNING
        try:
            self._check_thread.submit(self._check, self._checked)
        except RuntimeError as error:
            logger.warning("the health checks cannot run now: %s", error)
            self._checking, self._finding = _Checking.DONE, None

    def admit(self, cycle: int, answer: Callable[[Cause | None], None]) -> None:
        """Call `answer` with why this node must not join, or None; only the last caller's."""
        self._joining = (cycle, answer)
        self.prepare()
        self._answer()

    def _checked(self, results: list[HealthResult] | None) -> None:
        if self._checking is not _Checking.RUNNING:
            return
        found = results or []
        self._checking, self._finding = _Checking.DONE, unfit(found, self._settings.host)
        self._chronicle.node_checked(found)
        self._answer()

    def _answer(self) -> None:
        if self._checking is not _Checking.DONE or self._joining is None:
            return
        (cycle, answer), self._joining = self._joining, None
        self._checking = _Checking.NOT_BEGUN
        answer(self._finding or self._settings.injected(cycle))

    # Before the workers start ----------------------------------------------------------------

    def cycle_failed(self, cause: Cause, lived_s: float, *, has_stepped: bool) -> None:
        """Take note of how a cycle ended: the next start may have to wait."""
        self._crashes = crashes_after(self._crashes, cause, lived_s, has_stepped=has_stepped)
        pause_s = delay_s(self._crashes, self._settings.backoff_limit_s)
        self._not_before = self._clock.monotonic() + pause_s
        if pause_s > 0:
            logger.warning(
                "%d cycles in a row failed within %g s and without a step: "
                "the next one waits %g s before it starts",
                self._crashes,
                SHORT_CYCLE_S,
                pause_s,
            )

    def workers_gone(self) -> None:
        """Begin to wait for the GPU memory of workers that were stopped."""
        rules = self._settings.memory
        if rules.timeout_s <= 0 or self._reclaiming:
            return
        self._reclaiming = True

        def wait() -> float | None:
            return wait_for_memory(self._memory, rules, self._clock, self._stopped)

        try:
            self._memory_thread.submit(wait, self._reclaimed)
        except RuntimeError as error:
            logger.warning("the restart does not wait for GPU memory: %s", error)
            self._reclaiming = False

    def _reclaimed(self, seconds: float | None) -> None:
        self._reclaiming = False
        if seconds is not None:
            self._chronicle.memory_reclaimed(seconds)
        self._let_start()

    def start(self, begin: Callable[[], None]) -> None:
        """Call `begin` when workers may start."""
        self._starting = begin
        self._let_start()

    def _let_start(self) -> None:
        if self._starting is None or self._reclaiming:
            return
        if self._clock.monotonic() < self._not_before:
            self._cancel_pause()
            self._pause = self._loop.call_at(self._not_before, self._let_start)
            return
        begin, self._starting = self._starting, None
        begin()

    def shut(self) -> None:
        """Forget who wants to start: there is another decision by now."""
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
            self._loop.unwatch(thread.fileno())
            thread.close(CLOSE_WAIT_S)


def make_gate(  # noqa: PLR0913 - named, and each of them a fact of its own
    plan: LaunchPlan,
    environ: Mapping[str, str],
    *,
    host: str,
    infra_rank: int,
    loop: EventLoop,
    clock: Clock,
    chronicle: Chronicle,
) -> NodeGate:
    """Return the gate of a launch."""
    config: FaultToleranceConfig = plan.fault_tolerance
    is_alone = plan.max_nodes == 1

    def injected(cycle: int) -> Cause | None:
        # With many nodes only the rendezvous knows which round it is: see `store_rendezvous.py`.
        return injected_failure(cycle, max(0, infra_rank), host, environ) if is_alone else None

    settings = GateSettings(
        host=host,
        backoff_limit_s=config.restart_backoff,
        memory=MemoryRules(
            config.gpu_memory_reclaim_timeout,
            config.gpu_memory_tolerance_mb,
            config.gpu_memory_poll_interval,
        ),
        injected=injected,
    )
    return NodeGate(
        settings,
        NodeChecks(config, plan.node_health_check_endpoint, environ).run,
        GpuMemory(plan.nproc_per_node, environ),
        loop=loop,
        clock=clock,
        chronicle=chronicle,
    )
