# SPDX-License-Identifier: Apache-2.0
"""Assembly of the root: chunks of all streams go in, come to their files, and are settled.

It knows nothing of gRPC. The service opens a source for each stream, offers its chunks, and is told
through the source's connection when something moved. One lock guards the bookkeeping; files are
opened, written and closed by writers, without it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.clock import Clock, Deadline, SystemClock

from . import settings
from .chunks import RETRY_CODE, Refusal, record_end
from .delivery import Delivery
from .files import Roots
from .queue import Completion, FunnelState, FunnelStats, Ticker, Verdict
from .target import Pending, Source, Target

if TYPE_CHECKING:
    from .chunks import Chunk
    from .settings import FunnelOptions


_CLOSE_S = 2.0
_OLD_FILE_S = 60.0
_SMALL_BYTES = 4 << 10


class Funnel:
    """Takes chunks, writes them, and knows which are in their files; safe in all threads."""

    def __init__(self, options: FunnelOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._roots = Roots(options.allowed_roots or ("/",))
        self._state = FunnelState(options.max_buffered_bytes)
        self._ticker = Ticker(self._clock)
        self._completion = Completion(
            options.completion_idle_s, self._state, self._ticker, self._clock
        )
        self._delivery = Delivery(
            options,
            self._state,
            self._roots,
            self._ticker,
            self._clock,
            self._completion,
            self._grant,
        )
        # Sources that wait for space, first come first; guarded by the state's lock.
        self._queue: deque[Source] = deque()

    @property
    def state(self) -> FunnelState:
        """The counts and the files; take its lock to look at more than one number."""
        return self._state

    # --- what the service calls

    def offer(self, source: Source, chunk: Chunk, size: int) -> bool:
        """Take a chunk of a source.

        Args:
            source: The stream.
            chunk: The chunk.
            size: Bytes of the message that its data keeps alive.

        Returns:
            False when it must wait for space: nothing more may be offered for this source until its
            `waiting` is `None`; the connection is told then.

        Raises:
            Refusal: It is not taken, and so is nothing after it.
        """
        now = self._clock.monotonic()
        with self._state.lock:
            if source.refusal is not None:
                raise source.refusal
            try:
                return self._take(source, chunk, size, now)
            except Refusal as refusal:
                source.refuse(refusal, chunk.seq)
                raise

    def finish(self, source: Source, *, is_clean: bool) -> None:
        """Note that nothing more comes from a source; what was taken will still be written."""
        now = self._clock.monotonic()
        with self._state.lock:
            if source.waiting is not None:
                source.waiting[0].waiters -= 1
                source.waiting = None
            if is_clean or not source.stream_id:
                for target in source.unfinished:
                    if target.is_refused:
                        continue
                    end = Pending(source, 0, memoryview(b""), 0, now)
                    end.is_end = True
                    self._admit(target, end, now)
            if is_clean and not source.is_settled:
                # Its sender waits for the answer, and sends no more until it comes.
                for target in source.targets.values():
                    if target.waiting:
                        target.is_awaited = True
                        self._delivery.arrange(target, now)
            source.unfinished.clear()
            for target in source.targets.values():
                target.users -= 1
            source.targets.clear()
            source.current = None

    def wait_settled(self, source: Source, deadline: Deadline) -> bool:
        """Wait until all of a source is in its files or it is refused; for threads."""
        with self._state.settled:
            return self._state.settled.wait_for(
                lambda: source.is_settled or source.refusal is not None, deadline.timeout()
            )

    def wait_admitted(self, source: Source) -> None:
        """Wait until the source's waiting chunk has space or is refused."""
        with self._state.settled:
            self._state.settled.wait_for(lambda: source.waiting is None or self._state.is_closed)

    def trouble_of(self, source: Source) -> OSError | None:
        """Return why a chunk of the source cannot be written at present, if one cannot."""
        with self._state.lock:
            errors = [target.error for target in self._state.troubled if target.error is not None]
            if source.is_settled or not errors:
                return None
            for target in self._state.troubled:
                if target.error and any(item.source is source for item in target.waiting):
                    return target.error
            return None

    def now(self) -> float:
        """Return the monotonic time that chunks are stamped with."""
        return self._clock.monotonic()

    def stats(self) -> FunnelStats:
        return self._state.stats()

    def flush(self, deadline: Deadline) -> bool:
        """Write everything; tell whether it is done by the deadline."""
        with self._state.settled:
            self._state.is_flushing = True
            for target in list(self._state.targets.values()):
                if target.waiting and not target.is_busy:
                    self._delivery.submit(target)
            done = self._state.settled.wait_for(
                lambda: self._state.budget.held_bytes == 0 and not self._state.working,
                deadline.timeout(),
            )
            self._state.is_flushing = self._state.is_closed
            return done

    def close(self, deadline: Deadline) -> int:
        """Write everything, close all files and end the threads; harmless when repeated."""
        with self._state.lock:
            if self._state.is_closed:
                return 0
            self._state.is_closed = True
        self.flush(deadline)
        self._completion.announce(at_end=True)
        with self._state.lock:
            lost = self._state.budget.held_bytes
            idle = [target for target in self._state.open if not target.is_busy]
            for target in idle:
                target.is_closing = True
                self._delivery.submit(target)
        self._ticker.close()
        self._delivery.close(_CLOSE_S)
        return lost

    # --- taking

    def _take(self, source: Source, chunk: Chunk, size: int, now: float) -> bool:
        if self._state.is_closed:
            raise Refusal("UNAVAILABLE", "the server is ending")
        target = source.current
        if target is None or target.path != chunk.file_path or target.is_refused:
            target = self._attach(source, chunk.file_path, now)
        length = len(chunk.data)
        self._check_limits(source, target, chunk, length)
        self._state.received_bytes += length
        self._state.received_chunks += 1
        source.received_bytes += length
        source.received_seq = max(source.received_seq, chunk.seq)
        if target.cycle is not None:
            self._completion.arrived(target.cycle, now)
        verdict = self._evaluate(target, size)
        if verdict is Verdict.REFUSE:
            raise self._no_space(target)
        if verdict is Verdict.WAIT or target.waiters:
            if target.is_troubled and not source.is_patient:
                raise _not_now(target)
            source.waiting = (target, Pending(source, chunk.seq, chunk.data, size, now))
            target.waiters += 1
            self._queue.append(source)
            return False
        if chunk.seq or length > _SMALL_BYTES:
            self._admit(target, Pending(source, chunk.seq, chunk.data, size, now), now)
        else:
            self._admit_small(target, source, chunk.data, now)
        return True

    def _attach(self, source: Source, path: str, now: float) -> Target:
        if source.current is not None:
            source.used_at[source.current.path] = now
        known = source.targets.get(path)
        if known is not None:
            if not known.is_refused:
                source.current = known
                return known
            self._detach(source, known)
        elif len(source.targets) >= self._options.max_stream_files:
            self._detach_oldest(source, now)
        target = self._state.targets.get(path)
        if target is None:
            place = self._roots.locate(path)
            if len(self._state.targets) >= self._options.max_files:
                self._forget_one()
            target = Target(path, place, self._completion.track(path, now))
            self._state.targets[path] = target
        target.users += 1
        source.targets[path] = source.current = target
        return target

    def _detach(self, source: Source, target: Target) -> None:
        target.users -= 1
        del source.targets[target.path]
        source.used_at.pop(target.path, None)

    def _detach_oldest(self, source: Source, now: float) -> None:
        """Let a stream that lives long go on to new files, but not use too many at a time."""
        path = min(source.targets, key=lambda path: source.used_at.get(path, now))
        if now - source.used_at.get(path, now) < _OLD_FILE_S:
            limit = self._options.max_stream_files
            raise Refusal("RESOURCE_EXHAUSTED", f"a stream may write at most {limit} files at once")
        self._detach(source, source.targets[path])

    def _check_limits(self, source: Source, target: Target, chunk: Chunk, length: int) -> None:
        most = self._options.max_stream_bytes
        if most and source.received_bytes + length > most:
            raise Refusal("RESOURCE_EXHAUSTED", f"a stream may send at most {most} bytes")
        if self._options.verify_node_prefix:
            node = chunk.node_id or source.node_id
            foreign = settings.claim(chunk.data, node, target.owners)
            if foreign is not None:
                prefix, owner = foreign
                reason = f"node {node!r} may not write lines of {prefix!r}, which is of {owner!r}"
                raise Refusal("PERMISSION_DENIED", reason)

    def _evaluate(self, target: Target, size: int) -> Verdict:
        troubled = 0
        if target.is_troubled:
            troubled = sum(item.held_bytes for item in self._state.troubled)
        return self._state.budget.evaluate(
            size,
            target.held_bytes,
            is_failing=target.error is not None,
            troubled_held=troubled,
        )

    def _no_space(self, target: Target) -> Refusal:
        if target.error is None:
            return Refusal("RESOURCE_EXHAUSTED", "the chunk is larger than the server's buffer")
        why = target.error.strerror or target.error
        reason = f"{target.path}: {why}; {target.held_bytes} bytes wait for it already"
        return Refusal("RESOURCE_EXHAUSTED", reason)

    def _admit(self, target: Target, pending: Pending, now: float) -> None:
        source = pending.source
        source.admit(pending)
        target.put(pending)
        self._state.budget.take(pending.size)
        if not pending.is_end:
            record_end(source.unfinished, target, pending.data)
        self._delivery.arrange(target, now)

    def _admit_small(self, target: Target, source: Source, data: memoryview, now: float) -> None:
        """Let in a chunk without a number, together with the one before it where possible."""
        size = len(data)
        if target.extend_last(source, data):
            source.behind_bytes += size
            self._state.budget.take(size)
            record_end(source.unfinished, target, data)
            self._delivery.arrange(target, now)
        else:
            growing = bytearray(data)
            pending = Pending(source, 0, growing, size, now)
            pending.growing = growing
            self._admit(target, pending, now)

    def _grant(self) -> list[Source]:
        """Let in what has space now, first come first served; return whom to tell."""
        moved: list[Source] = []
        if not self._queue:
            return moved
        now = self._clock.monotonic()
        still: deque[Source] = deque()
        blocked: set[Target] = set()
        for source in self._queue:
            if source.waiting is None:
                continue
            target, pending = source.waiting
            verdict = Verdict.WAIT if target in blocked else self._evaluate(target, pending.size)
            if verdict is Verdict.WAIT and (source.is_patient or not target.is_troubled):
                blocked.add(target)
                still.append(source)
                continue
            source.waiting = None
            target.waiters -= 1
            moved.append(source)
            if target.is_refused:
                source.refuse(Refusal("UNAVAILABLE", "the file was refused meanwhile"), pending.seq)
            elif verdict is Verdict.WAIT:
                source.refuse(_not_now(target), pending.seq)
            elif verdict is Verdict.REFUSE:
                source.refuse(self._no_space(target), pending.seq)
            else:
                self._admit(target, pending, now)
        self._queue = still
        return moved

    def _forget_one(self) -> None:
        """Make space for another file by forgetting the one that was not used for longest."""
        for path, target in self._state.targets.items():
            is_at_rest = not target.is_busy or target.is_closing
            if not target.users and not target.waiting and is_at_rest:
                del self._state.targets[path]
                if target.log is not None and not target.is_busy:
                    target.is_closing = True
                    self._delivery.submit(target)
                return
        limit = self._options.max_files
        raise Refusal("RESOURCE_EXHAUSTED", f"the server writes {limit} files already")


def _not_now(target: Target) -> Refusal:
    return Refusal(RETRY_CODE, f"{target.path}: it hangs, and too much waits for it already")
