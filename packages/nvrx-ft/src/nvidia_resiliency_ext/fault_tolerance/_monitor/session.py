# SPDX-License-Identifier: Apache-2.0
"""Decide what happens in one rank's session; it reads, signals and sends nothing."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from .timeout_rules import evaluate, next_look

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance.rank_monitor_state_machine import (
        RankMonitorStateMachine,
        RestarterEventLogger,
    )

    from .slot import SlotView
    from .timeout_rules import Policy, Verdict


class RestartLines:
    """The layered-restart lines of one rank, while a restart lasts one in `interval_s` seconds.

    Without a logger there are none.
    """

    def __init__(self, restarter: RestarterEventLogger | None, interval_s: float) -> None:
        self._machine: RankMonitorStateMachine | None = None
        if restarter is not None:
            from nvidia_resiliency_ext.fault_tolerance.rank_monitor_state_machine import (
                RankMonitorStateMachine,
            )

            self._machine = RankMonitorStateMachine(restarter)
        self._interval_s = interval_s
        self.next_check: float | None = None
        """When `check` is due, on the monotonic clock."""

    def alive(self) -> None:
        """Record the rank's first sign of life in a session."""
        if self._machine is not None and self._machine.state.name not in ("ABORTED", "FINALIZED"):
            self._machine.handle_heartbeat_msg()
            self.next_check = None

    def lost(self, now: float) -> None:
        if self._machine is not None:
            self._machine.handle_ipc_connection_lost()
            self.next_check = now + self._interval_s if self._machine.is_restarting() else None

    def check(self, now: float) -> None:
        """Write that a restart still lasts, if it is time."""
        if self._machine is None or self.next_check is None or now < self.next_check:
            return
        self._machine.periodic_restart_check()
        self.next_check = now + self._interval_s

    def finish(self) -> None:
        if self._machine is not None:
            self._machine.handle_signal()


SECOND_LOOK_S = 0.002
"""Pause before the second look; long enough for any store to become visible everywhere."""
FROZEN_S = 1.0
"""A monitor that wakes this late was itself frozen, and so, probably, were the ranks: the second
look then waits as long, so that thawing ranks can show that they live."""
DUMP_QUIET_S = 0.025
SAVE_LIMIT_S = 0.5
ESCALATION_S = 5.0
AFTERMATH_S = 10.0
"""How long ranks that waited for the culprit are left to the launcher, which ends the cycle."""


class Phase(Enum):
    """Where a session is."""

    IDLE = "idle"
    LIVE = "live"
    SUSPECT = "suspect"
    ASKING = "asking"
    DUMPING = "dumping"
    SAVING = "saving"
    RECEIVED = "received"
    FREE = "free"
    ENDING = "ending"
    KILLING = "killing"
    STUCK = "stuck"


_CONDEMNED = frozenset({Phase.ENDING, Phase.KILLING, Phase.STUCK})
LOOKED_INTO = frozenset({Phase.ASKING, Phase.DUMPING, Phase.SAVING, Phase.RECEIVED})
"""Phases in which evidence on the rank is gathered or complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """One rank as the monitor knows it; `wake_at` is when the machine wants `Woke`."""

    phase: Phase = Phase.IDLE
    session_id: int = 0
    started: float = 0.0
    wake_at: float | None = None
    give_up_at: float = 0.0
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """A process asks for the session; whether the one that has it, if any, still lives."""

    has_live_owner: bool


@dataclass(frozen=True, slots=True)
class Woke:
    """`wake_at` passed, or the limits changed; what the slot shows now."""

    view: SlotView


@dataclass(frozen=True, slots=True)
class Condemned:
    """The rank must end for a reason that is not in its slot: its device is unfit."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Inspected:
    """The kernel was asked about the process; whether it can dump its stacks."""

    can_dump: bool


@dataclass(frozen=True, slots=True)
class Dumped:
    """A piece of the stacks came; whether it ended with a line."""

    ends_line: bool


class Happened(Enum):
    """An event without further content."""

    CLOSED = "the session's connection ended"
    DIED = "the process that has the session ended"
    SUMMONED = "another rank of the node broke a rule: the state of this one is evidence"
    SENTENCED = "the rank is to blame, and must end"
    RELEASED = "the rank is not to blame"
    SAVED = "the evidence is on disk, or could not be written"


class Do(Enum):
    """An effect without further content."""

    ACCEPT = "open the session for the process that asks"
    REFUSE = "tell the process that asks that another one has the session"
    ACCUSE = "look at all ranks of the node: this one broke a rule"
    INSPECT = "ask the kernel about the process and report `Inspected`"
    ASK_STACKS = "send the signal that makes the process write its stacks"
    SAVE_EVIDENCE = "write the evidence without waiting for it; report SAVED when done"
    TESTIFY = "report that the evidence on this rank is complete"
    TERMINATE = "send SIGCONT, then the configured signal"
    KILL = "send SIGKILL"
    REPORT_UNKILLABLE = "report that the process survived SIGKILL"
    END = "close the session's connection and forget the rank"


Event: TypeAlias = Joined | Woke | Condemned | Inspected | Dumped | Happened
Result: TypeAlias = tuple[SessionState, tuple[Do, ...]]


def step(  # noqa: C901, PLR0911, PLR0912 - one branch per row of the table
    state: SessionState, event: Event, now: float, policy: Policy
) -> Result:
    """Return the next state and the effects; events that do not fit the phase change nothing."""
    match event:
        case Joined(has_live_owner):
            return _join(state, now, has_live_owner=has_live_owner)
        # A condemned one gave up its session but not its life: the escalation goes on.
        case Happened.CLOSED if state.phase not in _CONDEMNED:
            return _end(state)
        case Happened.DIED:
            return _end(state)
        case Woke(view):
            return _wake(state, view, now, policy)
        case Condemned(verdict) if state.phase in (Phase.LIVE, Phase.SUSPECT):
            return _accused(state, verdict)
        case Happened.SUMMONED if state.phase in (Phase.LIVE, Phase.SUSPECT):
            return replace(state, phase=Phase.ASKING, verdict=None, wake_at=None), (Do.INSPECT,)
        case Happened.SENTENCED if state.phase in LOOKED_INTO:
            return _condemn(state, now, policy)
        case Happened.RELEASED if state.phase is Phase.RECEIVED:
            return replace(state, phase=Phase.FREE, wake_at=now + AFTERMATH_S), ()
        case Inspected(can_dump) if state.phase is Phase.ASKING:
            if not can_dump or policy.evidence_timeout_s <= 0:
                return _save(state, now)
            until = now + policy.evidence_timeout_s
            dumping = replace(state, phase=Phase.DUMPING, wake_at=until, give_up_at=until)
            return dumping, (Do.ASK_STACKS,)
        case Dumped(ends_line) if state.phase is Phase.DUMPING:
            quiet_at = now + DUMP_QUIET_S if ends_line else state.give_up_at
            return replace(state, wake_at=min(quiet_at, state.give_up_at)), ()
        case Happened.SAVED if state.phase is Phase.SAVING:
            return _received(state)
        case _:
            return state, ()


def _join(state: SessionState, now: float, *, has_live_owner: bool) -> Result:
    if state.phase is not Phase.IDLE and has_live_owner:
        return state, (Do.REFUSE,)
    _, before = _end(state)
    number = state.session_id + 1
    joined = SessionState(phase=Phase.LIVE, session_id=number, started=now, wake_at=now)
    return joined, (*before, Do.ACCEPT)


def _end(state: SessionState) -> Result:
    if state.phase is Phase.IDLE:
        return state, ()
    return SessionState(session_id=state.session_id), (Do.END,)


def _wake(state: SessionState, view: SlotView, now: float, policy: Policy) -> Result:
    match state.phase:
        case Phase.LIVE | Phase.SUSPECT:
            return _look(state, view, now, policy)
        case Phase.DUMPING:
            return _save(state, now)
        case Phase.SAVING:
            return _received(state)
        case Phase.FREE:
            return replace(state, phase=Phase.LIVE, verdict=None, wake_at=now), ()
        case Phase.ENDING:
            killing = replace(state, phase=Phase.KILLING, wake_at=now + ESCALATION_S)
            return killing, (Do.KILL,)
        case Phase.KILLING:
            return replace(state, phase=Phase.STUCK, wake_at=None), (Do.REPORT_UNKILLABLE,)
        case _:
            return replace(state, wake_at=None), ()


def _look(state: SessionState, view: SlotView, now: float, policy: Policy) -> Result:
    verdict = evaluate(view, policy, state.started, now)
    if verdict is None:
        at = next_look(view, policy, state.started, now)
        return replace(state, phase=Phase.LIVE, verdict=None, wake_at=at), ()
    is_late = state.wake_at is not None and now - state.wake_at > FROZEN_S
    if state.phase is Phase.SUSPECT and not is_late and _is_same(verdict, state.verdict):
        return _accused(state, verdict)
    pause = FROZEN_S if is_late else SECOND_LOOK_S
    return replace(state, phase=Phase.SUSPECT, verdict=verdict, wake_at=now + pause), ()


def _is_same(verdict: Verdict, before: Verdict | None) -> bool:
    return before is not None and (verdict.rule, verdict.section, verdict.since) == (
        before.rule,
        before.section,
        before.since,
    )


def _accused(state: SessionState, verdict: Verdict) -> Result:
    asking = replace(state, phase=Phase.ASKING, verdict=verdict, wake_at=None)
    return asking, (Do.INSPECT, Do.ACCUSE)


def _save(state: SessionState, now: float) -> Result:
    return replace(state, phase=Phase.SAVING, wake_at=now + SAVE_LIMIT_S), (Do.SAVE_EVIDENCE,)


def _received(state: SessionState) -> Result:
    return replace(state, phase=Phase.RECEIVED, wake_at=None), (Do.TESTIFY,)


def _condemn(state: SessionState, now: float, policy: Policy) -> Result:
    is_final = policy.termination_signal == signal.SIGKILL
    phase = Phase.KILLING if is_final else Phase.ENDING
    return replace(state, phase=phase, wake_at=now + ESCALATION_S), (Do.TERMINATE,)
