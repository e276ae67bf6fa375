# SPDX-License-Identifier: Apache-2.0
"""Owns the monitor's side of one local rank: carries out what the session machine decides."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.fault_tolerance._core.acceptor import Acceptor, RefusalLog
from nvidia_resiliency_ext.shared_utils.children import PidHandle

from . import messages, session
from .hang_report import Evidence, inspect_process, save_evidence
from .session import change_limits, policy_of
from .slot import SAVE_ASKED, W_SAVE, SlotError, SlotLayout, SlotMemory, SlotView, read_slot
from .timeout_rules import Verdict, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvidia_resiliency_ext.fault_tolerance._core.acceptor import Connection

    from .server import MonitorServer
    from .session import RestartLines


logger = logging.getLogger("nvrx")

HELLO_LIMIT_S = 5.0
MAX_PENDING = 8
MAX_STACKS_BYTES = 1 << 20
_NO_PIDFD_POLL_S = 0.1
LATE_MARGIN_S = 0.5
"""Ranks of a hang break their limits at nearly the same time: who is as close counts as well."""


@dataclass(frozen=True, slots=True)
class Testimony:
    """What is known of a rank that was looked at because a rank of the node broke a rule.

    `before` and `after` are looks at its slot; `broken` is the limit that it broke, or is about to;
    `has_gone_on` says that it broke one, and keeps it now.
    """

    rank: int
    pid: int
    evidence: Evidence
    stacks: str
    before: SlotView
    after: SlotView
    broken: Verdict | None
    has_gone_on: bool
    signalled_at: float | None
    signal: int


@dataclass(slots=True, eq=False)
class _Client:
    """The process that has, or asks for, the session."""

    connection: Connection
    hello: messages.Hello
    process: PidHandle
    dump_fd: int = -1
    evidence: Evidence | None = None
    stacks: bytearray | None = None
    first_view: SlotView | None = None
    signalled_at: float | None = None
    has_reported_life: bool = False
    has_reported_step: bool = False
    held_request: int | None = None


class RankPort:
    """One local rank: its socket, its slot, and at most one session."""

    def __init__(
        self,
        server: MonitorServer,
        local_rank: int,
        path: str,
        config: Mapping[str, Any],
        lines: RestartLines,
    ) -> None:
        self.local_rank = local_rank
        self._server = server
        self._config = dict(config)
        self._layout = SlotLayout(tuple(config["rank_section_timeouts"]))
        self.memory = SlotMemory.create(
            self._layout, directory=server.run_dir, name=f"nvrx-slot{local_rank}"
        )
        self._lines = lines
        self._state = session.SessionState()
        self._policy = policy_of(self._config)
        self._client: _Client | None = None
        self._pending: _Client | None = None
        self._save_word = 0
        self._refusals = RefusalLog(f"the socket of local rank {local_rank}")
        self._acceptor = Acceptor(
            path,
            server.loop,
            messages.RANK_MESSAGES,
            most=MAX_PENDING,
            limit_s=HELLO_LIMIT_S,
            on_received=self._receive_hello,
            on_refused=self._record_refusal,
        )

    def next_wake(self) -> float | None:
        """When `tick` has something to do, on the monotonic clock."""
        times = [
            self._state.wake_at,
            self._lines.next_check,
            self._refusals.next_check,
        ]
        if self._client is not None and self._client.process.fileno() is None:
            times.append(time.monotonic() + _NO_PIDFD_POLL_S)
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> None:
        client = self._client
        if client is not None and client.process.fileno() is None and not client.process.alive():
            self._process(session.Happened.DIED)
        if self._state.wake_at is not None and self._state.wake_at <= now:
            self._process(session.Happened.WOKE)
        self._lines.check(now)
        self._refusals.check(now)

    def set_limits(self, changes: Mapping[str, Any]) -> str | None:
        """Change limits at once; return what was wrong with them, if anything."""
        problem = change_limits(self._config, changes)
        self._renew_policy()
        self._look_now()
        return problem

    def condemn(self, rule: str, reason: str) -> None:
        """End the rank because its device is unfit; nothing happens without a session."""
        if self._client is None:
            return
        interval_s = float(self._config["node_health_check_interval"])
        verdict = Verdict(
            rule=rule,
            section=None,
            since=time.monotonic() - interval_s,
            limit_s=interval_s,
            iteration=self._look().iteration,
            reason=reason,
        )
        self._process(session.Condemned(verdict))

    def summon(self) -> bool:
        """Gather evidence on the rank, whatever it does; False when it has no session to ask."""
        self._process(session.Happened.SUMMONED)
        return self.is_looked_into

    def sentence(self) -> None:
        """End the rank: it is to blame."""
        self._process(session.Happened.SENTENCED)

    def release(self) -> None:
        """Leave the rank to the launcher: it is not to blame."""
        self._process(session.Happened.RELEASED)

    @property
    def is_looked_into(self) -> bool:
        """Whether evidence on the rank is being gathered, or is complete."""
        return self._client is not None and self._state.phase in session.LOOKED_INTO

    def testimony(self) -> Testimony | None:
        """Return what is known of the rank by now; None before it was looked at."""
        client = self._client
        if client is None or client.first_view is None or not self.is_looked_into:
            return None
        assert client.evidence is not None
        now, timeouts = time.monotonic(), self._policy.timeouts
        after, verdict = self._look(client), self._state.verdict
        broken = evaluate(after, timeouts, self._state.started, now + LATE_MARGIN_S)
        has_gone_on = (
            verdict is not None
            and not verdict.reason
            and (broken is None or broken.since != verdict.since)
        )
        return Testimony(
            rank=client.hello.rank,
            pid=client.process.pid,
            evidence=client.evidence,
            stacks=bytes(client.stacks or b"").decode("utf-8", "replace"),
            before=client.first_view,
            after=after,
            broken=broken or verdict,
            has_gone_on=has_gone_on,
            signalled_at=client.signalled_at,
            signal=int(self._policy.termination_signal),
        )

    def close(self) -> None:
        """End the session without touching the process, and stop listening."""
        self._acceptor.close()
        if self._client is not None:
            self._end()
        self._lines.finish()
        self._refusals.finish()
        self.memory.close()

    def _receive_hello(self, connection: Connection, received: list[object]) -> None:
        """Take the first words of a connection: only one well-formed `Hello` reaches a session."""
        hello = received[0] if len(received) == 1 else None
        if isinstance(hello, messages.Hello) and not connection.channel.is_over:
            self._acceptor.release(connection)
            self._request_session(connection, hello)
        elif received:
            self._acceptor.drop(connection)

    def _request_session(self, connection: Connection, hello: messages.Hello) -> None:
        # The end of the present client may be in the queue behind this hello.
        self._read_client()
        try:
            process = PidHandle(connection.pid or hello.pid)
        except OSError as exc:
            # Gone again, or we are out of descriptors: it will ask anew.
            self._record_refusal(f"rank {hello.rank} (pid {hello.pid}) was not let in: {exc}")
            connection.channel.close()
            return
        client = self._client
        self._pending = _Client(connection, hello, process)
        is_alive = client is not None and client.process.alive()
        self._process(session.Joined(is_alive))

    def _record_refusal(self, text: str) -> None:
        self._refusals.record(time.monotonic(), text)

    def _read_client(self) -> None:
        client = self._client
        if client is None or client.connection.channel.is_over:
            return
        channel = client.connection.channel
        channel.flush()
        for message in channel.receive():
            self._handle(client, message)
        if channel.is_over:
            self._server.loop.unwatch(channel)
            channel.close()
            self._process(session.Happened.CLOSED)
        else:
            self._server.loop.watch(channel, self._read_client, write=channel.wants_to_write)

    def _handle(self, client: _Client, message: object) -> None:
        channel = client.connection.channel
        match message:
            case messages.SetTimeouts(request, changes):
                channel.send(messages.Answer(request, self.set_limits(changes)))
            case messages.Ask(request):
                self._look_now()
                channel.send(messages.Answer(request))
            case messages.HeldForSave(request):
                self._hold(client, request)
            case _:
                channel.is_over = True  # a second hello, or a message of the other direction

    def save(self, word: int) -> None:
        """Put the word for `should_checkpoint` into the slot; a rank that waits for it goes on."""
        self._save_word = self.memory.words[W_SAVE] = word
        client = self._client
        if word != SAVE_ASKED and client is not None and client.held_request is not None:
            client.connection.channel.send(messages.Answer(client.held_request))
            client.held_request = None

    def _hold(self, client: _Client, request: int) -> None:
        if self._save_word == SAVE_ASKED:
            client.held_request = request
        else:
            client.connection.channel.send(messages.Answer(request))

    def _process(self, event: session.Event) -> None:
        self._state, effects = session.step(self._state, event, time.monotonic(), self._policy)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: session.Do) -> None:
        match effect:
            case session.Do.ACCEPT:
                self._accept()
            case session.Do.REFUSE:
                self._refuse("another live process has the session of this rank")
            case session.Do.END:
                self._end()
            case session.Do.LOOK:
                self._process(session.Looked(self._look()))
            case session.Do.SAVE_EVIDENCE:
                self._save()
            case session.Do.ACCUSE:
                self._server.inquiries.accuse(self, self._state.verdict)
            case session.Do.TESTIFY:
                self._server.inquiries.testify(self)
            case session.Do.REPORT_UNKILLABLE:
                self._report_unkillable()
            case _:
                self._act_on_process(effect)

    def _act_on_process(self, effect: session.Do) -> None:
        client = self._client
        assert client is not None
        match effect:
            case session.Do.INSPECT:
                self._inspect(client)
            case session.Do.ASK_STACKS:
                client.signalled_at = time.monotonic()
                client.process.signal(client.hello.dump_signal)
            case session.Do.TERMINATE:
                client.process.signal(signal.SIGCONT)
                client.process.signal(self._policy.termination_signal)
            case session.Do.KILL:
                client.process.signal(signal.SIGKILL)

    def _accept(self) -> None:
        client, self._pending = self._pending, None
        assert client is not None
        self._client = client
        self._renew_policy()
        try:
            self._open_session(client)
        except OSError as exc:
            # Out of descriptors, for one. Nobody would watch it: without a session it asks again.
            rank, pid = client.hello.rank, client.process.pid
            logger.error("rank %d (pid %d) cannot be watched now: %s", rank, pid, exc)  # noqa: TRY400
            self._process(session.Happened.CLOSED)

    def _open_session(self, client: _Client) -> None:
        client.dump_fd, dump_write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(client.dump_fd, False)
            self._take_slot(client)
            self.memory.words[W_SAVE] = self._save_word
            accepted = messages.Accepted(
                self._state.session_id, self._config, list(self._layout.sections)
            )
            channel = client.connection.channel
            channel.send(accepted, [self.memory.fd, dump_write_fd])
        finally:
            os.close(dump_write_fd)
        self._server.loop.watch(channel, self._read_client, write=channel.wants_to_write)
        self._server.loop.watch(client.dump_fd, self._read_dump)
        pidfd = client.process.fileno()
        if pidfd is not None:
            self._server.loop.watch(pidfd, lambda: self._process(session.Happened.DIED))
        rank, pid = client.hello.rank, client.process.pid
        self._server.notify_launcher(messages.RankJoined(self.local_rank, rank, pid))
        logger.debug("rank %d (pid %d) joined its monitor", rank, pid)

    def _take_slot(self, client: _Client) -> None:
        fds = client.connection.channel.take_fds(1) if client.hello.hands_back_slot else []
        for fd in fds:
            try:
                adopted = SlotMemory.adopt(fd, self._layout, must_be_sealed=True)
            except SlotError as exc:
                os.close(fd)
                logger.info("rank %d gets a new slot, for %s", client.hello.rank, exc)
            else:
                self.memory.close()
                self.memory = adopted
                self._server.notify_launcher(messages.SlotReplaced(self.local_rank), [fd])
                return
        self.memory.clear()

    def _refuse(self, reason: str) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        rank, pid = pending.hello.rank, pending.process.pid
        self._record_refusal(f"rank {rank}: pid {pid} was refused: {reason}")
        pending.connection.channel.send(messages.Refused(reason))
        pending.connection.channel.close()
        pending.process.close()

    def _end(self) -> None:
        client, self._client = self._client, None
        assert client is not None
        view = self._look(client)
        self._server.loop.unwatch(client.connection.channel)
        client.connection.channel.close()
        pidfd = client.process.fileno()
        if pidfd is not None:
            self._server.loop.unwatch(pidfd)
        client.process.close()
        self._close_dump(client)
        self._server.notify_launcher(messages.RankLeft(self.local_rank, view.iteration))
        self._lines.lost(time.monotonic())
        self._server.inquiries.testify(self)

    def _look_now(self) -> None:
        if self._state.phase is session.Phase.LIVE:
            self._process(session.Happened.WOKE)

    def _look(self, client: _Client | None = None) -> SlotView:
        """Read the slot, and pass on the first signs of life and of a step in it."""
        client = client or self._client
        view = read_slot(self.memory.words, self._layout)
        if client is not None and view.session_id:
            if view.is_active:
                self._report_life(client)
            stepped_at = view.heartbeat_first or view.step_first_close
            if stepped_at is not None:
                self._report_step(client, stepped_at)
        return view

    def _report_life(self, client: _Client) -> None:
        if not client.has_reported_life:
            client.has_reported_life = True
            self._lines.alive()

    def _report_step(self, client: _Client, at: float) -> None:
        self._report_life(client)
        if not client.has_reported_step:
            client.has_reported_step = True
            self._server.notify_launcher(messages.FirstStep(self.local_rank, at))

    def _renew_policy(self) -> None:
        asked = None if self._client is None else self._client.hello.num_warmup_iters
        self._policy = policy_of(self._config, asked)

    def _inspect(self, client: _Client) -> None:
        client.first_view = None
        if not client.process.alive():
            self._process(session.Happened.DIED)
            return
        client.stacks, client.signalled_at = bytearray(), None
        client.evidence = inspect_process(client.process.pid, client.hello.dump_signal)
        client.first_view = self._look(client)
        self._process(session.Inspected(client.evidence.can_dump))

    def _read_dump(self) -> None:
        client = self._client
        assert client is not None
        try:
            data = os.read(client.dump_fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._close_dump(client)
        elif client.stacks is not None:
            if len(client.stacks) < MAX_STACKS_BYTES:
                client.stacks += data
            self._process(session.Dumped(data.endswith(b"\n")))

    def _close_dump(self, client: _Client) -> None:
        if client.dump_fd >= 0:
            self._server.loop.unwatch(client.dump_fd)
            os.close(client.dump_fd)
            client.dump_fd = -1

    def _save(self) -> None:
        client, server = self._client, self._server
        assert client is not None
        assert client.evidence is not None
        name = f"stacks-{server.host}-c{server.cycle}-r{client.hello.rank}"
        pid, evidence, stacks = client.process.pid, client.evidence, bytes(client.stacks or b"")
        directory = server.record_dir

        def done(result: tuple[int | None, str | None] | None) -> None:
            if client is self._client:
                rss_bytes, path = result or (None, None)
                client.evidence = replace(evidence, rss_bytes=rss_bytes, stacks_path=path)
                self._process(session.Happened.SAVED)

        server.slow.submit(lambda: save_evidence(directory, name, pid, evidence, stacks), done)

    def _report_unkillable(self) -> None:
        client = self._client
        assert client is not None
        rank, pid = client.hello.rank, client.process.pid
        look = inspect_process(pid, 0)
        state, wchan = look.kernel.state, look.kernel.wchan
        self._server.notify_launcher(
            messages.RankUnkillable(self.local_rank, rank, pid, state, wchan)
        )
        logger.error(
            "rank %d (pid %d) survived SIGKILL: state %s, waits in %s; this node needs a look",
            rank,
            pid,
            state,
            wchan or "an unknown place",
        )
