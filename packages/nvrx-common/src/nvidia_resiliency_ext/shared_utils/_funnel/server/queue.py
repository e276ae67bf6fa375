# SPDX-License-Identifier: Apache-2.0
"""Chunks between memory and their files: how many may wait, who writes them when, and errors."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, UnsafePathError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

from .chunks import Refusal
from .cycles import Completion
from .files import LogFile, Roots, StaleLogError
from .target import Batch, Pending, Source, Target

_logger = logging.getLogger("LogAggregationServer")

_FILE_SHARE = 8
_TROUBLED_SHARE = 2
_WATCH_S = 0.25
_SYNC_S = 1.0
_USUAL_WRITERS = 2
_MAX_WRITERS = 32
_CLOSE_S = 2.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 2.0
FSYNC_POLICIES = ("never", "interval", "commit")
_LEAST = {
    "flush_bytes": 1,
    "flush_interval_s": 0,
    "completion_idle_s": 0,
    "max_buffered_bytes": 1 << 20,
    "max_files": 1,
    "max_open_files": 1,
    "max_stream_files": 1,
    "max_stream_bytes": 0,
    "stall_s": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunnelOptions:
    """How the root server treats what it gets."""

    allowed_roots: tuple[str, ...] | None  # logs lie below; `None`: anywhere, for use in process
    flush_bytes: int = 1 << 20  # a file with so much waiting, or half its share, is written at once
    flush_interval_s: float = 0.02  # ... and with less, so long after its last write
    completion_idle_s: float = 10.0  # without a chunk, until an old cycle's file is complete
    max_buffered_bytes: int = 32 << 20  # may wait in memory
    max_files: int = 4096  # are in use at one time
    max_open_files: int = 512  # ... of which so many are held open
    max_stream_files: int = 64  # may be named by one stream
    max_stream_bytes: int = 0  # may be sent by one stream; 0: any number
    verify_node_prefix: bool = False  # a rank prefix is of the first node that uses it in a file
    fsync: str = "never"  # or wait for the disk at each `interval` (1 s) or `commit` (answer)
    stall_s: float = 2.0  # a write that takes longer marks its file as stalled

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be a finite number of at least {least}"
            for name, least in _LEAST.items()
            if not least <= getattr(self, name) < math.inf
        ]
        if self.fsync not in FSYNC_POLICIES:
            problems.append(f"fsync={self.fsync!r} must be one of {', '.join(FSYNC_POLICIES)}")
        if problems:
            raise ConfigError("; ".join(problems))


class Queue:
    """Chunks that wait to be written, and the writer threads. `lock` guards every field.

    A target is with one writer at a time; files are opened, written and closed without the lock.
    There are two writers as long as they come along, and one more whenever all hang. All threads
    are daemons: one that a dead file system holds must not keep the program from ending. `grant`
    lets in what has space now and returns whose it is; it is called with the lock held.
    """

    def __init__(
        self, options: FunnelOptions, roots: Roots, grant: Callable[[], list[Source]]
    ) -> None:
        self._options = options
        self._roots = roots
        self._grant = grant
        self.lock = threading.Lock()
        self.settled = threading.Condition(self.lock)  # chunks moved, or no writer works
        self.held_bytes = self.peak_bytes = 0
        self.targets: OrderedDict[str, Target] = OrderedDict()  # longest unwritten first
        self.open: OrderedDict[Target, None] = OrderedDict()  # likewise, those with an open file
        self.working: dict[Target, float | None] = {}  # None: waits for a writer; else since when
        self.troubled: set[Target] = set()  # cannot be written at present
        self.is_closed = False
        self.received_bytes = self.received_chunks = 0
        self.written_bytes = self.repeated_chunks = self.lost_bytes = 0
        self._file_limit_bytes = max(1, options.max_buffered_bytes // _FILE_SHARE)
        # Nobody may have to wait for space while what is there waits for more.
        self._enough_bytes = min(options.flush_bytes, self._file_limit_bytes // 2)
        self._is_watching = False
        self.has_ended = False
        self._ready: deque[Target] = deque()
        self._work = threading.Condition(self.lock)
        self._writers: list[threading.Thread] = []
        self._idle_writers = 0
        self._loop = EventLoop(call=_guarded)
        self._timer = threading.Thread(
            target=self._run_timer, name="nvrx-funnel-timer", daemon=True
        )
        self._timer.start()
        self.cycles = Completion(options.completion_idle_s, self.lock, self._call_at)
        if options.fsync == "interval":
            self._call_at(time.monotonic() + _SYNC_S, self._sync_all)

    def stats(self) -> dict[str, int]:
        with self.lock:
            return {
                "bytes_received": self.received_bytes,
                "chunks_received": self.received_chunks,
                "bytes_written": self.written_bytes,
                "chunks_repeated": self.repeated_chunks,
                "bytes_lost": self.lost_bytes,
                "buffered_bytes": self.held_bytes,
                "buffered_bytes_peak": self.peak_bytes,
                "files": len(self.targets),
                "open_files": len(self.open),
                "failing_files": sum(t.error is not None for t in self.troubled),
            }

    def has_space(self, target: Target, size: int) -> bool | None:
        """Return whether a chunk for a target has space now, or None if it is not to wait for it.

        One file may hold an eighth of the buffer, all that cannot be written half of it. A
        chunk for a failing file does not wait: its sender, who still has it, is told. Locked.
        """
        limit, held = self._options.max_buffered_bytes, target.held_bytes
        if size > limit:
            return None
        is_over = held > 0 and held + size > self._file_limit_bytes
        if target.is_troubled and not is_over:
            troubled = sum(item.held_bytes for item in self.troubled)
            is_over = troubled > 0 and troubled + size > limit // _TROUBLED_SHARE
        if is_over:
            return None if target.error is not None else False
        return self.held_bytes + size <= limit

    def take(self, size: int) -> None:
        """Count bytes in that wait for their file; locked."""
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def arrange(self, target: Target, now: float) -> None:
        """Schedule a write of a target's chunks, now or when enough time has passed; locked."""
        if target in self.working or target.error is not None:
            return
        is_enough = self._is_enough(target)
        if target.is_scheduled and not is_enough:
            return
        due = target.written_at + self._options.flush_interval_s
        if is_enough or now >= due:
            self.submit(target)
        else:
            target.is_scheduled = True
            self._call_at(due, lambda: self._on_due(target))

    def submit(self, target: Target) -> None:
        """Give a target, which no writer has, to the writers now; locked."""
        self.working[target] = None
        self._ready.append(target)
        if self._idle_writers:
            self._work.notify()
        elif len(self._writers) < _USUAL_WRITERS:
            self._start_writer()
        if not self._is_watching:
            self._is_watching = True
            self._call_at(time.monotonic() + _WATCH_S, self._watch)

    def close(self, deadline: Deadline) -> int:
        """Write everything, close all files and end the threads; return the bytes left over."""
        with self.lock:
            if self.is_closed:
                return 0
            self.is_closed = True
            for target in list(self.targets.values()):
                if target.waiting and target not in self.working:
                    self.submit(target)
            self.settled.wait_for(
                lambda: self.held_bytes == 0 and not self.working, deadline.timeout()
            )
        self.cycles.announce(at_end=True)
        with self.lock:
            lost = self.held_bytes
            for target in [target for target in self.open if target not in self.working]:
                target.is_closing = True
                self.submit(target)
            self.has_ended = True
            self._work.notify_all()
        self._loop.wake()
        self._timer.join()
        for thread in self._writers:
            thread.join(_CLOSE_S)
        return lost

    # --- times

    def _call_at(self, when: float, function: Callable[[], None]) -> None:
        def arrange() -> None:
            self._loop.call_at(when, function)

        self._loop.post(arrange)

    def _run_timer(self) -> None:
        while not self.has_ended:
            self._loop.run_once()
        self._loop.close()

    def _on_due(self, target: Target) -> None:
        with self.lock:
            target.is_scheduled = False
            if target in self.working:
                return
            if target.waiting:
                self.submit(target)
            elif target.error is not None:
                # Only the disk's cache could not be written; there is nothing to try again.
                target.error = None
                self.troubled.discard(target)

    def _watch(self) -> None:
        """Look after writers that hang, as long as any work."""
        now = time.monotonic()
        hanging = []
        with self.lock:
            for target, since in self.working.items():
                is_slow = since is not None and now - since > self._options.stall_s
                if is_slow and not target.is_stalled:
                    target.is_stalled = True
                    self.troubled.add(target)
                    hanging.append(target.path)
            self._is_watching = bool(self.working)
            if self._is_watching:
                self._call_at(now + _WATCH_S, self._watch)
            moved = self._grant() if hanging else []
            self.settled.notify_all()
            if self._ready and not self._idle_writers and len(self._writers) < _MAX_WRITERS:
                self._start_writer()
        _notify(moved)
        for path in hanging:
            _logger.warning("writing %r hangs; its data waits", path)

    def _sync_all(self) -> None:
        with self.lock:
            for target in self.open:
                if target.is_unsynced and target not in self.working:
                    self.submit(target)
        self._call_at(time.monotonic() + _SYNC_S, self._sync_all)

    # --- writers

    def _start_writer(self) -> None:
        name = f"nvrx-funnel-writer-{len(self._writers)}"
        thread = threading.Thread(target=self._run_writer, name=name, daemon=True)
        self._writers.append(thread)
        thread.start()

    def _run_writer(self) -> None:
        while True:
            with self.lock:
                while not self._ready:
                    if self.has_ended:
                        return
                    self._idle_writers += 1
                    self._work.wait()
                    self._idle_writers -= 1
                target = self._ready.popleft()
            try:
                self._serve(target)
            except Exception as error:
                # One target's bug must not stop all others, nor hold its file for ever.
                _logger.exception("writing %r failed in an unforeseen way", target.path)
                self._close_log(target)
                self._on_error(target, OSError(f"{type(error).__name__}: {error}"))

    def _serve(self, target: Target) -> None:
        """Write the waiting chunks of a target; in a writer's thread, which alone has it."""
        while True:
            with self.lock:
                self.working[target] = time.monotonic()
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
            except OSError as error:
                self._close_log(target)
                if isinstance(error, StaleLogError):
                    continue
                if isinstance(error, UnsafePathError):
                    self._on_unsafe(target, error)
                else:
                    self._on_error(target, error)
                return
            if not self._on_written(target, chunks, plan):
                return

    def _serve_idle(self, target: Target) -> None:
        if target.is_unsynced and target.log is not None:
            target.is_unsynced = False
            target.log.sync()
        if target.is_closing:
            self._close_log(target)
        with self.lock:
            target.is_closing = False
            self._release(target)
            if target.waiting:
                self.arrange(target, time.monotonic())

    def _open_log(self, target: Target) -> LogFile:
        target.log = LogFile(self._roots, target.log_path)
        with self.lock:
            self.open[target] = None
            if len(self.open) > self._options.max_open_files:
                oldest = next((t for t in self.open if t not in self.working), None)
                if oldest is not None:
                    oldest.is_closing = True
                    self.submit(oldest)
        return target.log

    def _close_log(self, target: Target) -> None:
        if target.log is not None:
            target.log.close()
            target.log = None
        with self.lock:
            self.open.pop(target, None)

    def _release(self, target: Target) -> None:
        self.working.pop(target, None)
        self.settled.notify_all()

    def _is_enough(self, target: Target) -> bool:
        """Return whether a target's chunks are to be written now, without waiting for more."""
        is_full = target.held_bytes >= self._enough_bytes
        return is_full or target.is_awaited or self.is_closed

    def _on_written(self, target: Target, chunks: list[Pending], plan: Batch) -> bool:
        """Settle a batch; tell whether to go on with the same target at once."""
        now = time.monotonic()
        with self.lock:
            was_troubled, error = target.is_troubled, target.error
            target.error, target.is_stalled = None, False
            self.troubled.discard(target)
            target.written_at = now
            target.is_unsynced = self._options.fsync == "interval"
            if target in self.open:
                self.open.move_to_end(target)
            if target.path in self.targets:
                self.targets.move_to_end(target.path)
            self.written_bytes += sum(map(len, plan.buffers))
            self.repeated_chunks += plan.repeated
            self.held_bytes -= target.done(chunks)
            moved = set()
            for pending in chunks:
                pending.source.settle(pending)
                moved.add(pending.source)
            if target.cycle is not None and not target.waiting:
                self.cycles.written(target.cycle)
            moved.update(self._grant())
            # An error's first success was a careful, small batch: go on.
            goes_on = bool(target.waiting) and (was_troubled or self._is_enough(target))
            if not goes_on:
                self._release(target)
                if target.waiting:
                    self.arrange(target, now)
            self.settled.notify_all()
        if error is not None:
            _logger.info("%r can be written again", target.path)
        _notify(moved)
        return goes_on

    def _on_error(self, target: Target, error: OSError) -> None:
        with self.lock:
            is_new = target.error is None
            retry_s = _FIRST_RETRY_S if is_new else min(_LONGEST_RETRY_S, target.retry_s * 2)
            target.error, target.retry_s = error, retry_s
            target.is_stalled = False
            self.troubled.add(target)
            self._release(target)
            self._call_at(time.monotonic() + retry_s, lambda: self._on_due(target))
            moved = self._grant()
        if is_new:
            why = error.strerror or error
            _logger.error("%r cannot be written: %s; its data waits", target.path, why)
        _notify(moved)

    def _on_unsafe(self, target: Target, error: OSError) -> None:
        reason = f"not a place for a log: {target.path!r}: {error.strerror or error}"
        refusal = Refusal("INVALID_ARGUMENT", reason)
        with self.lock:
            target.is_refused = True
            self.targets.pop(target.path, None)
            self.troubled.discard(target)
            chunks = list(target.waiting)
            self.held_bytes -= target.done(chunks)
            moved = set()
            for pending in chunks:
                self.lost_bytes += len(pending.data)
                pending.source.behind_bytes -= len(pending.data)
                # It stays at its place there, so that no acknowledgement passes it.
                pending.data = memoryview(b"")
                pending.source.refuse(refusal)
                moved.add(pending.source)
            self._release(target)
            moved.update(self._grant())
        _notify(moved)


def _notify(sources: Iterable[Source]) -> None:
    """Notify connections of the progress of their sources; with no lock held."""
    for source in sources:
        source.on_progress(source)


def _guarded(call: Callable[[], None]) -> None:
    """Call a function at the boundary of a thread, which must outlive a bug in it."""
    try:
        call()
    except Exception:
        _logger.exception("a call of the log funnel failed in an unforeseen way")
