# SPDX-License-Identifier: Apache-2.0
"""What a node can do about what happens, as `decide` asks for it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from .cause import Cause
from .leaving import AskToSave, ReleaseRanks, ReportHeld, StartGrace, TellPreempted
from .node_state import Assignment, Outcome


@dataclass(frozen=True, slots=True)
class Join:
    """Join the rendezvous of `cycle`."""

    cycle: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start the workers of this round."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Send `signum` to each worker's group; SIGKILL what is left after `grace_s`."""

    signum: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """SIGKILL every worker's group now."""


@dataclass(frozen=True, slots=True)
class ReportFault:
    """Write the fault to the log and the record."""

    cause: Cause
    outcome: Outcome
    restarts_left: int


@dataclass(frozen=True, slots=True)
class OpenNextRound:
    """Tell the other nodes that a restart begins, and why."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Tell everybody that there is no further round."""

    reason: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class ReportSuccess:
    """Tell the other nodes that all workers of this one ended well, and wait for theirs."""


@dataclass(frozen=True, slots=True)
class ReportBroken:
    """Tell the store host that workers of this node failed; it decides what follows."""

    cause: Cause
    all_gone: bool


@dataclass(frozen=True, slots=True)
class LeaveRendezvous:
    """Tell the other nodes that this one takes part no longer."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Finish:
    """Leave with this exit code; `no_restart` says why the job must not be started again."""

    exit_code: int
    reason: str
    no_restart: str = ""


Effect = (
    Join
    | StartWorkers
    | StopWorkers
    | KillWorkers
    | ReportFault
    | OpenNextRound
    | CloseRendezvous
    | ReportSuccess
    | ReportBroken
    | LeaveRendezvous
    | Finish
    | TellPreempted
    | StartGrace
    | AskToSave
    | ReportHeld
    | ReleaseRanks
)
