# SPDX-License-Identifier: Apache-2.0
"""Owns the monitor's side of one local rank: its socket and slot, and who has the session."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._core.acceptor import Acceptor, Connection, RefusalLog
from nvidia_resiliency_ext.shared_utils.children import PidHandle

from . import messages
from .session import RankSession
from .slot import SAVE_ASKED, W_SAVE, SlotError, SlotLayout, SlotMemory, SlotView, read_slot
from .timeout_rules import Verdict

if TYPE_CHECKING:
    from nvidia_resiliency_ext.fault_tolerance import rank_monitor_state_machine

    from .server import MonitorServer


logger = logging.getLogger("nvrx")

HELLO_LIMIT_S = 5.0
MAX_PENDING = 8
_NO_PIDFD_POLL_S = 0.1


class RestartLines:
    """Writes a rank's layered-restart lines, one per `interval_s` in a restart, if anywhere."""

    def __init__(
        self, restarter: rank_monitor_state_machine.RestarterEventLogger | None, interval_s: float
    ) -> None:
        self._machine: rank_monitor_state_machine.RankMonitorStateMachine | None = None
        if restarter is not None:
            from nvidia_resiliency_ext.fault_tolerance import rank_monitor_state_machine

            self._machine = rank_monitor_state_machine.RankMonitorStateMachine(restarter)
        self._interval_s = interval_s
        self.next_check: float | None = None  # When `check` is due (monotonic s).

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
        """Log at intervals that a restart is still running."""
        if self._machine is not None and self.next_check is not None and self.next_check <= now:
            self._machine.periodic_restart_check()
            self.next_check = now + self._interval_s

    def finish(self) -> None:
        if self._machine is not None:
            self._machine.handle_signal()


class RankPort:
    """One local rank: its socket, its slot, its limits, and at most one session."""

    def __init__(
        self, server: MonitorServer, local_rank: int, path: str, lines: RestartLines
    ) -> None:
        self.server = server
        self.local_rank = local_rank
        self.lines = lines
        self.config = dict(server.config)
        self.layout = SlotLayout(tuple(self.config["rank_section_timeouts"]))
        self.memory = SlotMemory.create(
            self.layout, directory=server.run_dir, name=f"nvrx-slot{local_rank}"
        )
        self.session: RankSession | None = None
        self.save_word = 0
        self._last_session_id = 0
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
        """Return the monotonic time at which `tick` must run next, or None."""
        times = [self.lines.next_check, self._refusals.next_check]
        if self.session is not None:
            times.append(self.session.wake_at)
            if self.session.process.fileno() is None:
                times.append(time.monotonic() + _NO_PIDFD_POLL_S)
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> None:
        session = self.session
        if session is not None:
            if session.process.fileno() is None and not session.process.alive():
                session.end()
            if session.wake_at is not None and session.wake_at <= now:
                session.wake()
        self.lines.check(now)
        self._refusals.check(now)

    def hold_at_fault(self, rule: str, reason: str) -> None:
        """End the rank because its device is unfit."""
        if self.session is None:
            return
        interval_s = float(self.config["node_health_check_interval"])
        verdict = Verdict(
            rule=rule,
            section=None,
            since=time.monotonic() - interval_s,
            limit_s=interval_s,
            iteration=self.session.look().iteration,
            reason=reason,
        )
        self.session.hold_at_fault(verdict)

    def close(self) -> None:
        """End the session without touching the process, and stop listening."""
        self._acceptor.close()
        if self.session is not None:
            self.session.end()
        self.lines.finish()
        self._refusals.finish()
        self.memory.close()

    def save(self, word: int) -> None:
        """Put the word for `should_checkpoint` into the slot; a rank that waits for it goes on."""
        self.save_word = self.memory.words[W_SAVE] = word
        if word != SAVE_ASKED and self.session is not None:
            self.session.release_held()

    def view(self) -> SlotView:
        return read_slot(self.memory.words, self.layout)

    def renew_slot(self, session: RankSession) -> None:
        """Adopt the slot that the rank got from an earlier monitor, or else clear this one."""
        fds = session.channel.take_fds(1) if session.hello.hands_back_slot else []
        for fd in fds:
            try:
                adopted = SlotMemory.adopt(fd, self.layout, must_be_sealed=True)
            except SlotError as exc:
                os.close(fd)
                logger.info("rank %d gets a new slot, for %s", session.hello.rank, exc)
            else:
                self.memory.close()
                self.memory = adopted
                self.server.notify_launcher(messages.SlotReplaced(self.local_rank), [fd])
                break
        else:
            self.memory.clear()
        self.memory.words[W_SAVE] = self.save_word

    def _receive_hello(self, connection: Connection, received: list[object]) -> None:
        """Take the first words of a connection: only one well-formed `Hello` reaches a session."""
        hello = received[0] if len(received) == 1 else None
        if isinstance(hello, messages.Hello) and not connection.channel.is_over:
            self._acceptor.release(connection)
            self._let_in(connection, hello)
        elif received:
            self._acceptor.drop(connection)

    def _let_in(self, connection: Connection, hello: messages.Hello) -> None:
        if self.session is not None:
            self.session.read()  # Its end may be in the queue behind this hello.
        channel = connection.channel
        try:
            process = PidHandle(connection.pid or hello.pid)
        except OSError as exc:
            # Gone again, or we are out of descriptors: it will ask anew.
            self._record_refusal(f"rank {hello.rank} (pid {hello.pid}) was not let in: {exc}")
            channel.close()
            return
        if self.session is not None and self.session.process.alive():
            reason = "another live process has the session of this rank"
            self._record_refusal(f"rank {hello.rank}: pid {process.pid} was refused: {reason}")
            channel.send(messages.Refused(reason))
            channel.close()
            process.close()
            return
        if self.session is not None:
            self.session.end()
        self._last_session_id += 1
        session = RankSession(self, channel, hello, process, self._last_session_id)
        self.session = session
        try:
            session.open()
        except OSError as exc:
            # Out of descriptors, for one. Nobody would watch it: without a session it asks again.
            logger.error(  # noqa: TRY400
                "rank %d (pid %d) cannot be watched now: %s", hello.rank, process.pid, exc
            )
            session.end()

    def _record_refusal(self, text: str) -> None:
        self._refusals.record(time.monotonic(), text)
