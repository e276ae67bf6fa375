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
from nvidia_resiliency_ext.shared_utils.rank_activity import inspect_kernel

from . import messages
from .hang_report import Evidence, can_dump, save_evidence
from .session import LOOKED_INTO, Do, Phase, Session
from .slot import SAVE_ASKED, W_SAVE, SlotError, SlotLayout, SlotMemory, SlotView, read_slot
from .timeout_rules import Policy, Verdict, change_limits, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvidia_resiliency_ext.fault_tolerance._core.acceptor import Connection
    from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel

    from .server import MonitorServer
    from .session import Effects, RestartLines


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

    channel: Channel
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
        self, server: MonitorServer, local_rank: int, path: str, lines: RestartLines
    ) -> None:
        self.local_rank = local_rank
        self._server = server
        self._config = dict(server.config)
        self._layout = SlotLayout(tuple(self._config["rank_section_timeouts"]))
        self.memory = SlotMemory.create(
            self._layout, directory=server.run_dir, name=f"nvrx-slot{local_rank}"
        )
        self._lines = lines
        self.session = Session(Policy.from_config(self._config))
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
        times = [self.session.wake_at, self._lines.next_check, self._refusals.next_check]
        if self._client is not None and self._client.process.fileno() is None:
            times.append(time.monotonic() + _NO_PIDFD_POLL_S)
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> None:
        client = self._client
        if client is not None and client.process.fileno() is None and not client.process.alive():
            self.carry_out(self.session.end())
        if self.session.wake_at is not None and self.session.wake_at <= now:
            self._wake()
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
        self.carry_out(self.session.condemn(verdict))

    @property
    def is_looked_into(self) -> bool:
        """Whether evidence on the rank is being gathered, or is complete."""
        return self._client is not None and self.session.phase in LOOKED_INTO

    def testimony(self) -> Testimony | None:
        """Return what is known of the rank by now; None before it was looked at."""
        client = self._client
        if client is None or client.first_view is None or not self.is_looked_into:
            return None
        assert client.evidence is not None
        after, verdict = self._look(), self.session.verdict
        late = time.monotonic() + LATE_MARGIN_S
        broken = evaluate(after, self.session.policy, self.session.started, late)
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
            signal=int(self.session.policy.termination_signal),
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
        self._pending = _Client(connection.channel, hello, process)
        client = self._client
        is_alive = client is not None and client.process.alive()
        self.carry_out(self.session.join(time.monotonic(), has_live_owner=is_alive))

    def _record_refusal(self, text: str) -> None:
        self._refusals.record(time.monotonic(), text)

    def _read_client(self) -> None:
        client = self._client
        if client is None or client.channel.is_over:
            return
        channel = client.channel
        channel.flush()
        for message in channel.receive():
            self._handle(client, message)
        if channel.is_over:
            self._server.loop.unwatch(channel)
            channel.close()
            self.carry_out(self.session.close())
        else:
            self._server.loop.watch(channel, self._read_client, write=channel.wants_to_write)

    def _handle(self, client: _Client, message: object) -> None:
        match message:
            case messages.SetTimeouts(request, changes):
                client.channel.send(messages.Answer(request, self.set_limits(changes)))
            case messages.HeldForSave(request) if self._save_word == SAVE_ASKED:
                client.held_request = request
            case messages.Ask(request) | messages.HeldForSave(request):
                self._look_now()
                client.channel.send(messages.Answer(request))
            case _:
                client.channel.is_over = True  # a second hello, or one of the other direction

    def save(self, word: int) -> None:
        """Put the word for `should_checkpoint` into the slot; a rank that waits for it goes on."""
        self._save_word = self.memory.words[W_SAVE] = word
        client = self._client
        if word != SAVE_ASKED and client is not None and client.held_request is not None:
            client.channel.send(messages.Answer(client.held_request))
            client.held_request = None

    def carry_out(self, effects: Effects) -> None:
        """Do what the session machine has decided."""
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Do) -> None:  # noqa: C901 - one for each effect
        client = self._client
        match effect:
            case Do.ACCEPT:
                self._accept()
            case Do.REFUSE:
                self._refuse("another live process has the session of this rank")
            case Do.TESTIFY:
                self._server.inquiries.testify(self)
            case _ if client is None:
                pass  # It was found dead while an effect before this one was carried out.
            case Do.END:
                self._end()
            case Do.INSPECT:
                self._inspect(client)
            case Do.ASK_STACKS:
                client.signalled_at = time.monotonic()
                client.process.signal(client.hello.dump_signal)
            case Do.SAVE_EVIDENCE:
                self._save(client)
            case Do.ACCUSE:
                self._server.inquiries.accuse(self, self.session.verdict)
            case Do.TERMINATE:
                client.process.signal(signal.SIGCONT)
                client.process.signal(self.session.policy.termination_signal)
            case Do.KILL:
                client.process.signal(signal.SIGKILL)
            case Do.REPORT_UNKILLABLE:
                self._report_unkillable(client)

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
            self.carry_out(self.session.close())

    def _open_session(self, client: _Client) -> None:
        loop, channel = self._server.loop, client.channel
        client.dump_fd, dump_write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            os.set_blocking(client.dump_fd, False)
            self._take_slot(client)
            self.memory.words[W_SAVE] = self._save_word
            accepted = messages.Accepted(
                self.session.session_id, self._config, list(self._layout.sections)
            )
            channel.send(accepted, [self.memory.fd, dump_write_fd])
        finally:
            os.close(dump_write_fd)
        loop.watch(channel, self._read_client, write=channel.wants_to_write)
        loop.watch(client.dump_fd, self._read_dump)
        pidfd = client.process.fileno()
        if pidfd is not None:
            loop.watch(pidfd, lambda: self.carry_out(self.session.end()))
        rank, pid = client.hello.rank, client.process.pid
        self._server.notify_launcher(messages.RankJoined(self.local_rank, rank, pid))
        logger.debug("rank %d (pid %d) joined its monitor", rank, pid)

    def _take_slot(self, client: _Client) -> None:
        fds = client.channel.take_fds(1) if client.hello.hands_back_slot else []
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
        pending.channel.send(messages.Refused(reason))
        pending.channel.close()
        pending.process.close()

    def _end(self) -> None:
        view = self._look()
        client, self._client = self._client, None
        assert client is not None
        self._server.loop.unwatch(client.channel)
        client.channel.close()
        pidfd = client.process.fileno()
        if pidfd is not None:
            self._server.loop.unwatch(pidfd)
        client.process.close()
        self._close_dump(client)
        self._server.notify_launcher(messages.RankLeft(self.local_rank, view.iteration))
        self._lines.lost(time.monotonic())
        self._server.inquiries.testify(self)

    def _look_now(self) -> None:
        if self.session.phase is Phase.LIVE:
            self._wake()

    def _wake(self) -> None:
        view = self._look()
        self.carry_out(self.session.wake(view, time.monotonic()))

    def _look(self) -> SlotView:
        """Read the slot, and pass on the first signs of life and of a step in it."""
        client = self._client
        view = read_slot(self.memory.words, self._layout)
        if client is None or not view.session_id:
            return view
        stepped_at = view.heartbeat_first or view.step_first_close
        if not client.has_reported_life and (view.is_active or stepped_at is not None):
            client.has_reported_life = True
            self._lines.alive()
        if not client.has_reported_step and stepped_at is not None:
            client.has_reported_step = True
            self._server.notify_launcher(messages.FirstStep(self.local_rank, stepped_at))
        return view

    def _renew_policy(self) -> None:
        asked = None if self._client is None else self._client.hello.num_warmup_iters
        self.session.policy = Policy.from_config(self._config, asked)

    def _inspect(self, client: _Client) -> None:
        client.first_view = None
        if not client.process.alive():
            self.carry_out(self.session.end())
            return
        client.stacks, client.signalled_at = bytearray(), None
        pid = client.process.pid
        client.evidence = Evidence(inspect_kernel(pid))
        client.first_view = self._look()
        answers = can_dump(pid, client.evidence.kernel, client.hello.dump_signal)
        self.carry_out(self.session.inspected(time.monotonic(), can_dump=answers))

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
            self.session.dumped(time.monotonic(), ends_line=data.endswith(b"\n"))

    def _close_dump(self, client: _Client) -> None:
        if client.dump_fd >= 0:
            self._server.loop.unwatch(client.dump_fd)
            os.close(client.dump_fd)
            client.dump_fd = -1

    def _save(self, client: _Client) -> None:
        server, evidence = self._server, client.evidence
        assert evidence is not None
        name = f"stacks-{server.host}-c{server.cycle}-r{client.hello.rank}"
        pid, stacks, directory = client.process.pid, bytes(client.stacks or b""), server.record_dir

        def done(result: tuple[int | None, str | None] | None) -> None:
            if client is self._client:
                rss_bytes, path = result or (None, None)
                client.evidence = replace(evidence, rss_bytes=rss_bytes, stacks_path=path)
                self.carry_out(self.session.saved())

        kernel = evidence.kernel
        server.slow.submit(lambda: save_evidence(directory, name, pid, kernel, stacks), done)

    def _report_unkillable(self, client: _Client) -> None:
        rank, pid = client.hello.rank, client.process.pid
        kernel = inspect_kernel(pid)
        self._server.notify_launcher(
            messages.RankUnkillable(self.local_rank, rank, pid, kernel.state, kernel.wchan)
        )
        logger.error(
            "rank %d (pid %d) survived SIGKILL: state %s, waits in %s; this node needs a look",
            *(rank, pid, kernel.state, kernel.wchan or "an unknown place"),
        )
