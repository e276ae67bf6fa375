# SPDX-License-Identifier: Apache-2.0
"""Owns the kinds of events and their fields; knows nothing of files.

Times end in ``_s`` (seconds). A field that is ``None`` is not written. Events that describe a
span (``Phase``, ``FirstStep``, ``Progress``, the checkpoint kinds) are recorded when the span ends:
it began ``dur_s`` (``window_s``, ``stall_s``) before the event's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar


class Event:
    """One thing that happened: immutable, compared by value.

    Equality and representation live here: generated for every kind they double the import time.
    """

    __slots__ = ()
    kind: ClassVar[str] = ""

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of this kind's fields, in the order of their definition."""
        bases = reversed(cls.__mro__)
        return tuple(name for base in bases for name in getattr(base, "__slots__", ()))

    def __eq__(self, other: object) -> bool:
        """Compare kind and fields."""
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.field_names())

    def __hash__(self) -> int:
        """Hash kind and fields (fields that hold lists cannot be hashed)."""
        return hash((self.kind, *(getattr(self, name) for name in self.field_names())))

    def __repr__(self) -> str:
        """Show the kind and the fields that have a value."""
        given = ((name, getattr(self, name)) for name in self.field_names())
        shown = ", ".join(f"{name}={value!r}" for name, value in given if value is not None)
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class JobStart(Event):
    """The launcher of a node starts.

    Args:
        argv_hash: Hash of the command line.
        nnodes: Number of nodes, or `MIN:MAX`.
        nproc: Workers per node.
        policy: Restart policy.
    """

    kind: ClassVar[str] = "job_start"
    argv_hash: str | None = None
    nnodes: int | str | None = None
    nproc: int | None = None
    policy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class JobEnd(Event):
    """The launcher of a node leaves.

    Args:
        result: `success`, or the reason.
        exit_code: Exit code of the launcher.
        restarts: Restarts of the job.
        is_over: True: this launcher has heard that the job ends on all nodes.
    """

    kind: ClassVar[str] = "job_end"
    result: str
    exit_code: int | None = None
    restarts: int | None = None
    is_over: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CycleStart(Event):
    """A cycle of workers begins on this node: the rendezvous is done and workers start.

    Args:
        world_size: Number of ranks of the job.
        nodes: Number or names of the nodes.
        reason: Why the cycle begins.
        clock_off_s: Seconds by which this node's wall clock is ahead of the others', if measured.
    """

    kind: ClassVar[str] = "cycle_start"
    world_size: int | None = None
    nodes: int | Sequence[str] | None = None
    reason: str | None = None
    clock_off_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CycleEnd(Event):
    """A cycle of workers is over on this node: none of them runs any more.

    Args:
        result: Result of the cycle.
    """

    kind: ClassVar[str] = "cycle_end"
    result: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WorkerStart(Event):
    """A worker process starts.

    Args:
        warm: Whether a standby worker became this worker.
        cold_reason: Reason for a cold start.
        saved_s: Seconds of start-up that the standby worker saved.
    """

    kind: ClassVar[str] = "worker_start"
    warm: bool | None = None
    cold_reason: str | None = None
    saved_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class WorkerExit(Event):
    """A worker process ended.

    Args:
        exit_code: Its exit code.
        signal: The signal that ended it.
    """

    kind: ClassVar[str] = "worker_exit"
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Fault(Event):
    """A fault was detected.

    Args:
        cause: Of a rank: killed, exited, exception, hang_section, hang_heartbeat, unhealthy, start.
            Of a node: node_lost, store_lost, drained, left. Of the job: shutdown, preempted,
            time_limit, attribution, join_timeout, opened, over.
        what: Object of the fault, such as the name of the section.
        detail: Further evidence; depends on the cause.
        detected_by: The program that detected it.
        deadline_s: The timeout that was exceeded, in seconds.
        late_s: Seconds from the earliest moment of detection (death, deadline) to this event.
    """

    kind: ClassVar[str] = "fault"
    cause: str
    what: str | None = None
    detail: str | None = None
    detected_by: str | None = None
    deadline_s: float | None = None
    late_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Phase(Event):
    """A part of a restart ended.

    Args:
        name: stop, reclaim, rendezvous or start.
        dur_s: Its duration in seconds.
    """

    kind: ClassVar[str] = "phase"
    name: str
    dur_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FirstStep(Event):
    """The first training step of a worker ended.

    Args:
        dur_s: Seconds since its `worker_start`.
    """

    kind: ClassVar[str] = "first_step"
    dur_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Progress(Event):
    """Training made progress.

    Args:
        iteration: The last iteration.
        steps: Steps in the window.
        window_s: Length of the window in seconds; it ends with this event.
    """

    kind: ClassVar[str] = "progress"
    iteration: int | None = None
    steps: int | None = None
    window_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TimeoutsSet(Event):
    """A timeout was set, for a section or a kind of heartbeat.

    Args:
        section: Name of the section.
        heartbeat: Kind of heartbeat.
        value_s: The timeout in seconds.
        calculated: Whether it was calculated from measured times.
    """

    kind: ClassVar[str] = "timeouts_set"
    section: str | None = None
    heartbeat: str | None = None
    value_s: float | None = None
    calculated: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class InprocRestart(Event):
    """Ranks restarted inside their processes.

    Args:
        call: Number of the wrapped call in the cycle.
        iteration: Restarts of that call before this one.
        cause: Description of the fault.
        ranks: Ranks that caused it.
        phases: Seconds of each phase, by name.
        kept_ranks: Ranks that continue.
        lost_ranks: Ranks that do not continue.
        hang: For a hang: text with the rank for which the others waited.
        culprits: For a hang: the ranks that are blamed.
    """

    kind: ClassVar[str] = "inproc_restart"
    call: int | None = None
    iteration: int | None = None
    cause: str | None = None
    ranks: Sequence[int] | str | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    kept_ranks: Sequence[int] | str | None = None
    lost_ranks: Sequence[int] | str | None = None
    hang: str | None = None
    culprits: Sequence[int] | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Checkpoint(Event):
    """Base of the checkpoint events.

    Args:
        id: Name of the checkpoint, the same on all ranks.
        iteration: The training iteration.
        bytes: Size on this rank.
        stall_s: Seconds that training stood still.
        write_s: Seconds of writing or reading.
        mode: How, such as `async` or `local`.
        replica: Which copy.
        result: `ok` only for a checkpoint that can be loaded.
        error: What went wrong.
    """

    id: str | None = None
    iteration: int | None = None
    bytes: int | None = None
    stall_s: float | None = None
    write_s: float | None = None
    mode: str | None = None
    replica: int | str | None = None
    result: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CkptSave(_Checkpoint):
    """A save ended; ``result`` is ``ok`` only when the checkpoint can be loaded."""

    kind: ClassVar[str] = "ckpt_save"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CkptLoad(_Checkpoint):
    """A load ended."""

    kind: ClassVar[str] = "ckpt_load"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CkptVerify(_Checkpoint):
    """A stored checkpoint was checked."""

    kind: ClassVar[str] = "ckpt_verify"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Health(Event):
    """A health check ended.

    Args:
        check: Name of the check.
        result: pass, fail or skipped.
        evidence: What was measured.
    """

    kind: ClassVar[str] = "health"
    check: str
    result: str
    evidence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Straggler(Event):
    """Ranks were found to be slower than the others.

    Args:
        ranks: The slow ranks.
        scores: Their scores.
        reason: Which comparison found them.
    """

    kind: ClassVar[str] = "straggler"
    ranks: Sequence[int] | str | None = None
    scores: Mapping[str, float] | Sequence[float] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Verdict(Event):
    """Attribution gave a verdict about a fault.

    Args:
        action: Recommended action.
        reason_code: Code of the cause.
        ranks: Ranks that are blamed.
        nodes: Nodes that are blamed.
        confidence: From 0 to 1.
    """

    kind: ClassVar[str] = "verdict"
    action: str
    reason_code: str | None = None
    ranks: Sequence[int] | str | None = None
    nodes: Sequence[str] | str | None = None
    confidence: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Standby(Event):
    """A standby worker changed its state.

    Args:
        slot: Local rank.
        state: The new state.
        seconds: Seconds that the transition took.
        private_mb: Private memory of the worker in MB.
    """

    kind: ClassVar[str] = "standby"
    slot: int
    state: str
    seconds: float | None = None
    private_mb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Dropped(Event):
    """Events are missing from the file here.

    Args:
        count: How many.
        bytes: Their size, if known.
        why: The reason.
    """

    kind: ClassVar[str] = "dropped"
    count: int
    bytes: int | None = None
    why: str | None = None
