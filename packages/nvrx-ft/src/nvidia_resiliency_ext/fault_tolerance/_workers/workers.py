# SPDX-License-Identifier: Apache-2.0
"""The workers of a cycle: start, exits, and the stop of each: ask, then force, then give up.

Each worker has its own deadline: one that ignores SIGTERM delays no other, and one that survives
SIGKILL (state D) is given up after a bound. Each leads a session and a process group of its own and
dies with the launcher, whether it comes from a prewarmed worker or from a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import Child, ExitStatus, start_child
from nvidia_resiliency_ext.shared_utils.clock import Clock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, Timer

from .output import Stream, Target, Tee, WorkerOutput, open_target

KILL_BOUND_S = 10.0


class Stage(enum.Enum):
    """How far the stop of one worker has gone."""

    ASKED = "asked"
    KILLED = "killed"
    GIVEN_UP = "given_up"


Send: TypeAlias = tuple[int, tuple[int, ...]]
"""A local rank, and the signals that its group gets, in this order."""


class Stopping:
    """The stop of a cycle's workers: who gets which signal when. It signals nobody itself."""

    def __init__(self) -> None:
        # By local rank: the stage, and when the next one is due (monotonic s).
        self._stops: dict[int, tuple[Stage, float]] = {}

    @property
    def due(self) -> float | None:
        """When `advance` has something to do next, or None."""
        times = (due for stage, due in self._stops.values() if stage is not Stage.GIVEN_UP)
        return min(times, default=None)

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return len(self.given_up) == len(self._stops)

    @property
    def given_up(self) -> tuple[int, ...]:
        """The local ranks that survived SIGKILL."""
        return tuple(r for r, (stage, _) in self._stops.items() if stage is Stage.GIVEN_UP)

    def begin(self, ranks: Iterable[int], signum: int, grace_s: float, now: float) -> list[Send]:
        """Ask every worker to end. SIGCONT goes first: a stopped process handles no SIGTERM.

        A stop that is under way already is never made longer or taken back.
        """
        sends: list[Send] = []
        for rank in ranks:
            stage, due = self._stops.get(rank, (Stage.ASKED, math.inf))
            if stage is Stage.ASKED:
                self._stops[rank] = stage, min(due, now + grace_s)
                sends.append((rank, (signal.SIGCONT, signum)))
        return sends

    def force(self, now: float) -> list[Send]:
        """Kill everybody that is still there, now."""
        for rank, (stage, _) in self._stops.items():
            if stage is Stage.ASKED:
                self._stops[rank] = stage, now
        return self.advance(now)

    def exited(self, local_rank: int) -> None:
        """Take a worker off the list that is gone."""
        self._stops.pop(local_rank, None)

    def advance(self, now: float) -> list[Send]:
        """Go one stage further for each worker whose time is up."""
        sends: list[Send] = []
        for rank, (stage, due) in self._stops.items():
            if due <= now and stage is Stage.ASKED:
                self._stops[rank] = Stage.KILLED, now + KILL_BOUND_S
                sends.append((rank, (signal.SIGKILL,)))
            elif due <= now:
                self._stops[rank] = Stage.GIVEN_UP, due
        return sends


logger = logging.getLogger("nvrx")

STILL_IMPORTING = "its standby was still importing"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What one worker is to be: its command, whole environment and streams."""

    local_rank: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    output: WorkerOutput
    line_prefix: str


@dataclass(frozen=True, slots=True)
class Started:
    """A process that is now a worker, and how it was started.

    One that had not finished its imports is no warm start, though its worker gains time: then
    `cold_reason` is `STILL_IMPORTING`.
    """

    child: Child
    warm: bool
    cold_reason: str | None = None
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
        child = start_child(
            spec.argv,
            env=spec.env,
            stdout=stdout_fd,
            stderr=stderr_fd,
            new_session=True,
            die_with_parent=self._die_with_parent,
        )
        return Started(child, warm=False)

    def start_again(
        self, spec: WorkerSpec, stdout_fd: int | None, stderr_fd: int | None, _reason: str
    ) -> Started:
        """Start a worker anew whose process never became one."""
        return self.start(spec, stdout_fd, stderr_fd)


@dataclass(eq=False)
class WorkerGroup:
    """The workers of one cycle on one event loop; restarted cycle after cycle.

    `exited` is called with (local rank, exit status) once per worker, `stopped` with the local
    ranks given up, once per `stop`, `started_again` with a local rank whose worker had to be
    started anew.
    """

    loop: EventLoop
    clock: Clock
    tee: Tee
    _: KW_ONLY
    exited: Callable[[int, ExitStatus], None]
    stopped: Callable[[tuple[int, ...]], None]
    started_again: Callable[[int], None]
    reports_leftovers: bool = False

    def __post_init__(self) -> None:
        self._starter = Starter()
        self._specs: dict[int, WorkerSpec] = {}
        self._started: dict[int, Started] = {}
        self._running: set[int] = set()
        self._stopping: Stopping | None = None
        self._timer: Timer | None = None

    @property
    def started(self) -> Mapping[int, Started]:
        """All workers of this cycle by local rank, those that exited too."""
        return self._started

    @property
    def running_pids(self) -> list[int]:
        """Process ids of the workers that have not exited."""
        return [self._started[rank].child.pid for rank in sorted(self._running)]

    def start(self, specs: Sequence[WorkerSpec], starter: Starter) -> None:
        """Start one worker per spec."""
        self._forget()
        self._starter = starter
        starter.begin()
        for spec in specs:
            with contextlib.ExitStack() as opened:
                stdout_fd, stderr_fd = _open_streams(opened, spec)
                self._add(spec, starter.start(spec, stdout_fd, stderr_fd))
            self._follow(spec)
        starter.done()

    def _add(self, spec: WorkerSpec, started: Started) -> None:
        rank = spec.local_rank
        self._specs[rank] = spec
        self._started[rank] = started
        self._running.add(rank)
        self.loop.watch(started.child.fileno(), lambda: self._exited(rank))

    def _start_again(self, local_rank: int, reason: str) -> bool:
        """Start a worker whose prewarmed process failed; return False if that cannot be done."""
        spec = self._specs[local_rank]
        try:
            with contextlib.ExitStack() as opened:
                stdout_fd, stderr_fd = _open_streams(opened, spec)
                started = self._starter.start_again(spec, stdout_fd, stderr_fd, reason)
        except (NvrxError, OSError) as error:
            logger.error("worker %d cannot be started: %s", local_rank, error)  # noqa: TRY400
            return False
        self._started[local_rank].child.close()
        self._add(spec, started)
        self.started_again(local_rank)
        return True

    def _follow(self, spec: WorkerSpec) -> None:
        pairs = ((Stream.STDOUT, spec.output.stdout), (Stream.STDERR, spec.output.stderr))
        for stream, target in pairs:
            if target.path is None:
                continue
            if target.tee:
                self.tee.follow(target.path, spec.line_prefix, stream)
            if target.filter is not None:
                self.tee.filter(target.path, spec.line_prefix, target.filter)

    def _exited(self, local_rank: int) -> None:
        child = self._started[local_rank].child
        status = child.poll()
        if status is None:
            return
        self.loop.unwatch(child.fileno())
        is_stopped = self._stopping is not None
        reason = self._starter.never_began(local_rank, is_stopped=is_stopped)
        if reason is not None and not is_stopped and self._start_again(local_rank, reason):
            return
        self._running.discard(local_rank)
        if self._stopping is not None:
            self._stopping.exited(local_rank)
        self.exited(local_rank, status)
        self._check_stopped()

    def reap_exited(self) -> None:
        """Handle every exit that has happened by now: they belong to one fault."""
        for rank in sorted(self._running):
            self._exited(rank)

    def stop(self, signum: int, grace_s: float) -> None:
        """Ask all workers to end with `signum`; each has `grace_s` seconds before SIGKILL."""
        self._stopping = self._stopping or Stopping()
        now = self.clock.monotonic()
        self._send(self._stopping.begin(sorted(self._running), signum, grace_s, now))
        self._check_stopped()

    def kill(self) -> None:
        """SIGKILL all workers that are left."""
        if self._stopping is None:
            self.stop(signal.SIGKILL, 0.0)
        else:
            self._send(self._stopping.force(self.clock.monotonic()))
            self._rearm()

    def _send(self, sends: Iterable[Send]) -> None:
        for local_rank, signums in sends:
            for signum in signums:
                self._started[local_rank].child.signal_group(signum)

    def _advance(self) -> None:
        assert self._stopping is not None
        sends = self._stopping.advance(self.clock.monotonic())
        for local_rank, _ in sends:
            pid = self._started[local_rank].child.pid
            logger.warning("worker %d (pid %d) did not end in time: SIGKILL", local_rank, pid)
        self._send(sends)
        self._check_stopped()

    def _check_stopped(self) -> None:
        stopping = self._stopping
        if stopping is None or not stopping.is_over:
            self._rearm()
            return
        self._stopping = None
        self._rearm()
        if self.reports_leftovers:
            self._report_leftovers()
        for started in self._started.values():
            # Children that a worker left in its group would hold its memory and devices.
            started.child.signal_group(signal.SIGKILL)
        self.tee.end_cycle()
        self.stopped(stopping.given_up)

    def _report_leftovers(self) -> None:
        groups = [started.child.pid for started in self._started.values()]
        for stat in procfs.running_in_groups(groups):
            text = "process %d (%s, state %s) was left in worker group %d"
            logger.warning(text, stat.pid, stat.comm, stat.state, stat.pgid)

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._stopping.due if self._stopping is not None else None
        if due is not None:
            self._timer = self.loop.call_at(due, self._advance)

    def _forget(self) -> None:
        for started in self._started.values():
            self.loop.unwatch(started.child.fileno())
            started.child.close()
        self._started.clear()
        self._running.clear()

    def close(self) -> None:
        """SIGKILL and reap whatever is left, leftovers in the groups included."""
        for started in self._started.values():
            started.child.signal_group(signal.SIGKILL)
        self._forget()
        self._stopping = None
        self._rearm()
        self.tee.finish()


def _open_streams(opened: contextlib.ExitStack, spec: WorkerSpec) -> tuple[int | None, int | None]:
    """Open the files of stdout and stderr for the time of the context."""

    def open_one(target: Target) -> int | None:
        fd = open_target(target)
        if fd is not None:
            opened.callback(os.close, fd)
        return fd

    stdout, stderr = spec.output.stdout, spec.output.stderr
    stdout_fd = open_one(stdout)
    # Both streams of a piped worker share one pipe, or their lines would not be in order.
    is_shared = stdout.open_pipe is not None and stdout == stderr
    return stdout_fd, stdout_fd if is_shared else open_one(stderr)
