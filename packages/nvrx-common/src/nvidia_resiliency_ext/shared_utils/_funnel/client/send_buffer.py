# SPDX-License-Identifier: Apache-2.0
"""The queue of unsent chunks of one target, shared by writers, gRPC, the sender and waiters."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import (
    DeadlineExceededError,
    LogFunnelClosedError,
    LogTargetRefusedError,
)

from .limits import BATCH_BYTES, Backoff, Chunk, Gap, Notices
from .link import Link
from .spill import Identity
from .stream import Stream

_PLAIN_MAX_BYTES = 4 * 1024 * 1024
_PLAIN_PAUSE_S = 1.0
_LONGEST_REASON = 300
_LAST_CALL_S = 2.0


@dataclass(slots=True, eq=False)
class Sending:
    """One call: whether only its end confirms chunks, its highest number, its bytes."""

    is_plain: bool
    last_seq: int = 0
    sent_bytes: int = 0


class SendBuffer:
    """One target's stream, the lock that guards it, and the thread that sends it.

    The thread connects at once and keeps a call to the server open until everything is sent.
    """

    def __init__(
        self,
        identity: Identity,
        stream: Stream,
        link: Link,
        notices: Notices,
        *,
        write_timeout_s: float,
    ) -> None:
        self.path = identity.path
        self._stream = stream
        self._stream_id = identity.stream_id
        self._link = link
        self._notices = notices
        self._write_timeout_s = write_timeout_s
        self._owner_pid = os.getpid()
        self._plain_at = 0.0  # when the next call makes sense whose end confirms its lines
        self._sender_is_idle = False
        self._is_closing = False
        self._is_stopped = False
        self._sender_has_ended = False
        self._refusal: str | None = None
        self._is_hurried = False
        self._current: Sending | None = None
        self._make_locks()
        # The thread's own.
        self._backoff = Backoff()
        self._is_plain = False
        self._was_away = False
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="nvrx-log-funnel", daemon=True)
        self._thread.start()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for gRPC's sender and the sender thread
        self._done = threading.Condition(self._lock)  # for flush and close

    # Writers

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes; see `LogTarget.write`."""
        stream = self._stream
        with self._lock:
            buffer = stream.buffer
            if len(buffer) < stream.attention_at and len(data) <= BATCH_BYTES:
                buffer += data
                return
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BATCH_BYTES):
            self._write_with_attention(view[start : start + BATCH_BYTES])

    def _write_with_attention(self, piece: memoryview) -> None:
        deadline: Deadline | None = None
        while True:
            with self._lock:
                version = self._stream.budget.version
                took = self._add(piece)
            self._notices.emit()
            if took:
                return
            deadline = deadline or Deadline.after(self._write_timeout_s)
            if deadline.expired():
                message = (
                    f"no space for more log lines for {self.path} within"
                    f" {self._write_timeout_s:g} s: the log server does not confirm any"
                )
                raise DeadlineExceededError(message)
            self._stream.budget.wait(version, deadline.remaining())

    def _add(self, piece: memoryview) -> bool:
        self._refuse_if_closed()
        if self._refusal is not None:
            if not self._stream.drops:
                raise LogTargetRefusedError(self.path, self._refusal)
            self._stream.discard(piece)
            return True
        if not self._stream.make_way():
            return False
        self._stream.buffer += piece
        if self._sender_is_idle:
            self._sender_is_idle = False
            self._work.notify_all()
        return True

    def _refuse_if_closed(self) -> None:
        if self._owner_pid != os.getpid():
            message = (
                f"the log funnel client was opened by process {self._owner_pid}, which forked this"
                " one: open a client of your own here"
            )
            raise LogFunnelClosedError(message)
        if self._is_closing:
            raise LogFunnelClosedError(f"the log target {self.path} is closed")

    # The sender thread

    def _run(self) -> None:
        try:
            while True:
                sending = self._begin()
                if sending is None or not self._after(*self._make_call(sending)):
                    return
        finally:
            with self._lock:
                self._sender_has_ended = True
                self._done.notify_all()
            self._notices.emit()

    def _begin(self) -> Sending | None:
        """Wait until a call makes sense and return it; None when there is no more to do."""
        with self._lock:
            while not self._is_finished():
                now = time.monotonic()
                is_due = self._is_closing or self._stream.is_urgent or now >= self._plain_at
                if not self._is_plain or (self._has_work(now) and is_due):
                    self._stream.rewind()
                    self._current = Sending(is_plain=self._is_plain)
                    self._work.notify_all()
                    return self._current
                if self._has_work(now):
                    self._work.wait(self._plain_at - now)
                else:
                    self._wait_for_work(now)
            return None

    def _is_finished(self) -> bool:
        ended = self._is_closing and not self._stream.buffer and not self._stream.has_chunks()
        return self._is_stopped or ended

    def _has_work(self, now: float) -> bool:
        return self._stream.has_chunks() or self._stream.wait_s(now) == 0.0

    def _wait_for_work(self, now: float) -> None:
        timeout_s = self._stream.wait_s(now)
        if timeout_s is None and not self._stream.window_is_full():
            self._stream.attention_at = 0
            self._sender_is_idle = True
        self._work.wait(timeout_s)

    def _make_call(self, sending: Sending) -> tuple[str, str, bool]:
        """Make one call; return its status, what the server said, and whether it confirmed."""
        has_progressed, status = False, "OK"
        chunks = iter(lambda: self._next_chunk(sending), None)
        try:
            try:
                call = self._call = self._link.start(
                    chunks, self.path, self._stream_id, is_plain=sending.is_plain
                )
            except (ConnectionAbortedError, ValueError, RuntimeError) as error:
                # The client closes its channel at this moment, or the interpreter ends.
                return "CANCELLED", str(error), False
            with contextlib.suppress(*self._link.call_errors):  # the status tells
                if sending.is_plain:
                    # Its end confirms what was sent, if the server could write.
                    status = str(call.result().status)
                    if status == "OK" and sending.last_seq:
                        has_progressed = self._take(self._stream_id, sending.last_seq)
                else:
                    for ack in call:
                        progress = self._take(ack.stream_id, ack.committed_seq)
                        has_progressed = progress or has_progressed
        finally:
            self._call = None
            with self._lock:
                # The call's sending side ends too.
                self._current = None
                self._plain_at = time.monotonic() + _PLAIN_PAUSE_S
                self._work.notify_all()
        if status != "OK":
            return "UNAVAILABLE", f"the server could not write: {status}", has_progressed
        details = " ".join((call.details() or "").split())
        return call.code().name, details[:_LONGEST_REASON], has_progressed

    def _next_chunk(self, sending: Sending) -> Chunk | None:
        """Wait for the next chunk of a call, in gRPC's thread; None ends its sending side."""
        with self._lock:
            while True:
                is_full = sending.is_plain and sending.sent_bytes >= _PLAIN_MAX_BYTES
                if sending is not self._current or self._is_stopped or is_full:
                    return None
                now = time.monotonic()
                chunk = self._stream.take(now)
                if chunk is not None:
                    sending.last_seq = max(sending.last_seq, chunk.seq)
                    sending.sent_bytes += len(chunk.data)
                    return chunk
                is_over = self._is_closing and not self._stream.has_unsent()
                if is_over or (sending.is_plain and sending.last_seq):
                    return None
                self._wait_for_work(now)

    def _take(self, stream_id: str, seq: int) -> bool:
        """Take a confirmation; return whether it confirms any chunk for the first time."""
        result = None
        if stream_id == self._stream_id:
            with self._lock:
                was_full = self._stream.window_is_full()
                result = self._stream.confirm(seq)
                if result is None:
                    self._stream.counts["nonsense_answers"] += 1
                if result:
                    self._done.notify_all()
                    if was_full:
                        self._work.notify_all()
        endpoint = self._link.endpoint
        if result is None:
            line = f"{endpoint} confirms lines that were never sent to it; this is ignored"
            self._notices.state("nonsense", logging.ERROR, line)
        else:
            self._backoff.reset()
            self._was_away = False
            if self._notices.is_in_trouble():
                self._notices.state("up", logging.INFO, f"{endpoint} takes lines again")
        self._notices.emit()
        return bool(result)

    def _after(self, code: str, details: str, has_progressed: bool) -> bool:
        """Prepare the next call; False when there is to be none."""
        if code == "OK" and has_progressed:
            # A plain stream that was ended to have it confirmed, or the end of a closed target.
            return True
        endpoint, outcome = self._link.endpoint, f"{code}: {details}" if details else code
        is_unknown = code == "UNIMPLEMENTED"
        if is_unknown and not self._is_plain:
            self._is_plain = True
            line = (
                f"{endpoint} knows no acknowledged streams: lines are confirmed at the end of"
                " each plain stream, and may come twice after a broken connection"
            )
            self._notices.state("plain", logging.WARNING, line)
            self._notices.emit()
            return True
        # A wrong token, or no log server at all: nothing helps but a person.
        needs_a_person = is_unknown or code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}
        self._is_plain = self._is_plain and needs_a_person
        with self._lock:
            self._stream.counts["reconnects"] += 1
        if code == "INVALID_ARGUMENT":
            self._refuse(outcome)
            return False
        if needs_a_person:
            line = f"{endpoint} does not let us in ({outcome}); lines wait here meanwhile"
            self._notices.state("refused", logging.ERROR, line)
            delay_s = self._backoff.slow_s()
        else:
            # A server that restarts is back before anybody needs to know.
            if self._was_away:
                line = f"{endpoint} is away ({outcome}); lines wait here meanwhile"
                self._notices.state("away", logging.WARNING, line)
            self._was_away = True
            delay_s = self._backoff.next_s()
        self._notices.emit()
        self._pause(delay_s)
        return True

    def _refuse(self, reason: str) -> None:
        """Take no more: the server will never have these lines."""
        with self._lock:
            lost = self._stream.give_up()
            self._refusal = reason
            self._stream.attention_at = 0
            self._done.notify_all()
        self._stream.budget.add()
        self._notices.add(
            logging.ERROR,
            f"{self._link.endpoint} refuses {self.path}: {reason};"
            f" {lost.lines} lines ({lost.size} bytes) are lost",
        )
        self._notices.emit()

    def _pause(self, seconds: float) -> None:
        """Wait before the next try, but not for a target that is being stopped."""
        deadline = Deadline.after(seconds)
        with self._lock:
            while not deadline.expired() and not self._is_finished() and not self._is_hurried:
                self._work.wait(deadline.remaining())
            self._is_hurried = False

    # Who waits

    def flush(self, deadline: Deadline) -> None:
        """Wait until all whole lines written before are confirmed; see `LogTarget.flush`."""
        with self._lock:
            self._refuse_if_closed()
            stream = self._stream
            upto = stream.seq_after_cut()
            stream.is_urgent = True
            self._work.notify_all()
            while self._refusal is None and not stream.is_done(upto):
                if deadline.expired() or self._is_stopped or self._sender_has_ended:
                    left = stream.unconfirmed
                    message = (
                        f"{left.lines} lines ({left.size} bytes) for {self.path} are not"
                        " confirmed by the log server yet"
                    )
                    raise DeadlineExceededError(message)
                self._done.wait(deadline.timeout())
            if self._refusal is not None:
                raise LogTargetRefusedError(self.path, self._refusal)

    def finish(self) -> None:
        """Take no more lines, and send the last one although it has no newline."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._stream.finish_line()
            self._stream.is_urgent = True
            self._stream.attention_at = 0
            self._work.notify_all()
        self._stream.budget.add()

    def hurry(self) -> None:
        """End the present pause, or the next one: there is reason to try now."""
        with self._lock:
            self._is_hurried = True
            self._work.notify_all()

    def close(self, deadline: Deadline) -> None:
        """Wait for confirmations until the deadline; end the call and the thread."""
        with self._lock:
            while not (self._sender_has_ended or self._is_finished() or deadline.expired()):
                self._done.wait(deadline.timeout())
            # A server that has everything ends the call; one that does not is not waited for.
            last = Deadline.after(min(_LAST_CALL_S, deadline.remaining()))
            while not (self._sender_has_ended or last.expired()):
                self._done.wait(last.timeout())
            has_ended = self._sender_has_ended
            if not has_ended:
                self._is_stopped = True
                self._work.notify_all()
                self._done.notify_all()
        if not has_ended:
            self._stream.budget.add()
            call = self._call
            if call is not None:
                call.cancel()
        self._thread.join(_LAST_CALL_S)

    def leave(self) -> bool:
        """Give everything back once no thread is left; tell whether everything was confirmed."""
        stream, spill = self._stream, self._stream.spill
        with self._lock:
            left = Gap() if self._refusal is not None else stream.unconfirmed
            is_whole = not left.size or stream.move_to_spill()
            place = spill.path if left.size and spill is not None else ""
            stream.release()
            if spill is not None:
                spill.close(keeps_files=bool(place))
        if not left.size:
            return self._refusal is None
        where = f"wait in {place} for a later client" if place else "are lost"
        if place and not is_whole:
            where = f"wait in part in {place}; for the rest there was no space"
        self._notices.add(
            logging.WARNING,
            f"{left.lines} lines ({left.size} bytes) for {self.path} were not confirmed by"
            f" {self._link.endpoint}; they {where}",
        )
        return False

    def snapshot(self) -> dict[str, int]:
        """Return counters by the names of `FunnelStats`."""
        with self._lock:
            return {**self._stream.counts, "bytes_in_memory": self._stream.bytes_in_memory}

    def abandon(self) -> None:
        """Make the copy in a forked child harmless: its lines are its parent's to send."""
        self._make_locks()
        self._is_closing = self._is_stopped = self._sender_has_ended = True
        self._stream.buffer = bytearray()
        self._stream.attention_at = 0
        if self._stream.spill is not None:
            self._stream.spill.forget_descriptors()
