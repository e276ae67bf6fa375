# SPDX-License-Identifier: Apache-2.0
"""The rank's connection to the monitor of its node, for one call.

Messages are kept until the next iteration, so that a new monitor can be sent all of them. A
connection that breaks is seen by the link's thread, which finds or starts another monitor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection

from nvidia_resiliency_ext.inprocess._monitor import messages, start
from nvidia_resiliency_ext.inprocess._monitor.messages import Event, MonitorSettings
from nvidia_resiliency_ext.inprocess._monitor.page import ProgressPage, StackDump
from nvidia_resiliency_ext.inprocess._monitor.store_threads import CONNECT
from nvidia_resiliency_ext.inprocess._monitor.timeouts import Silence
from nvidia_resiliency_ext.inprocess.attribution import Interruption
from nvidia_resiliency_ext.inprocess.exception import InternalError
from nvidia_resiliency_ext.shared_utils.children import PidHandle
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError, PeerClosedError
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks
from nvidia_resiliency_ext.shared_utils.wire import (
    FrameReader,
    receive_message,
    send_message,
    send_with_fds,
)

logger = logging.getLogger("nvrx")

_READ_BYTES = 65536
_SEND_LIMIT_S = 1.0
_LEAVE_LIMIT_S = 5.0
_JOIN_LIMIT_S = 10.0
_STABLE_S = 60.0
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_MOST_LOSSES = 8


class _UnansweredError(InternalError):
    """The monitor ends, or is too busy; another one may answer."""


class MonitorLink:
    """One rank's side of one call; `is_abandoned` once there will be no monitor any more."""

    def __init__(
        self,
        settings: MonitorSettings,
        page: ProgressPage,
        on_event: Callable[[Event], None],
        dump: StackDump | None = None,
    ) -> None:
        self._settings = settings
        self._page = page
        self._dump = dump
        self._on_event = on_event
        # Guards the connection and the reports.
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._reports: list[object] = []
        self._initial_rank = self._world_size = -1
        self._iteration = 0
        self._closed = threading.Event()
        self._leave_acknowledged = threading.Event()
        self._losses: list[float] = []
        self._thread: threading.Thread | None = None
        self._monitor: PidHandle | None = None
        self.monitor_pid: int | None = None
        self.is_abandoned = False
        self._pid = os.getpid()

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a child forked in the function: it sends nothing."""
        return os.getpid() != self._pid

    def attach(self, initial_rank: int, world_size: int) -> None:
        """Connect to the monitor of this node within 10 s; it is started if there is none."""
        self._initial_rank, self._world_size = initial_rank, world_size
        deadline = Deadline.after(messages.START_LIMIT_S)
        try:
            sock = self._connect_until(deadline, _UnansweredError)
        except _UnansweredError as error:
            raise InternalError(
                f"{error}; end the process that listens there (`ss -xlp` names it), and start the"
                " ranks again"
            ) from error
        with self._lock:
            self._sock = sock
        self._thread = threading.Thread(target=self._run, name="nvrx-link", daemon=True)
        self._thread.start()

    def begin(
        self, iteration: int, rank: int, world_size: int, participants: Collection[int]
    ) -> None:
        if self._is_inherited:
            return
        who = format_ranks(participants)
        with self._lock:
            self._iteration = iteration
            self._reports = [messages.Begun(iteration, rank, world_size, who)]
            self._send(self._reports[0])

    def report(self, kind: Interruption) -> None:
        self._report(messages.Reported(self._iteration, kind))

    def completed(self) -> None:
        self._report(messages.Completed(self._iteration))

    def arrive(self, call: str = "", place: str = "") -> None:
        """Report that this rank is ready for the next iteration, and its activity in this one."""
        self._report(messages.Arrived(self._iteration, call, place))

    def leave(self, is_lost: bool, *, is_discarded: bool = False) -> bool:
        """Send that this rank leaves the call; return whether the monitor has it within 5 s.

        A rank that rank assignment has discarded, on all ranks alike, interrupts no iteration.
        """
        if self._is_inherited:
            return False
        self._report(messages.Left(is_lost, is_discarded))
        return self._leave_acknowledged.wait(_LEAVE_LIMIT_S)

    def close(self) -> None:
        """End the connection and the thread; harmless when repeated."""
        if self._is_inherited:
            return  # the lock may be held for ever, and the connection is the parent's
        with self._lock:
            self._closed.set()
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_LIMIT_S)
            if thread.is_alive():
                logger.warning("the thread of the link to the monitor does not end")
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
        self._release_monitor()

    def _report(self, message: object) -> None:
        if self._is_inherited:
            return
        with self._lock:
            self._reports.append(message)
            self._send(message)

    def _send(self, message: object) -> None:
        if self._sock is None:
            return  # the thread says it when there is a monitor again
        try:
            send_message(self._sock, messages.FROM_RANK, message, _SEND_LIMIT_S)
        except (OSError, NvrxError) as error:
            logger.debug("the monitor does not take a message: %s", error)
            # A stream with half a message in it is of no use: the thread sees its end.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (OSError, NvrxError) as error:
                if self._closed.is_set():
                    return
                logger.warning(
                    "the monitor of this node is gone (%s); another one is needed", error
                )
            if not self._come_back():
                return

    def _listen(self) -> None:
        """Receive messages until the monitor's connection ends with an OSError or NvrxError."""
        sock, handle = self._sock, self._monitor
        assert sock is not None
        reader = FrameReader()
        silence = Silence(self._settings.heartbeat_timeout_s, time.monotonic())
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while True:
            if not poll.poll(silence.interval_s * 1000):
                silence.missed(time.monotonic())
                self._check_silence(handle, silence)
                continue
            # Not by a timeout of the socket, which is the sender's.
            data = sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            if not data:
                raise PeerClosedError("it has ended")
            silence.received(time.monotonic())
            for payload in reader.feed(data):
                message = messages.TO_RANK.decode(payload)
                if isinstance(message, messages.Left):
                    self._leave_acknowledged.set()
                elif isinstance(message, Event):
                    self._pass_on(message)

    def _check_silence(self, handle: PidHandle | None, silence: Silence) -> None:
        """Probe the monitor, or kill it after too long: later it could take us for stuck."""
        is_stopped = handle is not None and start.is_stopped(handle.pid)
        if not silence.is_over(is_stopped=is_stopped):
            with self._lock:
                self._send(messages.Probe())
            return
        if handle is not None:
            handle.signal(signal.SIGKILL)
            handle.wait(start.END_LIMIT_S)
        how = "stopped" if is_stopped else "stuck"
        raise InternalError(f"it is {how} and has said nothing for {silence.seconds:.1f} s")

    def _pass_on(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("an event could not be passed on")

    def _come_back(self) -> bool:
        """Connect to another monitor and send all messages again; return whether that worked."""
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
        if self._leave_acknowledged.is_set():
            return False  # a new monitor has nothing to do for this rank
        now = time.monotonic()
        self._losses = [*(at for at in self._losses if at > now - _STABLE_S), now]
        if len(self._losses) > _MOST_LOSSES:
            return self._give_up(f"{_MOST_LOSSES} monitors of this node ended within a minute")
        limit_s = max(self._settings.heartbeat_timeout_s, messages.START_LIMIT_S)
        try:
            sock = self._connect_until(Deadline.after(limit_s), InternalError)
        except InternalError as error:
            return self._give_up(str(error))
        if sock is None:
            return False
        with self._lock:
            if self._closed.is_set():
                sock.close()
                return False
            self._sock = sock
            for message in self._reports:
                self._send(message)
        return True

    def _give_up(self, text: str) -> bool:
        if not self._closed.is_set():
            self.is_abandoned = True
            self._pass_on(messages.StoreLost(f"this rank has no monitor any more: {text}"))
        return False

    def _connect_until(
        self, deadline: Deadline, retried: type[InternalError]
    ) -> socket.socket | None:
        """Connect, again after errors of a kind until the deadline; None when closed meanwhile."""
        pause_s = _SHORTEST_PAUSE_S
        while not self._closed.is_set():
            left_s = min(deadline.remaining(), messages.START_LIMIT_S)
            try:
                return self._connect(Deadline.after(left_s))
            except retried as error:
                if deadline.remaining() <= pause_s:
                    raise
                logger.warning("%s", error)
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _connect(self, deadline: Deadline) -> socket.socket:
        needs_torch = self._settings.store_factory != CONNECT
        sock = start.connect_or_start(deadline, needs_torch=needs_torch)
        where = sock.getpeername()
        try:
            hello, fds = self._hello()
            send_with_fds(sock, messages.FROM_RANK.encode(hello), fds, deadline.remaining())
            answer = receive_message(sock, messages.TO_RANK, deadline.remaining())
        except (OSError, NvrxError) as error:
            sock.close()
            text = f"the monitor of this node does not answer at {where}: {error}"
            raise _UnansweredError(text) from error
        if not isinstance(answer, messages.Welcome):
            sock.close()
            why = "its answer is no message of this version"
            why = answer.text if isinstance(answer, messages.Refused) else why
            raise InternalError(f"the monitor of this node refuses us: {why}")
        self._release_monitor()
        self.monitor_pid = answer.pid
        # One that is gone already is seen by its connection.
        with contextlib.suppress(OSError):
            self._monitor = PidHandle(answer.pid)
        return sock

    def _release_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()

    def _hello(self) -> tuple[messages.Hello, list[int]]:
        """Return the first message of a connection, and the descriptors that go with it."""
        with self._lock:
            begun = next((one for one in self._reports if isinstance(one, messages.Begun)), None)
        number, fds = 0, [self._page.fd]
        if self._dump is not None and self._dump.number:
            number = self._dump.number
            fds.append(self._dump.fd)
        who = (self._initial_rank, self._world_size)
        return messages.Hello(messages.VERSION, self._settings, *who, begun, number), fds
