# SPDX-License-Identifier: Apache-2.0
"""Owns one rank's session: its connection and process, its limits, and how it is ended."""

from __future__ import annotations

import logging
import os
import signal
from collections import ChainMap
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.rank_activity import inspect_kernel
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel

from . import messages
from .hang_report import Evidence, can_dump, save_evidence
from .slot import SAVE_ASKED, SlotView
from .timeout_rules import Verdict, change_limits, evaluate, next_look

if TYPE_CHECKING:
    from .port import RankPort

logger = logging.getLogger("nvrx")

MAX_STACKS_BYTES = 1 << 20
SECOND_LOOK_S = 0.002  # Long enough for any store to become visible everywhere.
FROZEN_S = 1.0
"""A monitor that wakes this late was itself frozen, and so, probably, were the ranks: the second
look then waits as long, so that thawing ranks can show that they live."""
DUMP_QUIET_S = 0.025
SAVE_LIMIT_S = 0.5
ESCALATION_S = 5.0
LATE_MARGIN_S = 0.5
"""Ranks of a hang break their limits at nearly the same time: who is as close counts as well."""
AFTERMATH_S = 10.0
"""How long ranks that waited for the culprit are left to the launcher, which ends the cycle."""


class Phase(Enum):
    """Where a session is."""

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
    OVER = "over"


_WATCHED = frozenset({Phase.LIVE, Phase.SUSPECT})
_CONDEMNED = frozenset({Phase.ENDING, Phase.KILLING, Phase.STUCK})
_LOOKED_INTO = frozenset({Phase.ASKING, Phase.DUMPING, Phase.SAVING, Phase.RECEIVED})


@dataclass(eq=False)
class RankSession:
    """One process of a rank as the monitor knows it, until its end or that of its connection.

    A method takes an event; one that does not fit the phase changes nothing. Times: monotonic s.
    """

    port: RankPort
    channel: Channel
    hello: messages.Hello
    process: PidHandle
    session_id: int

    def __post_init__(self) -> None:
        asked = self.hello.num_warmup_iters
        own: dict[str, Any] = {} if asked is None else {"num_warmup_iterations": asked}
        self.limits = ChainMap[str, Any](own, self.port.config)
        self.phase = Phase.LIVE
        self.started = monotonic()
        self.wake_at: float | None = self.started
        self.verdict: Verdict | None = None
        self.evidence: Evidence | None = None
        self._give_up_at = 0.0
        self._dump_fd = -1
        self._has_reported_life = False
        self._has_reported_step = False
        self._held_request: int | None = None

    def open(self) -> None:
        """Hand over the slot and a pipe for stacks, and watch the rank; may raise OSError."""
        port, loop = self.port, self.port.server.loop
        self._dump_fd, dump_write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(self._dump_fd, False)
            port.renew_slot(self)
            sections = list(port.layout.sections)
            accepted = messages.Accepted(self.session_id, port.config, sections)
            self.channel.send(accepted, [port.memory.fd, dump_write_fd])
        finally:
            os.close(dump_write_fd)
        loop.watch(self.channel, self.read, write=self.channel.wants_to_write)
        loop.watch(self._dump_fd, self._read_dump)
        pidfd = self.process.fileno()
        if pidfd is not None:
            loop.watch(pidfd, self.end)
        rank, pid = self.hello.rank, self.process.pid
        port.server.notify_launcher(messages.RankJoined(port.local_rank, rank, pid))
        logger.debug("rank %d (pid %d) joined its monitor", rank, pid)

    def close(self) -> None:
        """End the session, whose connection has ended."""
        # A rank that is being ended may close its connection and live on: go on to SIGKILL.
        if self.phase not in _CONDEMNED:
            self.end()

    def end(self) -> None:
        """End the session, whose process is gone or not watched any more."""
        if self.phase is Phase.OVER:
            return
        view = self.look()
        self.phase, self.wake_at, self.verdict, self.evidence = Phase.OVER, None, None, None
        port, loop = self.port, self.port.server.loop
        port.session = None
        loop.unwatch(self.channel)
        self.channel.close()
        pidfd = self.process.fileno()
        if pidfd is not None:
            loop.unwatch(pidfd)
        self.process.close()
        self._close_dump()
        port.server.notify_launcher(messages.RankLeft(port.local_rank, view.iteration))
        port.lines.lost(monotonic())
        port.server.take_evidence(self)

    def read(self) -> None:
        channel = self.channel
        was_over = channel.is_over
        if was_over:
            return
        channel.flush()
        for message in channel.receive():
            self._handle(message)
        loop = self.port.server.loop
        if channel.is_over:
            loop.unwatch(channel)
            channel.close()
            self.close()
        else:
            loop.watch(channel, self.read, write=channel.wants_to_write)

    def _handle(self, message: object) -> None:
        match message:
            case messages.SetTimeouts(request, changes):
                problem = change_limits(self.port.config, changes)
                self._look_now()
                self.channel.send(messages.Answer(request, problem))
            case messages.HeldForSave(request) if self.port.save_word == SAVE_ASKED:
                self._held_request = request
            case messages.Ask(request) | messages.HeldForSave(request):
                self._look_now()
                self.channel.send(messages.Answer(request))
            case _:
                self.channel.is_over = True  # a second hello, or one of the other direction

    def release_held(self) -> None:
        """Answer a rank that waits for the word for `should_checkpoint`."""
        if self._held_request is not None:
            self.channel.send(messages.Answer(self._held_request))
            self._held_request = None

    def look(self) -> SlotView:
        """Read the slot, and pass on the first signs of life and of a step in it."""
        port, view = self.port, self.port.view()
        if not view.session_id:
            return view
        stepped_at = view.heartbeat_first or view.step_first_close
        if not self._has_reported_life and (view.is_active or stepped_at is not None):
            self._has_reported_life = True
            port.lines.alive()
        if not self._has_reported_step and stepped_at is not None:
            self._has_reported_step = True
            port.server.notify_launcher(messages.FirstStep(port.local_rank, stepped_at))
        return view

    def wake(self) -> None:
        """Run the next step of the session's phase: check limits, save stacks, signal, kill."""
        view, now = self.look(), monotonic()
        match self.phase:
            case Phase.LIVE | Phase.SUSPECT:
                self._check_limits(view, now)
            case Phase.DUMPING:
                self._save()
            case Phase.SAVING:
                self._saved()
            case Phase.FREE:
                self.phase, self.verdict, self.wake_at = Phase.LIVE, None, now
            case Phase.ENDING:
                self.phase, self.wake_at = Phase.KILLING, now + ESCALATION_S
                self.process.signal(signal.SIGKILL)
            case Phase.KILLING:
                self.phase, self.wake_at = Phase.STUCK, None
                self._report_unkillable()
            case _:
                self.wake_at = None

    def _look_now(self) -> None:
        if self.phase is Phase.LIVE:
            self.wake()

    def _check_limits(self, view: SlotView, now: float) -> None:
        verdict, before = evaluate(view, self.limits, self.started, now), self.verdict
        if verdict is None:
            self.phase, self.verdict = Phase.LIVE, None
            self.wake_at = next_look(view, self.limits, self.started, now)
            return
        is_late = self.wake_at is not None and now - self.wake_at > FROZEN_S
        if before is not None and not is_late and verdict.is_same(before):
            self.hold_at_fault(verdict)
            return
        self.phase, self.verdict = Phase.SUSPECT, verdict
        self.wake_at = now + (FROZEN_S if is_late else SECOND_LOOK_S)

    @property
    def is_looked_into(self) -> bool:
        """Whether evidence on the rank is being gathered, or is complete."""
        return self.phase in _LOOKED_INTO

    def hold_at_fault(self, verdict: Verdict) -> None:
        """Gather evidence on a rank that must end: it broke a rule, or its device is unfit."""
        if self.phase in _WATCHED:
            self._gather(verdict)
            if self.is_looked_into:  # Else it was found dead.
                self.port.server.open_inquiry(self)

    def gather_evidence(self) -> None:
        if self.phase in _WATCHED:
            self._gather(None)

    def _gather(self, verdict: Verdict | None) -> None:
        self.phase, self.verdict, self.wake_at = Phase.ASKING, verdict, None
        self.evidence = None
        if not self.process.alive():
            self.end()
            return
        kernel = inspect_kernel(self.process.pid)
        self.evidence = evidence = Evidence(kernel, self.look())
        limit_s = self.limits["hang_evidence_timeout"]
        if limit_s <= 0 or not can_dump(self.process.pid, kernel, self.hello.dump_signal):
            self._save()
            return
        evidence.signalled_at = monotonic()
        self.phase = Phase.DUMPING
        self.wake_at = self._give_up_at = evidence.signalled_at + limit_s
        self.process.signal(self.hello.dump_signal)

    def _read_dump(self) -> None:
        try:
            data = os.read(self._dump_fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._close_dump()
        elif self.evidence is not None:
            if len(self.evidence.stacks) < MAX_STACKS_BYTES:
                self.evidence.stacks += data
            if self.phase is Phase.DUMPING:
                quiet_at = monotonic() + DUMP_QUIET_S if data.endswith(b"\n") else self._give_up_at
                self.wake_at = min(quiet_at, self._give_up_at)

    def _close_dump(self) -> None:
        if self._dump_fd >= 0:
            self.port.server.loop.unwatch(self._dump_fd)
            os.close(self._dump_fd)
            self._dump_fd = -1

    def _save(self) -> None:
        self.phase, self.wake_at = Phase.SAVING, monotonic() + SAVE_LIMIT_S
        server, evidence = self.port.server, self.evidence
        assert evidence is not None
        name = f"stacks-{server.host}-c{server.cycle}-r{self.hello.rank}"
        directory, pid = server.record_dir, self.process.pid
        kernel, stacks = evidence.kernel, bytes(evidence.stacks)

        def done(result: tuple[int | None, str | None] | None) -> None:
            evidence.rss_bytes, evidence.stacks_path = result or (None, None)
            if evidence is self.evidence:
                self._saved()

        server.slow.submit(lambda: save_evidence(directory, name, pid, kernel, stacks), done)

    def _saved(self) -> None:
        """Record that the evidence is on disk, or could not be written in time."""
        if self.phase is Phase.SAVING:
            self.phase, self.wake_at = Phase.RECEIVED, None
            self.port.server.take_evidence(self)

    @property
    def termination_signal(self) -> signal.Signals:
        return signal.Signals[self.limits["rank_termination_signal"]]

    def broken(self, view: SlotView) -> Verdict | None:
        """Return the limit that the rank has broken or is about to, as the slot is now."""
        return evaluate(view, self.limits, self.started, monotonic() + LATE_MARGIN_S)

    def has_gone_on(self) -> bool:
        """Return whether the rank now keeps the limit that it had exceeded."""
        verdict, broken = self.verdict, self.broken(self.look())
        if verdict is None or verdict.reason:
            return False
        return broken is None or broken.since != verdict.since

    def terminate(self) -> None:
        if not self.is_looked_into:
            return
        is_final = self.termination_signal == signal.SIGKILL
        self.phase = Phase.KILLING if is_final else Phase.ENDING
        self.wake_at = monotonic() + ESCALATION_S
        self.process.signal(signal.SIGCONT)
        self.process.signal(self.termination_signal)

    def release(self) -> None:
        """Leave the rank, which is not at fault, to the launcher."""
        if self.phase is Phase.RECEIVED:
            self.phase, self.wake_at = Phase.FREE, monotonic() + AFTERMATH_S

    def _report_unkillable(self) -> None:
        kernel, local_rank = inspect_kernel(self.process.pid), self.port.local_rank
        report = messages.RankUnkillable(local_rank, kernel.state, kernel.wchan)
        self.port.server.notify_launcher(report)
        logger.error(
            "rank %d (pid %d) survived SIGKILL: state %s, waits in %s; this node needs a look",
            *(self.hello.rank, self.process.pid, kernel.state, kernel.wchan or "an unknown place"),
        )
