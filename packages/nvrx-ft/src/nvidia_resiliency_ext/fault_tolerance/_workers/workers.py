# SPDX-License-Identifier: Apache-2.0
"""The workers of a cycle: start, exits, and the stop of each: ask, then force, then give up.

Each worker has its own deadline: one that ignores SIGTERM delays no other, and one that survives
SIGKILL (state D) is given up after a bound. Each leads a session and a process group of its own.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import Child, ExitStatus, start_child
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, Timer

from .output import Stream, Tee, WorkerOutput, open_target

KILL_BOUND_S = 10.0


class Stage(enum.Enum):
    """How far the stop of a worker that has not exited has gone."""

    RUNNING = "running"
    KILLED = "killed"
    GIVEN_UP = "given_up"


logger = logging.getLogger("nvrx")

STILL_IMPORTING = "its standby was still importing"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Command, whole environment and streams of one worker to be started."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    output: WorkerOutput
    line_prefix: str


@dataclass(frozen=True, slots=True)
class Started:
    """A process that is now a worker, and how it was started."""

    child: Child
    warm: bool
    cold_reason: str | None = None  # `STILL_IMPORTING`: it gains time and is no warm start.
    saved_s: float = 0.0


class Starter:
    """Starts a fresh process for each worker; the kernel ends it with the launcher if asked to."""

    def __init__(self, *, die_with_parent: bool = True) -> None:
        self._die_with_parent = die_with_parent

    def begin(self) -> None:
        """Record that the workers of a cycle are about to start."""

    def done(self) -> None:
        """Record that all of them are started."""

    def never_began(self, _local_rank: int, *, is_stopped: bool) -> str | None:  # noqa: ARG002
        """Return why an exited process never became a worker, or None if it was one."""
        return None

    def start(self, spec: WorkerSpec, stdout_fd: int | None, stderr_fd: int | None) -> Started:
        """Start one worker; the descriptors replace inherited streams and stay the caller's."""
        return self.start_cold(spec, stdout_fd, stderr_fd, None)

    def start_cold(
        self, spec: WorkerSpec, stdout_fd: int | None, stderr_fd: int | None, reason: str | None
    ) -> Started:
        """Start a fresh process for a worker; `reason` says why it comes from no prewarmed one."""
        child = start_child(
            spec.argv,
            env=spec.env,
            stdout=stdout_fd,
            stderr=stderr_fd,
            new_session=True,
            die_with_parent=self._die_with_parent,
        )
        return Started(child, warm=False, cold_reason=reason)


@dataclass(eq=False)
class WorkerGroup:
    """The workers of one cycle on one event loop; restarted cycle after cycle."""

    loop: EventLoop
    clock: Clock
    tee: Tee
    _: KW_ONLY
    exited: Callable[[int, ExitStatus], None]  # Called once per worker, with its local rank.
    stopped: Callable[[tuple[int, ...]], None]  # Once per stop, with the ranks given up.
    started_again: Callable[[int], None]
    reports_leftovers: bool = False

    def __post_init__(self) -> None:
        self.started: dict[int, Started] = {}  # By local rank, those that exited too.
        self._specs: dict[int, WorkerSpec] = {}
        self._starter = Starter()
        # Those that have not exited, with when the next stage of their stop is due (monotonic s).
        self._running: dict[int, tuple[Stage, float]] = {}
        self._is_stopping = False
        self._timer: Timer | None = None

    @property
    def running_pids(self) -> list[int]:
        return [self.started[rank].child.pid for rank in sorted(self._running)]

    def start(self, specs: Sequence[WorkerSpec], starter: Starter) -> None:
        self._forget()
        self._starter = starter
        starter.begin()
        for spec in specs:
            with _opened_streams(spec) as (stdout_fd, stderr_fd):
                self._add(spec, starter.start(spec, stdout_fd, stderr_fd))
            self.tee.follow(spec.output.stdout, spec.line_prefix, Stream.STDOUT)
            self.tee.follow(spec.output.stderr, spec.line_prefix, Stream.STDERR)
        starter.done()

    def _add(self, spec: WorkerSpec, started: Started) -> None:
        rank = spec.local_rank
        self._specs[rank] = spec
        self.started[rank] = started
        self._running[rank] = Stage.RUNNING, math.inf
        self.loop.watch(started.child.fileno(), lambda: self._exited(rank))

    def _start_again(self, local_rank: int, reason: str) -> bool:
        """Start a worker whose prewarmed process failed; return False if that cannot be done."""
        spec = self._specs[local_rank]
        try:
            with _opened_streams(spec) as (stdout_fd, stderr_fd):
                logger.info(
                    "worker %d starts again, cold: its standby failed: %s", spec.rank, reason
                )
                started = self._starter.start_cold(spec, stdout_fd, stderr_fd, reason)
        except (NvrxError, OSError) as error:
            logger.error("worker %d cannot be started: %s", local_rank, error)  # noqa: TRY400
            return False
        self.started[local_rank].child.close()
        self._add(spec, started)
        self.started_again(local_rank)
        return True

    def _exited(self, local_rank: int) -> None:
        child = self.started[local_rank].child
        status = child.poll()
        if status is None:
            return
        self.loop.unwatch(child.fileno())
        reason = self._starter.never_began(local_rank, is_stopped=self._is_stopping)
        if reason is not None and not self._is_stopping and self._start_again(local_rank, reason):
            return
        self._running.pop(local_rank, None)
        self.exited(local_rank, status)
        self._check_stopped()

    def reap_exited(self) -> None:
        """Handle every exit that has happened by now: they belong to one fault."""
        for rank in sorted(self._running):
            self._exited(rank)

    def stop(self, signum: int, grace_s: float) -> None:
        """Ask all workers to end with `signum`; each has `grace_s` seconds before SIGKILL.

        A stop that is under way already is never made longer or taken back.
        """
        if not self._is_stopping:
            # Who was given up in a stop before this one is asked again.
            self._running = dict.fromkeys(sorted(self._running), (Stage.RUNNING, math.inf))
            self._is_stopping = True
        now = self.clock.monotonic()
        for rank, (stage, due) in self._running.items():
            if stage is Stage.RUNNING:
                self._running[rank] = stage, min(due, now + grace_s)
                # A stopped process handles no SIGTERM.
                self.started[rank].child.signal_group(signal.SIGCONT)
                self.started[rank].child.signal_group(signum)
        self._check_stopped()

    def kill(self) -> None:
        if not self._is_stopping:
            self.stop(signal.SIGKILL, 0.0)
            return
        for rank, (stage, _) in self._running.items():
            if stage is Stage.RUNNING:
                self._kill(rank)
        self._rearm()

    def _kill(self, local_rank: int) -> None:
        self._running[local_rank] = Stage.KILLED, self.clock.monotonic() + KILL_BOUND_S
        self.started[local_rank].child.signal_group(signal.SIGKILL)

    def _advance(self) -> None:
        """Go one stage further for each worker whose time is up."""
        now = self.clock.monotonic()
        for rank, (stage, due) in self._running.items():
            if due <= now and stage is Stage.RUNNING:
                pid = self.started[rank].child.pid
                logger.warning("worker %d (pid %d) did not end in time: SIGKILL", rank, pid)
                self._kill(rank)
            elif due <= now:
                self._running[rank] = Stage.GIVEN_UP, math.inf
        self._check_stopped()

    def _check_stopped(self) -> None:
        given_up = [rank for rank, (stage, _) in self._running.items() if stage is Stage.GIVEN_UP]
        is_over = self._is_stopping and len(given_up) == len(self._running)
        if is_over:
            self._is_stopping = False
        self._rearm()
        if not is_over:
            return
        if self.reports_leftovers:
            self._report_leftovers()
        for started in self.started.values():
            # Children that a worker left in its group would hold its memory and devices.
            started.child.signal_group(signal.SIGKILL)
        self.tee.end_cycle()
        self.stopped(tuple(given_up))

    def _report_leftovers(self) -> None:
        groups = [started.child.pid for started in self.started.values()]
        for stat in procfs.running_in_groups(groups):
            text = "process %d (%s, state %s) was left in worker group %d"
            logger.warning(text, stat.pid, stat.comm, stat.state, stat.pgid)

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = min((due for _, due in self._running.values()), default=math.inf)
        if self._is_stopping and due < math.inf:
            self._timer = self.loop.call_at(due, self._advance)

    def _forget(self) -> None:
        for started in self.started.values():
            self.loop.unwatch(started.child.fileno())
            started.child.close()
        self.started.clear()
        self._running.clear()

    def close(self) -> None:
        """SIGKILL and reap all workers, with other processes in their groups."""
        for started in self.started.values():
            started.child.signal_group(signal.SIGKILL)
        self._forget()
        self._is_stopping = False
        self._rearm()


@contextlib.contextmanager
def _opened_streams(spec: WorkerSpec) -> Iterator[tuple[int | None, int | None]]:
    stdout, stderr = spec.output.stdout, spec.output.stderr
    # Both streams of a piped worker share one pipe, or their lines would not be in order.
    is_shared = stdout.open_pipe is not None and stdout == stderr
    with contextlib.ExitStack() as opened:
        fds: list[int | None] = []
        for target in (stdout,) if is_shared else (stdout, stderr):
            fds.append(fd := open_target(target))
            if fd is not None:
                opened.callback(os.close, fd)
        yield fds[0], fds[-1]
