# SPDX-License-Identifier: Apache-2.0
"""Where the threads of one target meet: writers, gRPC's sender, the sender thread, and who waits.

It owns the lock around a `Stream` and says who waits for what; it knows neither gRPC nor threads.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import (
    DeadlineExceededError,
    LogFunnelClosedError,
    LogTargetRefusedError,
)

from .limits import BATCH_BYTES, Chunk, Gap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .limits import MemoryBudget, Notices
    from .spill import Spill
    from .stream import Stream


_PLAIN_MAX_BYTES = 4 * 1024 * 1024
_PLAIN_PAUSE_S = 1.0
_COUNTERS = (
    *("lines_taken", "bytes_taken", "lines_confirmed", "bytes_confirmed", "lines_dropped"),
    *("bytes_dropped", "lines_broken", "chunks_resent", "bytes_in_memory"),
)


class Leftover(NamedTuple):
    """What was not confirmed in the end."""

    unconfirmed: Gap
    place: str
    """The directory where it waits for a later process; empty when it is lost."""
    is_whole: bool
    """All of it waits there."""


@dataclass(slots=True, eq=False)
class Sending:
    """One call.

    Attributes:
        is_plain: Chunks are confirmed by the end of the call only, so it ends now and then.
        last_seq: The highest number that it took.
        sent_bytes: How much it took.
    """

    is_plain: bool
    last_seq: int = 0
    sent_bytes: int = 0


class SendBuffer:
    """One target's stream with its lock, which guards every field.

    Args:
        path: The target.
        stream: Its lines.
        spill: Its files, None without.
        budget: Limits shared with others.
        notices: Lines for people.
        drops: Lines that nobody will take are counted and dropped; without it writing them is an
            error.
        write_timeout_s: How long `write` may wait for space.
    """

    def __init__(  # noqa: PLR0913 - the parts that meet here
        self,
        path: str,
        stream: Stream,
        spill: Spill | None,
        budget: MemoryBudget,
        notices: Notices,
        *,
        drops: bool,
        write_timeout_s: float,
    ) -> None:
        self.path = path
        self.stream = stream
        self.reconnects = 0
        self.nonsense_answers = 0
        self._spill = spill
        self._budget = budget
        self._notices = notices
        self._drops = drops
        self._write_timeout_s = write_timeout_s
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for gRPC's sender and the sender thread
        self._done = threading.Condition(self._lock)  # for flush and close
        self._current: Sending | None = None
        self._plain_at = 0.0  # when the next call makes sense whose end confirms its lines
        self._sender_is_idle = False
        self._is_closing = False
        self._is_stopped = False
        self._sender_has_ended = False
        self._refusal: str | None = None
        self._is_hurried = False
        self._owner_pid = os.getpid()

    @property
    def is_refused(self) -> bool:
        """The server will not have these lines."""
        return self._refusal is not None

    # Writers

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes; see `LogTarget.write`."""
        stream = self.stream
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
                version = self._budget.version
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
            self._budget.wait(version, deadline.remaining())

    def _add(self, piece: memoryview) -> bool:
        self._refuse_if_closed()
        if self._refusal is not None:
            if not self._drops:
                raise LogTargetRefusedError(self.path, self._refusal)
            self.stream.discard(piece)
            return True
        if not self.stream.make_way():
            return False
        self.stream.buffer += piece
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

    # gRPC's sender

    def chunks(self, sending: Sending) -> Iterator[Chunk]:
        """Yield the chunks of a call as they come, for gRPC's thread; end its sending side."""
        while (chunk := self._next_chunk(sending)) is not None:
            yield chunk

    def _next_chunk(self, sending: Sending) -> Chunk | None:
        with self._lock:
            while True:
                is_full = sending.is_plain and sending.sent_bytes >= _PLAIN_MAX_BYTES
                if sending is not self._current or self._is_stopped or is_full:
                    return None
                now = time.monotonic()
                chunk = self.stream.take(now)
                if chunk is not None:
                    sending.last_seq = max(sending.last_seq, chunk.seq)
                    sending.sent_bytes += len(chunk.data)
                    return chunk
                is_over = self._is_closing and not self.stream.has_unsent()
                if is_over or (sending.is_plain and sending.last_seq):
                    return None
                self._wait_for_work(now)

    def _wait_for_work(self, now: float) -> None:
        timeout_s = self.stream.wait_s(now)
        if timeout_s is None and not self.stream.window_is_full():
            self.stream.attention_at = 0
            self._sender_is_idle = True
        self._work.wait(timeout_s)

    # The sender thread

    def begin(self, *, is_plain: bool) -> Sending | None:
        """Wait until a call makes sense and return it; None when there is no more to do."""
        with self._lock:
            while not self._is_finished():
                now = time.monotonic()
                is_due = self._is_closing or self.stream.is_urgent or now >= self._plain_at
                if not is_plain or (self._has_work(now) and is_due):
                    self.stream.rewind()
                    self._current = Sending(is_plain=is_plain)
                    self._work.notify_all()
                    return self._current
                if self._has_work(now):
                    self._work.wait(self._plain_at - now)
                else:
                    self._wait_for_work(now)
            return None

    def _is_finished(self) -> bool:
        ended = self._is_closing and not self.stream.buffer and not self.stream.has_chunks()
        return self._is_stopped or ended

    def _has_work(self, now: float) -> bool:
        return self.stream.has_chunks() or self.stream.wait_s(now) == 0.0

    def end(self, sending: Sending) -> None:
        """Say that a call is over: its sending side ends too."""
        with self._lock:
            if self._current is sending:
                self._current = None
            self._plain_at = time.monotonic() + _PLAIN_PAUSE_S
            self._work.notify_all()

    def confirm(self, seq: int) -> bool | None:
        """Take a confirmation; see `Stream.confirm`."""
        with self._lock:
            was_full = self.stream.window_is_full()
            result = self.stream.confirm(seq)
            if result is None:
                self.nonsense_answers += 1
            if result:
                self._done.notify_all()
                if was_full:
                    self._work.notify_all()
            return result

    def refuse(self, reason: str) -> Gap:
        """Take no more: the server will never have these lines; return what was lost."""
        with self._lock:
            lost = self.stream.give_up()
            self._refusal = reason
            self.stream.attention_at = 0
            self._done.notify_all()
        self._budget.add()
        return lost

    def pause(self, seconds: float) -> None:
        """Wait before the next try, but not for a target that is being stopped."""
        deadline = Deadline.after(seconds)
        with self._lock:
            while not deadline.expired() and not self._is_finished() and not self._is_hurried:
                self._work.wait(deadline.remaining())
            self._is_hurried = False

    def hurry(self) -> None:
        """End the present pause, or the next one: there is reason to try now."""
        with self._lock:
            self._is_hurried = True
            self._work.notify_all()

    def sender_ended(self) -> None:
        """Say that nothing will be sent any more."""
        with self._lock:
            self._sender_has_ended = True
            self._done.notify_all()

    # Who waits

    def flush(self, deadline: Deadline) -> None:
        """Wait until all whole lines written before are confirmed; see `LogTarget.flush`."""
        with self._lock:
            self._refuse_if_closed()
            stream = self.stream
            upto = stream.seq_after_cut()
            stream.is_urgent = True
            self._work.notify_all()
            while self._refusal is None and not stream.is_done(upto):
                if deadline.expired() or self._is_stopped:
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
            self.stream.finish_line()
            self.stream.is_urgent = True
            self.stream.attention_at = 0
            self._work.notify_all()
        self._budget.add()

    def wait_until_confirmed(self, deadline: Deadline) -> None:
        """Wait until everything is confirmed or given up, at most until the deadline."""
        with self._lock:
            while not (self._sender_has_ended or self._is_finished() or deadline.expired()):
                self._done.wait(deadline.timeout())

    def wait_until_ended(self, deadline: Deadline) -> bool:
        """Wait until the last call is over; False at the deadline."""
        with self._lock:
            while not self._sender_has_ended:
                if deadline.expired():
                    return False
                self._done.wait(deadline.timeout())
            return True

    def stop(self) -> None:
        """End every wait of the sender thread and of gRPC's sender."""
        with self._lock:
            self._is_stopped = True
            self._work.notify_all()
            self._done.notify_all()
        self._budget.add()

    def leave(self) -> Leftover:
        """Give everything back once no thread is left."""
        with self._lock:
            left = Gap() if self._refusal is not None else self.stream.unconfirmed
            is_whole = not left.size or self.stream.move_to_spill()
            place = self._spill.path if left.size and self._spill is not None else ""
            self.stream.release()
            if self._spill is not None:
                self._spill.close(keeps_files=bool(place))
            return Leftover(left, place, is_whole)

    def snapshot(self) -> dict[str, int]:
        """Return counters."""
        with self._lock:
            counted = {name: getattr(self.stream, name) for name in _COUNTERS}
            return counted | {
                "reconnects": self.reconnects,
                "nonsense_answers": self.nonsense_answers,
            }

    def abandon(self) -> None:
        """Make the copy in a forked child harmless: its lines are its parent's to send."""
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._is_closing = self._is_stopped = self._sender_has_ended = True
        self.stream.buffer = bytearray()
        self.stream.attention_at = 0
        if self._spill is not None:
            self._spill.forget_descriptors()
