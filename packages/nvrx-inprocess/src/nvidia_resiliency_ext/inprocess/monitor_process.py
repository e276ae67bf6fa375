# SPDX-License-Identifier: Apache-2.0
"""The monitor as one rank sees it, and helpers for processes; the monitor itself is `_monitor`.

One monitor serves all ranks of a node. Nothing forks: what runs beside a rank is started by exec.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil

from nvidia_resiliency_ext.inprocess._monitor import messages, start
from nvidia_resiliency_ext.inprocess._monitor.client import MonitorLink
from nvidia_resiliency_ext.inprocess._monitor.messages import Decided, Event, MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.page import Phase, ProgressPage
from nvidia_resiliency_ext.inprocess.attribution import InterruptionRecord
from nvidia_resiliency_ext.inprocess.progress_watchdog import Timestamp
from nvidia_resiliency_ext.shared_utils.children import PidHandle

__all__ = ["MonitorProcess", "daemonize_fn", "is_process_active", "terminate_process"]

_KILL_AGAIN_S = 1.0
_KILL_TIMES = 30


def is_process_active(process: psutil.Process) -> bool:
    """Return whether `process` runs and is more than a zombie.

    Example:
        >>> is_process_active(psutil.Process())
        True
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def terminate_process(
    process: psutil.Process, termination_grace_time: timedelta, log: logging.Logger
) -> None:
    """End a process: SIGCONT and SIGTERM, after the grace SIGKILL, too, until it is gone.

    Args:
        process: The process; another one that has its number by now gets no signal.
        termination_grace_time: From SIGTERM to SIGKILL.
        log: Gets a line for each signal that is sent.
    """
    if not is_process_active(process):
        return
    try:
        handle = PidHandle(process.pid)
    except ProcessLookupError:
        return
    with handle:
        if not is_process_active(process):
            return
        _send(handle, (signal.SIGCONT, signal.SIGTERM), log)
        if handle.wait(termination_grace_time.total_seconds()):
            return
        for _ in range(_KILL_TIMES):
            _send(handle, (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL), log)
            if handle.wait(_KILL_AGAIN_S):
                return
        log.error("process %d does not end after SIGKILL", process.pid)


def daemonize_fn(
    fn: Callable[..., object],
    fn_args: Sequence[object] = (),
    fn_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Call a function in a detached process, and do not wait for it.

    The process has a session of its own, `/` as its directory, the null device as its streams,
    and nothing of ours but the environment.

    Args:
        fn: Can be imported by its name.
        fn_args: Plain values, timedeltas or paths.
        fn_kwargs: Likewise.

    Raises:
        TypeError: The function has no name, or an argument is none of these.
        InternalError: The process cannot be started.
    """
    order = {
        "call": messages.name_of(fn, "fn"),
        "args": messages.dump_kwargs({"args": list(fn_args)}, "fn_args"),
        "kwargs": messages.dump_kwargs(fn_kwargs or {}, "fn_kwargs"),
    }
    start.run_detached(order)


class MonitorProcess:
    """One rank's use of the monitor.

    Args:
        rank, world_size: Initial rank and number of ranks.
        soft_timeout, hard_timeout: Age of a stamp to ask for a restart, and to kill the process.
        termination_grace_time: From SIGTERM to SIGKILL.
        barrier_timeout: Limit for who waits for the others.
        interval: How often stamps are looked at.
        heartbeat_interval: How often the node's lease is renewed.
        heartbeat_timeout: Age at which a node counts as lost.
        log_filename, pid_filename: Absolute path or None.
        store_factory, store_kwargs: What makes the store, importable by name, and plain arguments.
        prefix: Before every key of the call.
        hear: Called, in another thread, with each event.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a signature that is given
        self,
        rank: int,
        world_size: int,
        soft_timeout: timedelta,
        hard_timeout: timedelta,
        termination_grace_time: timedelta,
        barrier_timeout: timedelta,
        interval: timedelta,
        heartbeat_interval: timedelta,
        heartbeat_timeout: timedelta,
        log_filename: str | None,
        pid_filename: str | None,
        store_factory: Callable[..., Any],
        store_kwargs: Mapping[str, Any] | None,
        prefix: str = "nvrx/",
        hear: Callable[[Event], None] | None = None,
    ) -> None:
        name, file = messages.name_of(store_factory)
        settings = MonitorSettings(
            prefix=prefix,
            store_factory=name,
            store_file=file,
            store_kwargs=messages.dump_kwargs(store_kwargs or {}),
            log_file=log_filename or "",
            pid_file=pid_filename or "",
            interval_s=interval.total_seconds(),
            heartbeat_interval_s=heartbeat_interval.total_seconds(),
            heartbeat_timeout_s=heartbeat_timeout.total_seconds(),
            soft_timeout_s=soft_timeout.total_seconds(),
            hard_timeout_s=hard_timeout.total_seconds(),
            barrier_timeout_s=barrier_timeout.total_seconds(),
            termination_grace_s=termination_grace_time.total_seconds(),
        )
        self._rank = rank
        self._world_size = world_size
        self._participants = frozenset(range(world_size))
        self._listener = hear
        self._page = ProgressPage.create()
        self._link = MonitorLink(settings, self._page, self._on_event)

    def start(self) -> None:
        """Start the monitor of this node, unless it runs."""
        start.ensure_started()

    def can_create_store(self) -> None:
        """Let the monitor connect to the store: it is there now."""
        self._link.attach(self._rank, self._world_size)

    def start_iteration(self, rank: int, world_size: int, iteration: int) -> None:
        """Begin `iteration` with fresh stamps, as `rank` among `world_size` ranks."""
        self._page.rearm()
        self._page.phase = Phase.GUARDED
        self._link.begin(iteration, rank, world_size, self._participants)

    def send_timestamp(self, timestamp: Timestamp | None = None) -> None:
        """Report progress at `timestamp`, now by default, as a `ProgressWatchdog` does."""
        if timestamp is None:
            self._page.stamp_auto()
        else:
            self._page.stamp(timestamp.auto, timestamp.manual)

    def record_interrupted(self, records: Iterable[InterruptionRecord]) -> None:
        """Report the interruptions of this rank that `records` hold."""
        for record in records:
            self._link.report(record.interruption)

    def disable_sibling_monitor(self) -> None:
        """Do nothing: nodes watch each other, and no rank can be watched by mistake."""

    def disable_timeouts(self) -> None:
        """Open a block without timeouts."""
        self._page.disable_timeouts()

    def enable_timeouts(self) -> None:
        """Close the block without timeouts."""
        self._page.enable_timeouts()

    def shutdown(self) -> None:
        """Leave the call."""
        self._page.phase = Phase.IDLE
        self._link.leave(is_lost=False)
        self._link.close()
        self._page.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Decided):
            self._participants = event.decision.going_on
        if self._listener is not None:
            self._listener(event)


def _send(handle: PidHandle, signals: tuple[signal.Signals, ...], log: logging.Logger) -> None:
    log.info("sending %s to %d", ", ".join(each.name for each in signals), handle.pid)
    for each in signals:
        handle.signal(each)
