# SPDX-License-Identifier: Apache-2.0
"""Decide what happens in one rank's session; it reads, signals and sends nothing."""

from __future__ import annotations

import signal
from dataclasses import dataclass
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


_WATCHED = frozenset({Phase.LIVE, Phase.SUSPECT})
_CONDEMNED = frozenset({Phase.ENDING, Phase.KILLING, Phase.STUCK})
LOOKED_INTO = frozenset({Phase.ASKING, Phase.DUMPING, Phase.SAVING, Phase.RECEIVED})
"""Phases in which evidence on the rank is gathered or complete."""


class Do(Enum):
    """An effect, in the order in which they are returned."""

    ACCEPT = "open the session for the process that asks"
    REFUSE = "tell the process that asks that another one has the session"
    ACCUSE = "look at all ranks of the node: this one broke a rule"
    INSPECT = "ask the kernel about the process, then call `inspected`"
    ASK_STACKS = "send the signal that makes the process write its stacks"
    SAVE_EVIDENCE = "write the evidence without waiting for it, then call `saved`"
    TESTIFY = "report that the evidence on this rank is complete"
    TERMINATE = "send SIGCONT, then the configured signal"
    KILL = "send SIGKILL"
    REPORT_UNKILLABLE = "report that the process survived SIGKILL"
    END = "close the session's connection and forget the rank"


Effects: TypeAlias = tuple[Do, ...]


@dataclass
class Session:
    """One rank as the monitor knows it.

    A method takes an event and returns what to do; one that does not fit the phase changes nothing.
    `wake_at` is when `wake` is due (monotonic s), `started` when the session began.
    """

    policy: Policy
    phase: Phase = Phase.IDLE
    session_id: int = 0
    started: float = 0.0
    wake_at: float | None = None
    give_up_at: float = 0.0
    verdict: Verdict | None = None

    def join(self, now: float, *, has_live_owner: bool) -> Effects:
        """Let a process in that asks for the session, unless the one that has it still lives."""
        if self.phase is not Phase.IDLE and has_live_owner:
            return (Do.REFUSE,)
        before = self.end()
        self.session_id += 1
        self.phase, self.started, self.wake_at = Phase.LIVE, now, now
        return (*before, Do.ACCEPT)

    def close(self) -> Effects:
        """End the session, whose connection has ended."""
        # A condemned one gave up its session but not its life: the escalation goes on.
        return () if self.phase in _CONDEMNED else self.end()

    def end(self) -> Effects:
        """End the session, whose process is gone."""
        if self.phase is Phase.IDLE:
            return ()
        self.phase, self.wake_at, self.verdict = Phase.IDLE, None, None
        return (Do.END,)

    def wake(self, view: SlotView, now: float) -> Effects:
        """Do what is due at `wake_at`, or because limits changed; `view` is the slot as it is."""
        match self.phase:
            case Phase.LIVE | Phase.SUSPECT:
                return self._look(view, now)
            case Phase.DUMPING:
                return self._save(now)
            case Phase.SAVING:
                return self.saved()
            case Phase.FREE:
                self.phase, self.verdict, self.wake_at = Phase.LIVE, None, now
            case Phase.ENDING:
                self.phase, self.wake_at = Phase.KILLING, now + ESCALATION_S
                return (Do.KILL,)
            case Phase.KILLING:
                self.phase, self.wake_at = Phase.STUCK, None
                return (Do.REPORT_UNKILLABLE,)
            case _:
                self.wake_at = None
        return ()

    def condemn(self, verdict: Verdict) -> Effects:
        """Gather evidence on a rank that must end: it broke a rule, or its device is unfit."""
        if self.phase not in _WATCHED:
            return ()
        self.phase, self.verdict, self.wake_at = Phase.ASKING, verdict, None
        return (Do.INSPECT, Do.ACCUSE)

    def summon(self) -> Effects:
        """Gather evidence: another rank of the node broke a rule."""
        if self.phase not in _WATCHED:
            return ()
        self.phase, self.verdict, self.wake_at = Phase.ASKING, None, None
        return (Do.INSPECT,)

    def inspected(self, now: float, *, can_dump: bool) -> Effects:
        """Take whether the process can dump its stacks, as the kernel knows."""
        if self.phase is not Phase.ASKING:
            return ()
        if not can_dump or self.policy.evidence_timeout_s <= 0:
            return self._save(now)
        self.phase = Phase.DUMPING
        self.wake_at = self.give_up_at = now + self.policy.evidence_timeout_s
        return (Do.ASK_STACKS,)

    def dumped(self, now: float, *, ends_line: bool) -> Effects:
        """Record that a piece of the stacks came."""
        if self.phase is Phase.DUMPING:
            quiet_at = now + DUMP_QUIET_S if ends_line else self.give_up_at
            self.wake_at = min(quiet_at, self.give_up_at)
        return ()

    def saved(self) -> Effects:
        """Record that the evidence is on disk, or could not be written."""
        if self.phase is not Phase.SAVING:
            return ()
        self.phase, self.wake_at = Phase.RECEIVED, None
        return (Do.TESTIFY,)

    def sentence(self, now: float) -> Effects:
        """End the rank: it is to blame."""
        if self.phase not in LOOKED_INTO:
            return ()
        is_final = self.policy.termination_signal == signal.SIGKILL
        self.phase = Phase.KILLING if is_final else Phase.ENDING
        self.wake_at = now + ESCALATION_S
        return (Do.TERMINATE,)

    def release(self, now: float) -> Effects:
        """Leave the rank to the launcher: it is not to blame."""
        if self.phase is Phase.RECEIVED:
            self.phase, self.wake_at = Phase.FREE, now + AFTERMATH_S
        return ()

    def _look(self, view: SlotView, now: float) -> Effects:
        verdict, before = evaluate(view, self.policy, self.started, now), self.verdict
        if verdict is None:
            self.phase, self.verdict = Phase.LIVE, None
            self.wake_at = next_look(view, self.policy, self.started, now)
            return ()
        is_late = self.wake_at is not None and now - self.wake_at > FROZEN_S
        if before is not None and not is_late and verdict.is_same(before):
            return self.condemn(verdict)
        self.phase, self.verdict = Phase.SUSPECT, verdict
        self.wake_at = now + (FROZEN_S if is_late else SECOND_LOOK_S)
        return ()

    def _save(self, now: float) -> Effects:
        self.phase, self.wake_at = Phase.SAVING, now + SAVE_LIMIT_S
        return (Do.SAVE_EVIDENCE,)
