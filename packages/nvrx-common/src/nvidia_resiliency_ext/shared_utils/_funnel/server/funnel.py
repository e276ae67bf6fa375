# SPDX-License-Identifier: Apache-2.0
"""Assembly of the root: chunks of all streams go in, come to their files, and are settled.

It knows nothing of gRPC. The service opens a source for each stream, offers its chunks, and is told
through the source's `on_progress` when something moved.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from nvidia_resiliency_ext.shared_utils.clock import Deadline

from .chunks import RETRY_CODE, Chunk, Refusal, record_end
from .files import Roots
from .queue import FunnelOptions, Queue
from .target import Pending, Source, Target, claim

_logger = logging.getLogger("LogAggregationServer")

_OLD_FILE_S = 60.0
_SMALL_BYTES = 4 << 10
_JOINED_BYTES = 64 << 10


class Funnel:
    """Takes chunks, writes them, and knows which are in their files; safe in all threads."""

    def __init__(self, options: FunnelOptions) -> None:
        self._options = options
        self._roots = Roots(options.allowed_roots or ("/",))
        self.queue = Queue(options, self._roots, self._grant)
        self._waiting: deque[Source] = deque()  # for space; guarded by the queue's lock

    # --- what the service calls

    def offer(self, source: Source, chunk: Chunk, size: int) -> bool:
        """Take a chunk whose data keeps a message of `size` bytes alive.

        Return False when it must wait: nothing more of this source may be offered until `waiting`
        is `None`, which the connection is told. A `Refusal` is raised for it and all after it.
        """
        now = time.monotonic()
        with self.queue.lock:
            if source.refusal is not None:
                raise source.refusal
            try:
                return self._take(source, chunk, size, now)
            except Refusal as refusal:
                source.refuse(refusal)
                raise

    def finish(self, source: Source, *, is_clean: bool) -> None:
        """Record the end of a source; its accepted chunks will still be written."""
        now = time.monotonic()
        with self.queue.lock:
            if source.waiting is not None:
                source.waiting[0].waiters -= 1
                source.waiting = None
            if is_clean or not source.stream_id:
                for target in source.unfinished:
                    if target.is_refused:
                        continue
                    end = Pending(source, 0, memoryview(b""), 0, now, is_end=True)
                    self._admit(target, end, now)
            source.unfinished.clear()
            for target in source.targets.values():
                target.users -= 1
                if is_clean and target.waiting and not source.is_settled:
                    # Its sender waits for the answer, and sends no more until it comes.
                    target.is_awaited = True
                    self.queue.arrange(target, now)
            source.targets.clear()
            source.current = None

    def wait(
        self, source: Source, holds: Callable[[Source], bool], timeout_s: float | None = None
    ) -> bool:
        """Wait until `holds`, asked when a source or the queue changes, is true; for threads."""
        with self.queue.settled:
            return self.queue.settled.wait_for(lambda: holds(source), timeout_s)

    def leave(self, has_left: threading.Event) -> None:
        """Note that a client has left, for the thread that waits in its call."""
        has_left.set()
        with self.queue.settled:
            self.queue.settled.notify_all()

    def trouble_of(self, source: Source) -> str:
        """Return the name of the error that keeps chunks of the source from their file, if any."""
        with self.queue.lock:
            for target in self.queue.troubled:
                if target.error and any(item.source is source for item in target.waiting):
                    return errno.errorcode.get(target.error.errno or errno.EIO, "EIO")
        return ""

    def close(self, deadline: Deadline) -> int:
        """Write everything, close all files, end the threads; return the bytes left unwritten."""
        lost = self.queue.close(deadline)
        if lost:
            _logger.error("%d bytes could not be written before the end", lost)
        return lost

    # --- taking

    def _take(self, source: Source, chunk: Chunk, size: int, now: float) -> bool:
        if self.queue.is_closed:
            raise Refusal("UNAVAILABLE", "the server is ending")
        target = source.current
        if target is None or target.path != chunk.file_path or target.is_refused:
            target = self._attach(source, chunk.file_path, now)
        length = len(chunk.data)
        self._check_limits(source, target, chunk, length)
        self.queue.received_bytes += length
        self.queue.received_chunks += 1
        source.received_bytes += length
        source.received_seq = max(source.received_seq, chunk.seq)
        if target.cycle is not None:
            self.queue.cycles.arrived(target.cycle, now)
        has_space = self.queue.has_space(target, size)
        if not has_space or target.waiters:
            refusal = _refusal(source, target, has_space=has_space)
            if refusal is not None:
                raise refusal
            source.waiting = (target, Pending(source, chunk.seq, chunk.data, size, now))
            target.waiters += 1
            self._waiting.append(source)
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
        target = self.queue.targets.get(path)
        if target is None:
            log_path = self._roots.locate(path)
            if len(self.queue.targets) >= self._options.max_files:
                self._forget_one()
            target = Target(path, log_path, self.queue.cycles.track(path, now))
            self.queue.targets[path] = target
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
            foreign = claim(chunk.data, node, target.owners)
            if foreign is not None:
                prefix, owner = foreign
                reason = f"node {node!r} may not write lines of {prefix!r}, which is of {owner!r}"
                raise Refusal("PERMISSION_DENIED", reason)

    def _admit(self, target: Target, pending: Pending, now: float) -> None:
        source = pending.source
        source.outstanding.append(pending)
        source.behind_bytes += len(pending.data)
        target.waiting.append(pending)
        target.held_bytes += pending.size
        if target.cycle is not None:
            target.cycle.is_whole = False
        self.queue.take(pending.size)
        if not pending.is_end:
            record_end(source.unfinished, target, pending.data)
        self.queue.arrange(target, now)

    def _admit_small(self, target: Target, source: Source, data: memoryview, now: float) -> None:
        """Let in a chunk without a number, joined to its source's last one if no writer has that.

        Looking after many small ones would cost more than copying them.
        """
        size = len(data)
        last = target.waiting[-1] if target.waiting else None
        if last is None or last.growing is None or last.source is not source:
            growing = bytearray(data)
            pending = Pending(source, 0, growing, size, now, growing=growing)
            self._admit(target, pending, now)
            return
        last.growing += data
        last.size += size
        if last.size >= _JOINED_BYTES:
            last.growing = None
        target.held_bytes += size
        source.behind_bytes += size
        self.queue.take(size)
        record_end(source.unfinished, target, data)
        self.queue.arrange(target, now)

    def _grant(self) -> list[Source]:
        """Accept waiting chunks that have space now, in order; return the sources to notify."""
        moved: list[Source] = []
        if not self._waiting:
            return moved
        now = time.monotonic()
        still: deque[Source] = deque()
        blocked: set[Target] = set()
        for source in self._waiting:
            if source.waiting is None:
                continue
            target, pending = source.waiting
            has_space = False if target in blocked else self.queue.has_space(target, pending.size)
            refusal = None if has_space else _refusal(source, target, has_space=has_space)
            if not has_space and refusal is None:
                blocked.add(target)
                still.append(source)
                continue
            source.waiting = None
            target.waiters -= 1
            moved.append(source)
            if target.is_refused:
                source.refuse(Refusal("UNAVAILABLE", "the file was refused meanwhile"))
            elif refusal is not None:
                source.refuse(refusal)
            else:
                self._admit(target, pending, now)
        self._waiting = still
        return moved

    def _forget_one(self) -> None:
        """Make space for another file by forgetting the one that was not used for longest."""
        for path, target in self.queue.targets.items():
            is_busy = target in self.queue.working
            if not target.users and not target.waiting and (target.is_closing or not is_busy):
                del self.queue.targets[path]
                if target.log is not None and not is_busy:
                    target.is_closing = True
                    self.queue.submit(target)
                return
        limit = self._options.max_files
        raise Refusal("RESOURCE_EXHAUSTED", f"the server writes {limit} files already")


def _refusal(source: Source, target: Target, *, has_space: bool | None) -> Refusal | None:
    """Return why a chunk that cannot be let in now may not wait for it either."""
    if has_space is None:
        if target.error is None:
            return Refusal("RESOURCE_EXHAUSTED", "the chunk is larger than the server's buffer")
        why = target.error.strerror or target.error
        reason = f"{target.path}: {why}; {target.held_bytes} bytes wait for it already"
        return Refusal("RESOURCE_EXHAUSTED", reason)
    if target.is_troubled and not source.is_patient:
        return Refusal(RETRY_CODE, f"{target.path}: it hangs, and too much waits for it already")
    return None
