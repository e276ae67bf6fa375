# SPDX-License-Identifier: Apache-2.0
"""Assembly of the root: chunks of all streams go in, come to their files, and are settled.

It knows nothing of gRPC. An edge opens a source for each stream, offers its chunks, and is told
through the source's connection when something moved. One lock guards the bookkeeping; files are
opened, written and closed by writers, without it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils._funnel import prefixes
from nvidia_resiliency_ext.shared_utils._funnel.budget import Budget, Verdict
from nvidia_resiliency_ext.shared_utils._funnel.cycles import CycleFile, Cycles
from nvidia_resiliency_ext.shared_utils._funnel.log_file import LogFile, StaleLogError
from nvidia_resiliency_ext.shared_utils._funnel.places import Roots
from nvidia_resiliency_ext.shared_utils._funnel.refusal import RETRY_CODE, Refusal
from nvidia_resiliency_ext.shared_utils._funnel.streams import Pending, Source
from nvidia_resiliency_ext.shared_utils._funnel.target import Batch, Target
from nvidia_resiliency_ext.shared_utils._funnel.threads import Ticker, Writers
from nvidia_resiliency_ext.shared_utils.clock import Clock, Deadline, SystemClock
from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvidia_resiliency_ext.shared_utils._funnel.chunks import Chunk
    from nvidia_resiliency_ext.shared_utils._funnel.options import FunnelOptions

__all__ = ["Funnel", "FunnelStats"]

_logger = logging.getLogger("LogAggregationServer")

_WATCH_S = 0.25
_SYNC_S = 1.0
_CLOSE_S = 2.0
_OLD_FILE_S = 60.0
_MAX_WRITERS = 32
_NEWLINE_BYTE = 10


@dataclass(frozen=True, slots=True)
class FunnelStats:
    """What the funnel did so far; all but the counts of files only grow or are momentary."""

    received_bytes: int
    received_chunks: int
    written_bytes: int
    repeated_chunks: int
    lost_bytes: int
    buffered_bytes: int
    buffered_bytes_peak: int
    files: int
    open_files: int
    failing_files: int


class Funnel:
    """Takes chunks, writes them, and knows which are in their files; safe in all threads.

    Args:
        options: Limits and places.
        clock: The time.

    Raises:
        ConfigError: A root is no directory.
    """

    def __init__(self, options: FunnelOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._roots = Roots(options.allowed_roots or ("/",))
        # Guards everything below, and the objects in it.
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._budget = Budget(options.max_buffered_bytes)
        self._cycles = Cycles(options.completion_idle_s)
        self._cycle_check_at = float("inf")
        self.targets: OrderedDict[str, Target] = OrderedDict()
        self._open: OrderedDict[Target, None] = OrderedDict()
        self._working: set[Target] = set()
        self._troubled: set[Target] = set()
        self._queue: deque[Source] = deque()
        self._is_watching = False
        self._is_flushing = False
        self._is_closed = False
        self.received_bytes = 0
        self.received_chunks = 0
        self._written_bytes = 0
        self._repeated = 0
        self._lost_bytes = 0
        self._ticker = Ticker(self._clock)
        self._writers = Writers(self._serve, _MAX_WRITERS)
        if options.fsync == "interval":
            self._ticker.call_at(self._clock.monotonic() + _SYNC_S, self._sync_all)

    # --- what an edge calls

    def offer(
        self, source: Source, chunk: Chunk, size: int, *, waits_for_file: bool = True
    ) -> bool:
        """Take a chunk of a source.

        Args:
            source: The stream.
            chunk: The chunk.
            size: Bytes of the message that its data keeps alive.
            waits_for_file: Wait also where only this file has no room. A connection that carries
                the streams of many would hold up the others, so its chunk is refused for now.

        Returns:
            False when it must wait for room: nothing more may be offered for this source until its
            `waiting` is `None`; the connection is told then.

        Raises:
            Refusal: It is not taken, and so is nothing after it.
        """
        now = self._clock.monotonic()
        with self._lock:
            if source.refusal is not None:
                raise source.refusal
            try:
                return self._take(source, chunk, size, now, waits_for_file=waits_for_file)
            except Refusal as refusal:
                source.refuse(refusal, chunk.seq)
                raise

    def finish(self, source: Source, *, is_clean: bool) -> None:
        """Note that nothing more comes from a source; what was taken will still be written.

        Args:
            source: The stream.
            is_clean: Its sender said so. A named stream that broke off may come back and go on in
                the middle of a line.
        """
        now = self._clock.monotonic()
        with self._lock:
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
            source.unfinished.clear()
            for target in source.targets.values():
                target.users -= 1
            source.targets.clear()
            source.current = None

    def wait_settled(self, source: Source, deadline: Deadline) -> bool:
        """Wait until all of a source is in its files or it is refused; for edges with threads."""
        with self._settled:
            return self._settled.wait_for(
                lambda: source.is_settled or source.refusal is not None, deadline.timeout()
            )

    def wait_admitted(self, source: Source) -> None:
        """Wait until the source's waiting chunk has room or is refused."""
        with self._settled:
            self._settled.wait_for(lambda: source.waiting is None or self._is_closed)

    def trouble_of(self, source: Source) -> OSError | None:
        """Return why a chunk of the source cannot be written at present, if one cannot."""
        with self._lock:
            errors = [target.error for target in self._troubled if target.error is not None]
            if source.is_settled or not errors:
                return None
            for target in self._troubled:
                if target.error and any(item.source is source for item in target.waiting):
                    return target.error
            return None

    def now(self) -> float:
        """Return the monotonic time that chunks are stamped with."""
        return self._clock.monotonic()

    def stats(self) -> FunnelStats:
        """Return what was done so far."""
        with self._lock:
            return FunnelStats(
                received_bytes=self.received_bytes,
                received_chunks=self.received_chunks,
                written_bytes=self._written_bytes,
                repeated_chunks=self._repeated,
                lost_bytes=self._lost_bytes,
                buffered_bytes=self._budget.held_bytes,
                buffered_bytes_peak=self._budget.peak_bytes,
                files=len(self.targets),
                open_files=len(self._open),
                failing_files=sum(t.error is not None for t in self._troubled),
            )

    def flush(self, deadline: Deadline) -> bool:
        """Write everything; tell whether it is done by the deadline."""
        with self._settled:
            self._is_flushing = True
            for target in list(self.targets.values()):
                if target.waiting and not target.is_busy:
                    self._submit(target)
            done = self._settled.wait_for(
                lambda: self._budget.held_bytes == 0 and not self._working, deadline.timeout()
            )
            self._is_flushing = self._is_closed
            return done

    def close(self, deadline: Deadline) -> int:
        """Write everything, close all files and end the threads; harmless when repeated.

        Returns:
            The bytes that could not be written by the deadline.
        """
        with self._lock:
            if self._is_closed:
                return 0
            self._is_closed = True
        self.flush(deadline)
        self._say_complete(at_end=True)
        with self._lock:
            lost = self._budget.held_bytes
            idle = [target for target in self._open if not target.is_busy]
            for target in idle:
                target.is_closing = True
                self._submit(target)
        self._ticker.close()
        self._writers.close(_CLOSE_S)
        return lost

    # --- taking

    def _take(
        self, source: Source, chunk: Chunk, size: int, now: float, *, waits_for_file: bool
    ) -> bool:
        if self._is_closed:
            raise Refusal("UNAVAILABLE", "the server is ending")
        target = source.current
        if target is None or target.path != chunk.file_path or target.is_refused:
            target = self._attach(source, chunk.file_path, now)
        length = len(chunk.data)
        self._check_limits(source, target, chunk, length)
        self.received_bytes += length
        self.received_chunks += 1
        source.received_bytes += length
        source.received_seq = max(source.received_seq, chunk.seq)
        cycle = target.cycle
        if cycle is not None:
            cycle.arrived_at = now
            if cycle.is_complete:
                cycle.is_complete = False
                _logger.warning(
                    "Late chunk after heuristic cycle log complete: file_path=%s", cycle.path
                )
        pending = Pending(source, chunk.seq, chunk.data, size, now)
        verdict = self._judge(target, size)
        if verdict is Verdict.REFUSE:
            raise self._no_room(target)
        if verdict is Verdict.WAIT or target.waiters:
            if not waits_for_file and self._budget.has_room(size):
                raise Refusal(RETRY_CODE, f"{target.path}: too much waits for it already")
            source.waiting = (target, pending)
            target.waiters += 1
            self._queue.append(source)
            return False
        self._admit(target, pending, now)
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
        target = self.targets.get(path)
        if target is None:
            place = self._roots.locate(path)
            if len(self.targets) >= self._options.max_files:
                self._forget_one()
            target = Target(path, place, self._cycles.track(path, now))
            self.targets[path] = target
            if target.cycle is not None:
                self._check_cycles_at(now)
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
            foreign = prefixes.claim(chunk.data, node, target.owners)
            if foreign is not None:
                prefix, owner = foreign
                reason = f"node {node!r} may not write lines of {prefix!r}, which is of {owner!r}"
                raise Refusal("PERMISSION_DENIED", reason)

    def _judge(self, target: Target, size: int) -> Verdict:
        troubled = 0
        if target.is_troubled:
            troubled = sum(item.held_bytes for item in self._troubled)
        return self._budget.judge(
            size,
            target.held_bytes,
            is_failing=target.error is not None,
            troubled_held=troubled,
        )

    def _no_room(self, target: Target) -> Refusal:
        if target.error is None:
            return Refusal("RESOURCE_EXHAUSTED", "the chunk is larger than the server's buffer")
        why = target.error.strerror or target.error
        reason = f"{target.path}: {why}; {target.held_bytes} bytes wait for it already"
        return Refusal("RESOURCE_EXHAUSTED", reason)

    def _admit(self, target: Target, pending: Pending, now: float) -> None:
        source = pending.source
        source.admit(pending)
        target.put(pending)
        self._budget.take(pending.size)
        if not pending.is_end and pending.data:
            if pending.data[-1] == _NEWLINE_BYTE:
                source.unfinished.discard(target)
            else:
                source.unfinished.add(target)
        self._arrange(target, now)

    def _grant(self) -> list[Source]:
        """Let in what has room now, first come first served; return whom to tell."""
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
            verdict = Verdict.WAIT if target in blocked else self._judge(target, pending.size)
            if verdict is Verdict.WAIT:
                blocked.add(target)
                still.append(source)
                continue
            source.waiting = None
            target.waiters -= 1
            moved.append(source)
            if target.is_refused:
                source.refuse(Refusal("UNAVAILABLE", "the file was refused meanwhile"), pending.seq)
            elif verdict is Verdict.REFUSE:
                source.refuse(self._no_room(target), pending.seq)
            else:
                self._admit(target, pending, now)
        self._queue = still
        return moved

    # --- writing

    def _arrange(self, target: Target, now: float) -> None:
        if target.is_busy or target.error is not None:
            return
        due = target.written_at + self._options.flush_interval_s
        if now >= due or target.held_bytes >= self._options.flush_bytes or self._is_flushing:
            self._submit(target)
        elif not target.is_scheduled:
            target.is_scheduled = True
            self._ticker.call_at(due, lambda: self._on_due(target))

    def _submit(self, target: Target) -> None:
        target.is_busy = True
        self._working.add(target)
        self._writers.submit(target)
        if not self._is_watching:
            self._is_watching = True
            self._ticker.call_at(self._clock.monotonic() + _WATCH_S, self._watch)

    def _on_due(self, target: Target) -> None:
        with self._lock:
            target.is_scheduled = False
            if target.is_busy:
                return
            if target.waiting:
                self._submit(target)
            elif target.error is not None:
                # Only the disk's cache could not be written; there is nothing to try again.
                target.error = None
                self._troubled.discard(target)

    def _serve(self, target: Target) -> None:
        """Write what waits for a target; in a writer's thread, which alone has it."""
        while True:
            with self._lock:
                target.working_since = self._clock.monotonic()
                chunks = target.next_batch()
            try:
                if not chunks:
                    self._serve_idle(target)
                    return
                log = target.log or self._open_log(target)
                plan = Batch.plan(chunks, log)
                if plan.buffers or plan.seqs:
                    sync = self._options.fsync == "commit"
                    log.append(plan.buffers, plan.seqs, sync=sync)
                log.ends_line, log.last_stream = plan.ends_line, plan.last_stream
            except StaleLogError:
                self._close_log(target)
                continue
            except UnsafePathError as error:
                self._close_log(target)
                self._on_unsafe(target, error)
                return
            except OSError as error:
                self._close_log(target)
                self._on_error(target, error)
                return
            if not self._on_written(target, chunks, plan):
                return

    def _serve_idle(self, target: Target) -> None:
        if target.is_unsynced and target.log is not None and not target.is_closing:
            target.is_unsynced = False
            target.log.sync()
        if target.is_closing:
            self._close_log(target)
        with self._lock:
            target.is_closing = False
            self._release(target)
            if target.waiting:
                self._arrange(target, self._clock.monotonic())

    def _open_log(self, target: Target) -> LogFile:
        target.log = LogFile(self._roots, target.place)
        with self._lock:
            self._open[target] = None
            if len(self._open) > self._options.max_open_files:
                oldest = next((t for t in self._open if not t.is_busy), None)
                if oldest is not None:
                    oldest.is_closing = True
                    self._submit(oldest)
        return target.log

    def _close_log(self, target: Target) -> None:
        if target.log is not None:
            target.log.close()
            target.log = None
        with self._lock:
            self._open.pop(target, None)

    def _release(self, target: Target) -> None:
        target.is_busy = False
        target.working_since = None
        self._working.discard(target)
        if not self._working:
            self._settled.notify_all()

    def _on_written(self, target: Target, chunks: list[Pending], plan: Batch) -> bool:
        """Settle a batch; tell whether to go on with the same target at once."""
        now = self._clock.monotonic()
        with self._lock:
            was_troubled, error = target.is_troubled, target.error
            target.error, target.is_stalled = None, False
            self._troubled.discard(target)
            target.written_at = now
            target.is_unsynced = self._options.fsync == "interval"
            if target in self._open:
                self._open.move_to_end(target)
            if target.path in self.targets:
                self.targets.move_to_end(target.path)
            size = sum(map(len, plan.buffers))
            target.written_bytes += size
            self._written_bytes += size
            self._repeated += plan.repeated
            self._budget.give(target.done(chunks))
            moved = set()
            for pending in chunks:
                pending.source.settle(pending)
                moved.add(pending.source)
            if target.cycle is not None:
                target.cycle.flushed_at = self._clock.wall()
                self._check_cycles_at(target.cycle.arrived_at + self._options.completion_idle_s)
            moved.update(self._grant())
            # An error's first success was a careful, small batch: go on.
            goes_on = bool(target.waiting) and (
                was_troubled or self._is_flushing or target.held_bytes >= self._options.flush_bytes
            )
            if not goes_on:
                self._release(target)
                if target.waiting:
                    self._arrange(target, now)
            self._settled.notify_all()
        if error is not None:
            _logger.info("%r can be written again", target.path)
        _tell(moved)
        return goes_on

    def _on_error(self, target: Target, error: OSError) -> None:
        with self._lock:
            is_new = target.error is None
            retry_s = target.failed(error)
            target.is_stalled = False
            self._troubled.add(target)
            self._release(target)
            self._ticker.call_at(self._clock.monotonic() + retry_s, lambda: self._on_due(target))
            moved = self._grant()
            self._settled.notify_all()
        if is_new:
            why = error.strerror or error
            _logger.error("%r cannot be written: %s; its data waits", target.path, why)
        _tell(moved)

    def _on_unsafe(self, target: Target, error: OSError) -> None:
        reason = f"not a place for a log: {target.path!r}: {error.strerror or error}"
        refusal = Refusal("INVALID_ARGUMENT", reason)
        with self._lock:
            target.is_refused = True
            self.targets.pop(target.path, None)
            self._troubled.discard(target)
            chunks = list(target.waiting)
            self._budget.give(target.done(chunks))
            moved = set()
            for pending in chunks:
                self._lost_bytes += len(pending.data)
                pending.source.abandon(pending)
                pending.source.refuse(refusal, pending.seq)
                moved.add(pending.source)
            self._release(target)
            moved.update(self._grant())
            self._settled.notify_all()
        _tell(moved)

    # --- at times

    def _watch(self) -> None:
        """Look after writers that hang, as long as any work."""
        now = self._clock.monotonic()
        hanging = []
        with self._lock:
            for target in self._working:
                since = target.working_since
                is_slow = since is not None and now - since > self._options.stall_s
                if is_slow and not target.is_stalled:
                    target.is_stalled = True
                    self._troubled.add(target)
                    hanging.append(target.path)
            self._is_watching = bool(self._working)
            if self._is_watching:
                self._ticker.call_at(now + _WATCH_S, self._watch)
        self._writers.relieve()
        for path in hanging:
            _logger.warning("writing %r hangs; its data waits", path)

    def _sync_all(self) -> None:
        with self._lock:
            for target in self._open:
                if target.is_unsynced and not target.is_busy:
                    self._submit(target)
        self._ticker.call_at(self._clock.monotonic() + _SYNC_S, self._sync_all)

    def _check_cycles_at(self, when: float) -> None:
        if when < self._cycle_check_at:
            self._cycle_check_at = when
            self._ticker.call_at(when, self._say_complete)

    def _say_complete(self, *, at_end: bool = False) -> None:
        with self._lock:
            self._cycle_check_at = float("inf")
            done: Iterable[CycleFile] = self._cycles.take_complete(
                self._clock.monotonic(), at_end=at_end
            )
            if not at_end:
                self._check_cycles_at(self._cycles.next_check())
        for file in done:
            _logger.info(
                "Heuristic cycle log complete: file_path=%s last_flush_time=%s",
                file.path,
                _iso(file.flushed_at or 0.0),
            )

    def _forget_one(self) -> None:
        """Make room for another file by forgetting the one that was not used for longest."""
        for path, target in self.targets.items():
            if not target.users and not target.waiting and not target.is_busy:
                del self.targets[path]
                if target.log is not None:
                    target.is_closing = True
                    self._submit(target)
                return
        limit = self._options.max_files
        raise Refusal("RESOURCE_EXHAUSTED", f"the server writes {limit} files already")


def _tell(sources: Iterable[Source]) -> None:
    for source in sources:
        source.connection.progress(source)


def _iso(wall_s: float) -> str:
    moment = datetime.fromtimestamp(wall_s, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
