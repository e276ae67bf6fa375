# SPDX-License-Identifier: Apache-2.0
"""The order of one target's lines from the caller to the confirmation; it waits for nothing.

Oldest first, the lines of a target lie in

    window       sent, not confirmed; the first of them on this connection
    spill        in files
    waiting      in memory
    buffer       not yet cut into a chunk

The window has a limit of its own. The owner of a stream holds a lock around every call.
"""

from __future__ import annotations

from collections import Counter, deque

from .limits import (
    BATCH_BYTES,
    BATCH_DELAY_S,
    MAX_LINE_BYTES,
    Chunk,
    Gap,
    MemoryBudget,
    cut_at,
    notice_of,
)
from .spill import Spill

_MAX_WINDOW_CHUNKS = 4096


class Stream:
    """The lines of one target, in order; chunks below `first_seq` belong to an earlier process."""

    def __init__(
        self, budget: MemoryBudget, spill: Spill | None, *, drops: bool, first_seq: int = 1
    ) -> None:
        self.buffer = bytearray()
        self.attention_at = 0  # size of `buffer` from which on a writer must do more than append
        self.is_urgent = False  # the whole lines in `buffer` leave at once
        self.counts: Counter[str] = Counter()  # by the names of `FunnelStats`
        self.budget = budget
        self.spill = spill
        self.drops = drops
        self._window: deque[Chunk] = deque()
        self._sent = 0  # how many of the window on this connection
        self._waiting: deque[Chunk] = deque()
        self._gap = Gap()
        self._window_bytes = 0
        self._waiting_bytes = 0
        self._next_seq = first_seq
        self._last_seq = first_seq - 1
        self._confirmed_seq = 0
        self._next_batch_at = 0.0

    def is_done(self, seq: int) -> bool:
        """Return whether every chunk up to a number is in its file, or was given up."""
        return self._confirmed_seq >= seq or (seq < self._next_seq and not self.has_chunks())

    def seq_after_cut(self) -> int:
        """Return the number of the last whole line's chunk, also if it is still in the buffer."""
        return self._next_seq if cut_at(self.buffer) else self._next_seq - 1

    @property
    def bytes_in_memory(self) -> int:
        return self._window_bytes + self._waiting_bytes + len(self.buffer)

    @property
    def unconfirmed(self) -> Gap:
        """Number of lines and bytes that are neither confirmed nor given up."""
        chunks = [*self._window, *self._waiting]
        spilled = Gap() if self.spill is None else self.spill.unread
        lines = sum(chunk.lines for chunk in chunks) + self.buffer.count(b"\n")
        size = sum(len(chunk.data) for chunk in chunks) + len(self.buffer)
        return Gap(self._next_seq - 1, lines + spilled.lines, size + spilled.size)

    def has_chunks(self) -> bool:
        return bool(self._window) or self.has_unsent()

    def has_unsent(self) -> bool:
        """Return whether a chunk would leave now if the window let it."""
        spilled = self.spill is not None and self.spill.has_unread()
        has_more = spilled or self._waiting or self._gap.lines
        return bool(has_more or self._sent < len(self._window))

    def window_is_full(self) -> bool:
        """Return whether nothing new may leave before something is confirmed."""
        has_many = len(self._window) >= _MAX_WINDOW_CHUNKS
        return has_many or self._window_bytes >= self.budget.window_bytes

    # The caller's side

    def make_way(self) -> bool:
        """Cut a full buffer into chunks; False without space where nothing may be dropped."""
        while len(self.buffer) >= BATCH_BYTES:
            end = cut_at(self.buffer)
            if not end:
                # One line so far. Look again after some more of it.
                self.attention_at = min(len(self.buffer) + BATCH_BYTES, MAX_LINE_BYTES)
                return True
            if not self._cut(end):
                return False
        self.attention_at = BATCH_BYTES
        return True

    def discard(self, data: memoryview) -> None:
        """Count bytes as dropped that nobody will take."""
        lines = bytes(data).count(b"\n")
        self._count("taken", lines, len(data))
        self._count("dropped", lines, len(data))

    def finish_line(self) -> None:
        """End the last line, which will not be continued."""
        if self.buffer and not self.buffer.endswith(b"\n"):
            self.buffer += b"\n"

    # The sender's side

    def take(self, now: float) -> Chunk | None:
        """Return the next chunk to send, or None when there is none at this moment."""
        if self._sent < len(self._window):
            chunk = self._window[self._sent]
            self.counts["chunks_resent"] += 1
        else:
            fresh = None if self.window_is_full() else self._next_fresh(now)
            if fresh is None:
                return None
            chunk = fresh
            self._window.append(chunk)
            self._window_bytes += len(chunk.data)
            self._last_seq = max(self._last_seq, chunk.seq)
        self._sent += 1
        self._next_batch_at = now + BATCH_DELAY_S
        return chunk

    def wait_s(self, now: float) -> float | None:
        """Return the seconds after which `take` is worth another try, None for an event only."""
        if self.window_is_full() or cut_at(self.buffer) == 0:
            return None
        return 0.0 if self.is_urgent else max(0.0, self._next_batch_at - now)

    def rewind(self) -> None:
        """Send all unconfirmed chunks again: the connection broke."""
        self._sent = 0

    def confirm(self, seq: int) -> bool | None:
        """Let go of everything up to `seq`."""
        if seq > self._last_seq:
            return None
        freed = lines = 0
        while self._window and self._window[0].seq <= seq:
            chunk = self._window.popleft()
            self._sent = max(0, self._sent - 1)
            freed += len(chunk.data)
            lines += chunk.lines
        self._count("confirmed", lines, freed)
        self._window_bytes -= freed
        self._confirmed_seq = max(self._confirmed_seq, seq)
        if self.spill is not None:
            self.spill.confirmed(seq)
        self.budget.add(memory=-freed)
        return freed > 0

    def move_to_spill(self) -> bool:
        """Put the unconfirmed chunks into the files at the end; False when not all fit."""
        window = list(self._window)
        if self._gap.lines:
            window.append(notice_of(self._gap))
        if self.spill is None or (window and not self.spill.put_first(window)):
            return False
        while self._waiting:
            if not self._push_out():
                return False
        return not self.buffer or self.spill.append(self._peek_chunk(len(self.buffer)))

    def give_up(self) -> Gap:
        """Drop all unconfirmed lines; return their number and size."""
        left = self.unconfirmed
        self._count("dropped", left.lines, left.size)
        self.release()
        if self.spill is not None:
            self.spill.close(keeps_files=False)
        return left

    def release(self) -> None:
        """Give the space back; nothing is sent any more."""
        self.budget.add(memory=-(self._window_bytes + self._waiting_bytes))
        self._window_bytes = self._waiting_bytes = 0
        self._window.clear()
        self._waiting.clear()
        self._sent = 0
        self.buffer.clear()

    # Inside

    def _next_fresh(self, now: float) -> Chunk | None:
        while not self._gap.lines and self.spill is not None and self.spill.has_unread():
            chunk = self.spill.read()
            if chunk is not None:
                self.budget.add(memory=len(chunk.data))
                return chunk
            self._drop_oldest()
        if not self._waiting and not self._gap.lines:
            self._cut_if_due(now)
        if self._gap.lines:
            # What was given up is older than all that has not been sent.
            chunk, self._gap = notice_of(self._gap), Gap()
            self.budget.add(memory=len(chunk.data))
            return chunk
        if not self._waiting:
            return None
        chunk = self._waiting.popleft()
        self._waiting_bytes -= len(chunk.data)
        return chunk

    def _cut_if_due(self, now: float) -> None:
        if not self.is_urgent and now < self._next_batch_at:
            return
        end = cut_at(self.buffer)
        if end and not self._cut(end):
            # Others hold the memory, and what this target has sent is not confirmed yet.
            self._next_batch_at = now + BATCH_DELAY_S
        elif cut_at(self.buffer) == 0:
            self.is_urgent = False

    def _cut(self, end: int) -> bool:
        """Move the first bytes of the buffer into a chunk; False when there is no space."""
        chunk = self._peek_chunk(end)
        while True:
            if self._take_memory(len(chunk.data)):
                self._waiting.append(chunk)
                self._waiting_bytes += len(chunk.data)
                self._forget(end, chunk)
                return True
            if not self._waiting and self.spill is not None and self.spill.append(chunk):
                self._forget(end, chunk)
                return True
            if not self.drops:
                return False
            if not self._drop_oldest():
                # Nothing older is left that could go: these are the oldest.
                self._forget(end, chunk)
                self._give_up(Gap(chunk.seq, chunk.lines, len(chunk.data)))
                return True

    def _take_memory(self, size: int) -> bool:
        while not self.budget.take_memory(size, self._window_bytes + self._waiting_bytes):
            if not self._waiting or not self._push_out():
                return False
        return True

    def _push_out(self) -> bool:
        if self.spill is None or not self.spill.append(self._waiting[0]):
            return False
        size = len(self._waiting.popleft().data)
        self._waiting_bytes -= size
        self.budget.add(memory=-size)
        return True

    def _peek_chunk(self, end: int) -> Chunk:
        data = bytes(memoryview(self.buffer)[:end])
        if not data.endswith(b"\n"):
            data += b"\n"
        return Chunk(self._next_seq, data, data.count(b"\n"))

    def _forget(self, end: int, chunk: Chunk) -> None:
        """Remove a chunk's bytes from the buffer, and count its lines."""
        self.counts["lines_broken"] += len(chunk.data) > end
        if end == len(self.buffer):
            self.buffer.clear()
        else:
            del self.buffer[:end]
        self._next_seq += 1
        self._count("taken", chunk.lines, len(chunk.data))

    def _drop_oldest(self) -> bool:
        dropped = None if self.spill is None else self.spill.drop_oldest()
        if dropped is not None:
            self._give_up(dropped)
            return True
        if not self._waiting:
            return False
        chunk = self._waiting.popleft()
        self._waiting_bytes -= len(chunk.data)
        self.budget.add(memory=-len(chunk.data))
        self._give_up(Gap(chunk.seq, chunk.lines, len(chunk.data)))
        return True

    def _give_up(self, gap: Gap) -> None:
        self._count("dropped", gap.lines, gap.size)
        self._gap = self._gap.joined(gap)

    def _count(self, what: str, lines: int, size: int) -> None:
        self.counts[f"lines_{what}"] += lines
        self.counts[f"bytes_{what}"] += size
