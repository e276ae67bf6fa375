# SPDX-License-Identifier: Apache-2.0
"""Announced preemption: what happens and what is done, for `decide.py`. Values only.

A node is told to go (`Preempted`: a signal, or its time is nearly over) and tells the others. The
round then leaves (`RoundLeaves`, on every node): ranks are asked to save. A rank that asks
`should_checkpoint` from then on waits until all nodes have told how far theirs are (`RanksHeld`),
and with that at which call all save (`SaveAgreed`). Then they leave. What follows is the matter of
the rendezvous: without the nodes that must go when enough others are there, else the job is over.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cause import Cause


@dataclass(frozen=True, slots=True)
class Leaving:
    """Why this round's ranks save and leave; `is_own` when this node itself must go."""

    cause: Cause
    is_own: bool


# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preempted:
    """This node was told that it must go soon."""

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
class TellPreempted:
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
