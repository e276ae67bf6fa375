# SPDX-License-Identifier: Apache-2.0
"""Waiting for processes, ending and listing them, and replacing a method for a while."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn, Protocol, TypedDict

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.errors import DeadlineExceededError

logger = logging.getLogger("nvrx")

# The stack, the printf FIFO and the malloc heap: CUlimit values of the driver's stable interface.
_CUDA_LIMITS: Final = (0, 1, 2)


def reduce_cuda_ctx_size() -> None:
    """Lower the device memory limits of the calling thread's CUDA context.

    Without a driver, or without a context in this thread, nothing happens; none is created.
    """
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
        return
    for limit in _CUDA_LIMITS:
        # The driver rounds a byte up to what it needs at least.
        status = driver.cuCtxSetLimit(ctypes.c_int(limit), ctypes.c_size_t(1))
        if status != 0:
            logger.debug("cuCtxSetLimit(%d) answered %d", limit, status)


@contextmanager
def patched_method(obj: Any, name: str, new: Any) -> Iterator[None]:
    """Let `obj.name` be `new` inside the block, and what it was before afterwards.

    An attribute that `obj` only inherits is not written onto it for good.

    Raises:
        AttributeError: there is no such attribute.
    """
    getattr(obj, name)
    own = vars(obj)
    is_own = name in own
    before = own.get(name)
    setattr(obj, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(obj, name, before)
        else:
            delattr(obj, name)


_TRACKER_GRACE_S = 1.0
_LOOK_AGAIN_S = 3600.0
_CLEANERS = (b"multiprocessing.resource_tracker", b"loky.backend.resource_tracker")


class SettableEvent(Protocol):
    """The part of `multiprocessing.Event` that is waited on."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until set; return whether it is."""
        ...


def is_process_alive(pid: int) -> bool:
    """Return whether the process `pid` exists and is no zombie."""
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
    """Wait until all `events` are set, for `timeout` seconds together.

    Raises:
        DeadlineExceededError: An event is not set in time; this is a `TimeoutError`.
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
    """Kill the remaining processes in the process groups of ended workers.

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
    line: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        stat = procfs.read_stat(pid)
        pid = 0 if stat is None else stat.ppid
    return line


_STATUS_WORDS: Final = {
    "R": "running", "S": "sleeping", "D": "disk-sleep", "T": "stopped", "t": "tracing-stop",
    "Z": "zombie", "X": "dead", "x": "dead", "K": "wake-kill", "W": "waking", "I": "idle",
    "P": "parked",
}  # fmt: skip


class ProcessEntry(TypedDict):
    """One process; `status` in the words that psutil uses."""

    pid: int
    ppid: int
    pgid: int
    name: str
    cmdline: list[str]
    status: str


def get_processes_by_pgids(
    pgids: Collection[int], exclude_launcher: bool = True
) -> list[ProcessEntry]:
    """Return all processes of the groups `pgids`, zombies included, ordered by pid.

    The calling process is left out unless `exclude_launcher` is false.
    """
    wanted = frozenset(pgids)
    excluded = os.getpid() if exclude_launcher else -1
    entries: list[ProcessEntry] = []
    for pid in sorted(procfs.pids()):
        stat = procfs.read_stat(pid) if pid != excluded else None
        if stat is None or stat.pgid not in wanted:
            continue
        arguments = procfs.cmdline(pid).rstrip(b"\0").split(b"\0")
        entries.append(
            ProcessEntry(
                pid=pid,
                ppid=stat.ppid,
                pgid=stat.pgid,
                name=stat.comm,
                cmdline=[os.fsdecode(argument) for argument in arguments if arguments != [b""]],
                status=_STATUS_WORDS.get(stat.state, stat.state),
            )
        )
    return entries


def end_program(code: int, *, is_own: bool) -> NoReturn:
    """End the program; one that is not `is_own` by SystemExit: its caller has things to do.

    A thread that comes back from torch while the interpreter is taken down aborts the process
    (SIGABRT): where threads are left only what programs ask for at their end is done.
    """
    if is_own and any(thread.daemon for thread in threading.enumerate()):
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as the interpreter
        atexit._run_exitfuncs()  # noqa: SLF001
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
