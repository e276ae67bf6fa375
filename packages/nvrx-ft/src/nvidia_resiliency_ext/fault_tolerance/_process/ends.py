# SPDX-License-Identifier: Apache-2.0
"""Waiting for processes and ending the ones that a worker left in its process group."""

import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Protocol

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError

__all__ = [
    "SettableEvent",
    "is_process_alive",
    "terminate_mp_processes",
    "wait_for_mp_events",
    "wait_until_process_terminated",
]

_TRACKER_GRACE_S = 1.0
_LOOK_AGAIN_S = 3600.0
_CLEANERS = (b"multiprocessing.resource_tracker", b"loky.backend.resource_tracker")


class SettableEvent(Protocol):
    """The part of `multiprocessing.Event` that is waited on."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until set; return whether it is."""
        ...


def is_process_alive(pid: int) -> bool:
    """Return whether the process exists and is more than a zombie."""
    return procfs.is_running(pid)


def wait_until_process_terminated(pid: int, timeout: float = 0) -> None:
    """Wait until a process has ended, reaped or not.

    Args:
        pid: The process; one that does not exist has ended.
        timeout: How long to wait (s); 0 waits for ever.

    Raises:
        DeadlineExceededError: It runs still; it is a `TimeoutError`.

    Example:
        >>> wait_until_process_terminated(2**22 + 1, timeout=5)
    """
    from nvidia_resiliency_ext.shared_utils.children import PidHandle

    try:
        handle = PidHandle(pid)
    except ProcessLookupError:
        return
    with handle:
        while not handle.wait(timeout or _LOOK_AGAIN_S):
            if timeout:
                raise DeadlineExceededError(f"process {pid} has not ended within {timeout} s")


def wait_for_mp_events(events: Iterable[SettableEvent], timeout: float = 60) -> None:
    """Wait until every event is set, `timeout` seconds in all.

    Raises:
        DeadlineExceededError: some are not set in time; it is a `TimeoutError`.
    """
    deadline = time.monotonic() + timeout
    all_events = list(events)
    unset = [
        index
        for index, event in enumerate(all_events)
        if not event.wait(max(0.0, deadline - time.monotonic()))
    ]
    if unset:
        raise DeadlineExceededError(
            f"{len(unset)} of {len(all_events)} events were not set within {timeout} s: {unset}"
        )


def terminate_mp_processes(
    allowed_pgids: Collection[int], allowed_ppids: Collection[int] | None = None
) -> None:
    """Kill what is left in the process groups of workers that are gone.

    This process, its ancestors and its own process group are never touched. A resource tracker of
    multiprocessing removes its program's shared memory once it is alone, so it is given a moment.

    Args:
        allowed_pgids: groups whose members may be killed.
        allowed_ppids: if given, only children of these processes are.
    """
    from nvidia_resiliency_ext.shared_utils.children import PidHandle

    protected = _own_line()
    with ExitStack() as handles:
        trackers: list[PidHandle] = []
        for stat in procfs.running_in_groups(set(allowed_pgids) - {os.getpgrp()}):
            if stat.pid in protected:
                continue
            if allowed_ppids is not None and stat.ppid not in allowed_ppids:
                continue
            try:
                handle = handles.enter_context(PidHandle(stat.pid, stat.start_ticks))
            except ProcessLookupError:
                continue
            if any(name in procfs.cmdline(stat.pid) for name in _CLEANERS):
                trackers.append(handle)
            else:
                handle.signal(signal.SIGKILL)
        deadline = time.monotonic() + _TRACKER_GRACE_S
        for handle in trackers:
            if not handle.wait(max(0.0, deadline - time.monotonic())):
                handle.signal(signal.SIGKILL)


def _own_line() -> set[int]:
    """Return this process and its ancestors."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = procfs.read_stat(pid)
        pid = 0 if stat is None else stat.ppid
    return line
