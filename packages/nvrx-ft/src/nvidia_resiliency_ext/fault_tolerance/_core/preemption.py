# SPDX-License-Identifier: Apache-2.0
"""Announced preemption: deadlines, the call at which all ranks save, events, effects. Pure.

Every rank counts its calls and shows the count before it looks whether saving is asked for. Once
that is asked of a rank, it waits in its next call until the call is agreed. So the counts that are
read after it was asked of everybody are those of the last calls that any rank can have left: the
highest plus one is a call that all ranks still have before them, and no rank that waits is needed
by another one on the way to be read. A rank that has not called yet counts 0.

A node is preempted (`Preempted`: a signal, or its time is nearly over) and notifies the others. The
round then leaves (`RoundLeaves`, on every node): ranks are asked to save. A rank that asks
`should_checkpoint` from then on waits until all nodes have reported how far theirs are
(`RanksHeld`), and with that at which call all save (`SaveAgreed`). Then they leave. What follows is
the matter of the rendezvous: without the nodes that must go when enough others are there, else the
job is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance._env import SLURM_JOB_END_TIME
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from .cause import Cause


def agreed_call(calls: Iterable[int]) -> int:
    """Return the call at which all ranks save, from how often each has called."""
    return max(calls, default=0) + 1


def end_of_job(deadline: str | None, environ: Mapping[str, str], now: float) -> float | None:
    """Return when the job's time is over (unix s), or None when it has no end.

    Args:
        deadline: The option `preempt_deadline`.
        environ: The launcher's environment.
        now: The launcher's start (unix s).

    Raises:
        ConfigError: Slurm is to be asked, and gave no answer.
    """
    if deadline is None:
        return None
    if deadline.startswith("+"):
        return now + float(deadline)
    if deadline != "slurm":
        return float(deadline)
    try:
        return float(environ.get(SLURM_JOB_END_TIME, ""))
    except ValueError:
        raise ConfigError(
            f"--ft-preempt-deadline slurm: {SLURM_JOB_END_TIME} is"
            f" {environ.get(SLURM_JOB_END_TIME, 'not set')!r}; Slurm sets it from version 22.05 on,"
            " elsewhere give the time itself"
        ) from None


def announce_at(end: float, grace_s: float) -> float:
    """Return when ranks are asked to save and leave."""
    return end - grace_s


@dataclass(frozen=True, slots=True)
class Leaving:
    """Why this round's ranks save and leave; `is_own` when this node itself must go."""

    cause: Cause
    is_own: bool


# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preempted:
    """This node must go soon: a signal came, or its time is nearly over."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class RoundLeaves:
    """The ranks of all nodes are to save and leave."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class RanksHeld:
    """No rank of this node gets out of another call; the furthest has made `calls` of them."""

    calls: int


@dataclass(frozen=True, slots=True)
class SaveAgreed:
    """The ranks of all nodes save at their call number `at`."""

    at: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The time is over in which this node's ranks could save and leave."""


# Effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportPreempted:
    """Tell the other nodes that this one must go soon."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class StartGrace:
    """Let the time run in which ranks may save and leave."""


@dataclass(frozen=True, slots=True)
class AskToSave:
    """Pass the signal to workers that handle it, and hold ranks at `should_checkpoint`."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class ReportHeld:
    """Tell the other nodes how far the ranks of this one are."""

    calls: int


@dataclass(frozen=True, slots=True)
class ReleaseRanks:
    """Tell the ranks at which call they save."""

    at: int
