# SPDX-License-Identifier: Apache-2.0
"""Look at all ranks of a node when one breaks a limit; report the hang and end who is to blame.

Whom to blame is decided by `hang_culprit`. One inquiry is one hang, and one report. Ranks without
a session are looked at through the kernel alone.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._core.exceptions import read_error_file
from nvidia_resiliency_ext.shared_utils import hang_culprit, rank_activity
from nvidia_resiliency_ext.shared_utils.hang_culprit import Finding, RankState

from . import messages
from .hang_report import HEALTH_RULES, Evidence, describe, plain_states
from .session import SAVE_LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .port import RankPort, Testimony
    from .server import MonitorServer
    from .timeout_rules import Verdict


logger = logging.getLogger("nvrx")

MAX_SHOWN_ERROR = 200
HOLD_S = 5.0
"""How long nobody is ended while the nodes compare what their ranks do."""


@dataclass(slots=True)
class _Inquiry:
    """One hang: the rank that broke a limit first, and whose evidence is still to come.

    Without an accuser the limit was broken on another node, which asks what the ranks here do.
    `finding`, `states` and `testimonies` are what was known at the last look.
    """

    accuser: RankPort | None
    verdict: Verdict | None
    errors_until: float
    members: list[RankPort]
    awaited: set[int]
    errors: dict[int, str] | None = None
    is_decided: bool = False
    ending: list[RankPort] = field(default_factory=list)
    held: dict[str, Any] | None = None
    held_until: float = 0.0
    testimonies: dict[RankPort, Testimony] = field(default_factory=dict)
    states: list[RankState] = field(default_factory=list)
    finding: Finding = field(default_factory=Finding)

    @property
    def is_of_health(self) -> bool:
        """Whether a device is unfit, so that no other rank is looked at."""
        return self.verdict is not None and self.verdict.rule in HEALTH_RULES


class Inquiries:
    """The inquiries of one monitor, one after another. The loop's thread only."""

    def __init__(self, server: MonitorServer) -> None:
        self._server = server
        self._open: list[_Inquiry] = []

    def accuse(self, port: RankPort, verdict: Verdict | None) -> None:
        """Begin an inquiry: a rank broke a limit, or its device is unfit.

        That rank has been looked at by now: a stopped one is not held up by the others' stacks.
        """
        if verdict is not None and port.is_looked_into:  # Else it was found dead.
            self._begin(port, verdict)

    def examine(self) -> None:
        """Look at all ranks for a hang on another node, unless an inquiry of our own does."""
        if all(inquiry.is_of_health for inquiry in self._open):
            self._proceed(self._begin(None, None))

    def sentence(self, local_ranks: Collection[int]) -> None:
        """End the ranks that all nodes together have found to blame, and release the others."""
        for inquiry in [i for i in self._open if i.held is not None]:
            inquiry.ending = [p for p in inquiry.members if p.local_rank in local_ranks]
            inquiry.held = None
            for port in inquiry.ending:
                port.carry_out(port.session.sentence(time.monotonic()))
            self._close(inquiry)

    def _begin(self, accuser: RankPort | None, verdict: Verdict | None) -> _Inquiry:
        members = [] if accuser is None else [accuser]
        awaited = {port.local_rank for port in members}
        until = time.monotonic() + SAVE_LIMIT_S
        inquiry = _Inquiry(accuser, verdict, until, members, awaited)
        self._open.append(inquiry)
        if inquiry.is_of_health:
            inquiry.errors = {}
            return inquiry
        for other in self._server.ports:
            if other is not accuser:
                other.carry_out(other.session.summon())
                if other.is_looked_into:
                    members.append(other)
                    awaited.add(other.local_rank)
        self._read_errors(inquiry)
        return inquiry

    def testify(self, port: RankPort) -> None:
        """Record that the evidence on a rank is complete, or that the rank is gone."""
        for inquiry in list(self._open):
            if port.local_rank in inquiry.awaited:
                inquiry.awaited.discard(port.local_rank)
                self._proceed(inquiry)

    def next_wake(self) -> float | None:
        """When `tick` has something to do, on the monotonic clock."""
        waiting = [i.errors_until for i in self._open if i.errors is None]
        waiting += [i.held_until for i in self._open if i.held is not None]
        return min(waiting, default=None)

    def tick(self, now: float) -> None:
        """Go on without error files that take too long to read, or nodes that do not answer."""
        for inquiry in list(self._open):
            if inquiry.errors is None and now >= inquiry.errors_until:
                inquiry.errors = {}
                self._proceed(inquiry)
            elif inquiry.held is not None and now >= inquiry.held_until:
                report, inquiry.held = inquiry.held, None
                if any(port.is_looked_into for port in inquiry.ending):
                    self._end(inquiry, report)
                self._close(inquiry)

    def _read_errors(self, inquiry: _Inquiry) -> None:
        files = dict(enumerate(self._server.workers.error_files))
        if not files:
            inquiry.errors = {}
            return

        def done(errors: dict[int, str] | None) -> None:
            if inquiry.errors is None:
                inquiry.errors = errors or {}
                self._proceed(inquiry)

        self._server.slow.submit(lambda: _errors_in(files), done)

    def _proceed(self, inquiry: _Inquiry) -> None:
        """Decide as soon as the evidence is complete, or certain without the rest."""
        is_complete = not inquiry.awaited and inquiry.errors is not None
        if not inquiry.is_decided:
            known = ((port, port.testimony()) for port in inquiry.members)
            inquiry.testimonies = {p: testimony for p, testimony in known if testimony is not None}
            if inquiry.accuser is None or inquiry.accuser in inquiry.testimonies:
                inquiry.states, inquiry.finding = self._look(inquiry), Finding()
                if inquiry.verdict is not None and not inquiry.is_of_health:
                    world_size = self._server.workers.world_size
                    inquiry.finding = hang_culprit.find_culprit(inquiry.states, world_size)
                if is_complete or _is_certain(inquiry):
                    inquiry.is_decided = True
                    self._answer(inquiry)
        if is_complete:
            self._close(inquiry)

    def _close(self, inquiry: _Inquiry) -> None:
        """Let go of the ranks that are not ended, unless other nodes have still to answer."""
        if inquiry.held is None and not inquiry.awaited and inquiry in self._open:
            self._open.remove(inquiry)
            for port in inquiry.members:
                if port not in inquiry.ending:
                    port.session.release(time.monotonic())

    def _look(self, inquiry: _Inquiry) -> list[RankState]:
        """Return what every rank of the node was doing."""
        by_rank = {port.local_rank: testimony for port, testimony in inquiry.testimonies.items()}
        offset = self._offset(inquiry)
        errors, workers, host = inquiry.errors or {}, self._server.workers, self._server.host
        states = []
        for local_rank in sorted({*by_rank, *range(len(workers.pgids))}):
            if local_rank in errors:
                activity = rank_activity.Activity.FAILED
                words = f"had failed and has not exited: {errors[local_rank]}"
            elif local_rank in workers.left:
                activity, words = rank_activity.Activity.LEFT, "had left with exit code 0"
            elif local_rank in by_rank:
                states.append(_state_of(by_rank[local_rank], host))
                continue
            else:
                kernel = rank_activity.inspect_kernel(workers.pgids[local_rank])
                activity = rank_activity.classify(kernel, rank_activity.NO_STACK)
                words = rank_activity.in_words(activity, kernel, rank_activity.NO_STACK)
            states.append(RankState(offset + local_rank, activity, host, words))
        return states

    def _offset(self, inquiry: _Inquiry) -> int:
        """Return the global rank of local rank 0; without a launcher sessions tell it."""
        known = inquiry.testimonies.items()
        offsets = (testimony.rank - port.local_rank for port, testimony in known)
        return next(offsets, self._server.workers.rank_offset)

    def _answer(self, inquiry: _Inquiry) -> None:
        """End who is to blame here; where other nodes have a say, ask the launcher first."""
        accuser, verdict, testimonies = inquiry.accuser, inquiry.verdict, inquiry.testimonies
        if accuser is None or verdict is None:
            evidence = {testimony.rank: testimony.evidence for testimony in testimonies.values()}
            ranks = plain_states(inquiry.states, evidence)
            self._server.notify_launcher(messages.RanksSeen(ranks))
            return
        own = testimonies[accuser]
        if own.has_gone_on:
            logger.warning("rank %d went on while the ranks were looked at", own.rank)
            return
        blamed = {r.rank for r in inquiry.finding.culprits}
        if not any(testimony.rank in blamed for testimony in testimonies.values()):
            blamed = {own.rank, *(r.rank for r in inquiry.finding.candidates if r.is_late)}
        inquiry.ending = [p for p, testimony in testimonies.items() if testimony.rank in blamed]
        report = self._report(inquiry, own, verdict)
        if self._server.workers.are_all or inquiry.is_of_health:
            self._end(inquiry, report)
        else:
            inquiry.held, inquiry.held_until = report, time.monotonic() + HOLD_S
            self._server.notify_launcher(messages.HangFound({**report, "is_held": True}))

    def _end(self, inquiry: _Inquiry, report: dict[str, Any]) -> None:
        """Report a hang, and end who is to blame; where that is nobody, who broke its limit."""
        self._server.notify_launcher(messages.HangFound(report))
        logger.error("%s", describe(report))
        self._server.record_fault(report)
        for port in inquiry.ending:
            port.carry_out(port.session.sentence(time.monotonic()))

    def _report(self, inquiry: _Inquiry, accuser: Testimony, verdict: Verdict) -> dict[str, Any]:
        """Return a hang in machine-readable form, see `messages.HangFound`."""
        finding, workers = inquiry.finding, self._server.workers
        ranks = {testimony.rank: testimony for testimony in inquiry.testimonies.values()}
        rank = finding.culprits[0].rank if finding.culprits else accuser.rank
        local_rank = rank - self._offset(inquiry)
        signalled = [t.signalled_at for t in ranks.values() if t.signalled_at is not None]
        signalled_at = min(signalled, default=time.monotonic())
        failed = any(r.activity is rank_activity.Activity.FAILED for r in finding.culprits)
        evidence = {rank: testimony.evidence for rank, testimony in ranks.items()}
        own = evidence.get(rank) or Evidence(rank_activity.Kernel("?"))
        return {
            "rule": verdict.rule,
            "section": verdict.section,
            "since": verdict.since,
            "elapsed": signalled_at - verdict.since,
            "limit": verdict.limit_s,
            "iteration": verdict.iteration,
            "late_s": signalled_at - verdict.deadline,
            "stacks": own.stacks_path,
            "state": own.kernel.state,
            "wchan": own.kernel.wchan,
            "rss_bytes": own.rss_bytes,
            "reason": verdict.reason,
            "finding": hang_culprit.describe(finding),
            "confidence": finding.confidence.value,
            "culprits": [r.rank for r in finding.culprits],
            "candidates": [r.rank for r in finding.candidates],
            "waiting": [r.rank for r in finding.waiting],
            "is_elsewhere": finding.is_elsewhere,
            "ranks": plain_states(inquiry.states, evidence),
            "cycle": self._server.cycle,
            "rank": rank,
            "local_rank": local_rank,
            "pid": ranks[rank].pid if rank in ranks else workers.pgids[local_rank],
            "host": self._server.host,
            "time": time.time(),
            "signal": accuser.signal,
            "accuser": accuser.rank,
            "ended": [port.local_rank for port in inquiry.ending],
            "error_file": workers.error_files[local_rank] if failed else None,
            "is_held": False,
        }


def _is_certain(inquiry: _Inquiry) -> bool:
    """Return whether nothing that is still to come can change the verdict or is worth a wait.

    The evidence on the culprits themselves is waited for: a stopped one is asked for nothing.
    """
    blamed = {r.rank for r in inquiry.finding.culprits}
    return inquiry.finding.confidence is hang_culprit.Confidence.CERTAIN and not any(
        testimony.rank in blamed and port.local_rank in inquiry.awaited
        for port, testimony in inquiry.testimonies.items()
    )


def _state_of(testimony: Testimony, host: str) -> RankState:
    stack, kernel = rank_activity.main_stack(testimony.stacks), testimony.evidence.kernel
    activity, view = rank_activity.classify(kernel, stack), testimony.after
    has_steps, is_open = view.step_first_open is not None, int("step" in view.open_sections)
    return RankState(
        rank=testimony.rank,
        activity=activity,
        host=host,
        words=rank_activity.in_words(activity, kernel, stack),
        place=stack.place,
        is_late=testimony.broken is not None,
        has_moved=testimony.after.steps != testimony.before.steps,
        progress=(max(view.step_count, 0), is_open) if has_steps else None,
    )


def _errors_in(files: Mapping[int, str]) -> dict[int, str]:
    """Return the first line of what each worker wrote about its failure; may block."""
    written = {local_rank: read_error_file(path) for local_rank, path in files.items()}
    return {
        local_rank: (error.message.strip().splitlines() or [""])[0][:MAX_SHOWN_ERROR]
        for local_rank, error in written.items()
        if error is not None
    }
