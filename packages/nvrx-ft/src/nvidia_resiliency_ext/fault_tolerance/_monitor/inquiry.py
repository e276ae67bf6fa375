# SPDX-License-Identifier: Apache-2.0
"""Look at all ranks of a node when one breaks a limit; report the hang and end who is to blame."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._core.exceptions import read_error_file
from nvidia_resiliency_ext.shared_utils import hang_culprit, rank_activity
from nvidia_resiliency_ext.shared_utils.hang_culprit import Finding, RankState

from . import messages
from .hang_report import HEALTH_RULES, Evidence, describe, plain_states
from .session import SAVE_LIMIT_S, RankSession
from .timeout_rules import Verdict

if TYPE_CHECKING:
    from .server import MonitorServer

logger = logging.getLogger("nvrx")

MAX_SHOWN_ERROR = 200
HOLD_S = 5.0  # How long nobody is ended while the nodes compare what their ranks do.


class Inquiry:
    """One hang and one report; the loop's thread only.

    `trigger` is the session that broke a limit, or None if that was on another node, which asks
    what the ranks here do. Its own evidence is gathered before the others': stacks of the other
    ranks take no time from a rank that is stopped.
    """

    def __init__(self, server: MonitorServer, trigger: RankSession | None) -> None:
        self._server = server
        self._trigger = trigger
        self._verdict = None if trigger is None else trigger.verdict
        self._members = [] if trigger is None else [trigger]
        self._awaited = set(self._members)
        self._errors: dict[int, str] | None = None
        self._is_decided = False
        self._ending: list[RankSession] = []
        self._held: dict[str, Any] | None = None
        # Of the last look at each.
        self._evidence: dict[RankSession, Evidence] = {}
        self._states: list[RankState] = []
        self._finding = Finding()

    @property
    def is_of_health(self) -> bool:
        """Whether a device is unfit, so that no other rank is looked at."""
        return self._verdict is not None and self._verdict.rule in HEALTH_RULES

    def begin(self) -> None:
        self._server.inquiries.append(self)
        if self.is_of_health:
            self._errors = {}
            return
        for port in self._server.ports:
            other = port.session
            if other is not None and other is not self._trigger:
                other.gather_evidence()
                if other.is_looked_into:
                    self._members.append(other)
                    self._awaited.add(other)
        files = self._server.workers.error_files
        if files:
            at = monotonic() + SAVE_LIMIT_S
            self._server.loop.call_at(at, partial(self._take_errors, None))
            self._server.slow.submit(partial(_errors_in, files), self._take_errors)
        else:
            self._errors = {}
        if self._trigger is None:
            self._proceed()

    def take_evidence(self, session: RankSession) -> None:
        if session in self._awaited:
            self._awaited.discard(session)
            self._proceed()

    def end_ranks(self, local_ranks: Collection[int]) -> None:
        """End the ranks that the nodes together found at fault, and release the others."""
        if self._held is not None:
            self._held = None
            self._ending = [s for s in self._members if s.port.local_rank in local_ranks]
            for session in self._ending:
                session.terminate()
            self._close()

    def _take_errors(self, errors: dict[int, str] | None) -> None:
        """Take the messages of error files, or none if they take too long to read; go on."""
        if self._errors is None:
            self._errors = errors or {}
            self._proceed()

    def _act_without_others(self) -> None:
        """Go on without nodes that do not answer."""
        report, self._held = self._held, None
        if report is not None:
            if any(session.is_looked_into for session in self._ending):
                self._end(report)
            self._close()

    def _proceed(self) -> None:
        """Decide as soon as the evidence is complete, or certain without the rest."""
        is_complete = not self._awaited and self._errors is not None
        if not self._is_decided:
            looked_into = (session for session in self._members if session.is_looked_into)
            self._evidence = {s: s.evidence for s in looked_into if s.evidence is not None}
            if self._trigger is None or self._trigger in self._evidence:
                self._states, self._finding = self._look(), Finding()
                if self._verdict is not None and not self.is_of_health:
                    world_size = self._server.workers.world_size
                    self._finding = hang_culprit.find_culprit(self._states, world_size)
                if is_complete or self._is_certain():
                    self._is_decided = True
                    self._answer()
        if is_complete:
            self._close()

    def _is_certain(self) -> bool:
        """Return whether the verdict is certain and only the others' evidence is still to come."""
        blamed = {r.rank for r in self._finding.culprits}
        return self._finding.confidence is hang_culprit.Confidence.CERTAIN and not any(
            session.hello.rank in blamed and session in self._awaited for session in self._evidence
        )

    def _close(self) -> None:
        """Let go of the ranks that are not ended, unless other nodes have still to answer."""
        if self._held is None and not self._awaited and self in self._server.inquiries:
            self._server.inquiries.remove(self)
            for session in self._members:
                if session not in self._ending:
                    session.release()

    def _look(self) -> list[RankState]:
        by_rank = {session.port.local_rank: session for session in self._evidence}
        errors, workers, host = self._errors or {}, self._server.workers, self._server.host
        states = []
        for local_rank in sorted({*by_rank, *range(len(workers.pgids))}):
            if local_rank in errors:
                activity = rank_activity.Activity.FAILED
                words = f"had failed and has not exited: {errors[local_rank]}"
            elif local_rank in workers.left:
                activity, words = rank_activity.Activity.LEFT, "had left with exit code 0"
            elif local_rank in by_rank:
                session = by_rank[local_rank]
                states.append(_state_of(session, self._evidence[session], host))
                continue
            else:
                kernel = rank_activity.inspect_kernel(workers.pgids[local_rank])
                activity = rank_activity.classify(kernel, rank_activity.NO_STACK)
                words = rank_activity.in_words(activity, kernel, rank_activity.NO_STACK)
            states.append(RankState(self._offset() + local_rank, activity, host, words))
        return states

    def _offset(self) -> int:
        """Return the global rank of local rank 0; without a launcher sessions tell it."""
        offsets = (session.hello.rank - session.port.local_rank for session in self._evidence)
        return next(offsets, self._server.workers.rank_offset)

    def _plain_states(self) -> list[dict[str, Any]]:
        stacks = {s.hello.rank: evidence.stacks_path for s, evidence in self._evidence.items()}
        return plain_states(self._states, stacks)

    def _answer(self) -> None:
        """End the ranks at fault on this node; in a job of several nodes ask the launcher first."""
        trigger, verdict = self._trigger, self._verdict
        if trigger is None or verdict is None:
            self._server.notify_launcher(messages.RankStates(self._plain_states()))
            return
        if trigger.has_gone_on():
            logger.warning("rank %d went on while the ranks were looked at", trigger.hello.rank)
            return
        blamed = {r.rank for r in self._finding.culprits}
        if not any(session.hello.rank in blamed for session in self._evidence):
            late = (r.rank for r in self._finding.candidates if r.is_late)
            blamed = {trigger.hello.rank, *late}
        self._ending = [session for session in self._evidence if session.hello.rank in blamed]
        report = self._report(trigger, verdict)
        if self._server.workers.are_all or self.is_of_health:
            self._end(report)
        else:
            self._held = report
            self._server.loop.call_at(monotonic() + HOLD_S, self._act_without_others)
            self._server.notify_launcher(messages.HangFound({**report, "is_held": True}))

    def _end(self, report: dict[str, Any]) -> None:
        """Report a hang, and end the ranks at fault or, without any, the one over its limit."""
        self._server.notify_launcher(messages.HangFound(report))
        for session in self._ending:
            session.terminate()
        # Last: the code that writes the event is loaded first, which may hold us up for 9 ms.
        logger.error("%s", describe(report))
        self._server.record_fault(report)

    def _report(self, trigger: RankSession, verdict: Verdict) -> dict[str, Any]:
        finding, workers = self._finding, self._server.workers
        rank = finding.culprits[0].rank if finding.culprits else trigger.hello.rank
        local_rank = rank - self._offset()
        first = next((session for session in self._evidence if session.hello.rank == rank), None)
        own = None if first is None else self._evidence[first]
        signalled = [e.signalled_at for e in self._evidence.values() if e.signalled_at is not None]
        signalled_at = min(signalled, default=monotonic())
        failed = any(r.activity is rank_activity.Activity.FAILED for r in finding.culprits)
        return {
            "rule": verdict.rule,
            "section": verdict.section,
            "since": verdict.since,
            "elapsed": signalled_at - verdict.since,
            "limit": verdict.limit_s,
            "iteration": verdict.iteration,
            "late_s": signalled_at - verdict.deadline,
            "stacks": own and own.stacks_path,
            "state": own.kernel.state if own else "?",
            "wchan": own.kernel.wchan if own else "",
            "rss_bytes": own and own.rss_bytes,
            "reason": verdict.reason,
            "finding": hang_culprit.describe(finding),
            "confidence": finding.confidence.value,
            "culprits": [r.rank for r in finding.culprits],
            "candidates": [r.rank for r in finding.candidates],
            "waiting": [r.rank for r in finding.waiting],
            "is_elsewhere": finding.is_elsewhere,
            "ranks": self._plain_states(),
            "cycle": self._server.cycle,
            "rank": rank,
            "local_rank": local_rank,
            "pid": first.process.pid if first else workers.pgids[local_rank],
            "host": self._server.host,
            "time": time(),
            "signal": int(trigger.termination_signal),
            "trigger": trigger.hello.rank,
            "ended": [session.port.local_rank for session in self._ending],
            "error_file": workers.error_files[local_rank] if failed else None,
            "is_held": False,
        }


def _state_of(session: RankSession, evidence: Evidence, host: str) -> RankState:
    stack = rank_activity.main_stack(evidence.stacks.decode("utf-8", "replace"))
    activity, view = rank_activity.classify(evidence.kernel, stack), session.look()
    has_steps, is_open = view.step_first_open is not None, int("step" in view.open_sections)
    return RankState(
        rank=session.hello.rank,
        activity=activity,
        host=host,
        words=rank_activity.in_words(activity, evidence.kernel, stack),
        place=stack.place,
        is_late=session.verdict is not None or session.broken(view) is not None,
        has_moved=view.steps != evidence.before.steps,
        progress=(max(view.step_count, 0), is_open) if has_steps else None,
    )


def _errors_in(files: Sequence[str]) -> dict[int, str]:
    """Return the first line of each worker's error file; may block."""
    written = {local_rank: read_error_file(path) for local_rank, path in enumerate(files)}
    return {
        local_rank: (error.message.strip().splitlines() or [""])[0][:MAX_SHOWN_ERROR]
        for local_rank, error in written.items()
        if error is not None
    }
