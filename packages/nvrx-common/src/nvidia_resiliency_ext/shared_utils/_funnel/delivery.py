# SPDX-License-Identifier: Apache-2.0
"""Owns how chunks come from memory into files: when, by whom, and what becomes of errors.

A target is with one writer at a time. Files are opened, written and closed without the lock.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import UnsafePathError

from .chunks import Refusal
from .files import LogFile, StaleLogError
from .queue import Writers, notify
from .target import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.shared_utils.clock import Clock

    from .files import Roots
    from .queue import Completion, FunnelState, Ticker
    from .settings import FunnelOptions
    from .target import Pending, Source, Target


_logger = logging.getLogger("LogAggregationServer")

_WATCH_S = 0.25
_SYNC_S = 1.0
_MAX_WRITERS = 32


class Delivery:
    """Writes what waits for targets. `arrange` and `submit` are called with the lock held.

    Args:
        grant: Lets in what has space now and returns whom to tell; called with the lock held.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of one funnel
        self,
        options: FunnelOptions,
        state: FunnelState,
        roots: Roots,
        ticker: Ticker,
        clock: Clock,
        completion: Completion,
        grant: Callable[[], list[Source]],
    ) -> None:
        self._options = options
        self._state = state
        self._roots = roots
        self._ticker = ticker
        self._clock = clock
        self._completion = completion
        self._grant = grant
        # Nobody may have to wait for space while what is there waits for more.
        self._enough_bytes = min(options.flush_bytes, state.budget.file_limit_bytes // 2)
        self._is_watching = False
        self._writers = Writers(self._serve, _MAX_WRITERS)
        if options.fsync == "interval":
            self._ticker.call_at(self._clock.monotonic() + _SYNC_S, self._sync_all)

    def close(self, timeout_s: float) -> bool:
        """End the writers; tell whether all have ended."""
        return self._writers.close(timeout_s)

    def arrange(self, target: Target, now: float) -> None:
        """Have what waits for a target written, now or when enough time has passed."""
        if target.is_busy or target.error is not None:
            return
        is_enough = self._is_enough(target)
        if target.is_scheduled and not is_enough:
            return
        due = target.written_at + self._options.flush_interval_s
        if is_enough or now >= due:
            self.submit(target)
        else:
            target.is_scheduled = True
            self._ticker.call_at(due, lambda: self._on_due(target))

    def submit(self, target: Target) -> None:
        """Give a target to the writers now."""
        target.is_busy = True
        self._state.working.add(target)
        self._writers.submit(target)
        if not self._is_watching:
            self._is_watching = True
            self._ticker.call_at(self._clock.monotonic() + _WATCH_S, self._watch)

    def _is_enough(self, target: Target) -> bool:
        """Tell whether what waits for a target is not to be kept for more."""
        is_full = target.held_bytes >= self._enough_bytes
        return is_full or target.is_awaited or self._state.is_flushing

    def _on_due(self, target: Target) -> None:
        with self._state.lock:
            target.is_scheduled = False
            if target.is_busy:
                return
            if target.waiting:
                self.submit(target)
            elif target.error is not None:
                # Only the disk's cache could not be written; there is nothing to try again.
                target.error = None
                self._state.troubled.discard(target)

    def _serve(self, target: Target) -> None:
        """Write what waits for a target; in a writer's thread, which alone has it."""
        while True:
            with self._state.lock:
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
        with self._state.lock:
            target.is_closing = False
            self._release(target)
            if target.waiting:
                self.arrange(target, self._clock.monotonic())

    def _open_log(self, target: Target) -> LogFile:
        target.log = LogFile(self._roots, target.place)
        with self._state.lock:
            self._state.open[target] = None
            if len(self._state.open) > self._options.max_open_files:
                oldest = next((t for t in self._state.open if not t.is_busy), None)
                if oldest is not None:
                    oldest.is_closing = True
                    self.submit(oldest)
        return target.log

    def _close_log(self, target: Target) -> None:
        if target.log is not None:
            target.log.close()
            target.log = None
        with self._state.lock:
            self._state.open.pop(target, None)

    def _release(self, target: Target) -> None:
        target.is_busy = False
        target.working_since = None
        self._state.working.discard(target)
        if not self._state.working:
            self._state.settled.notify_all()

    def _on_written(self, target: Target, chunks: list[Pending], plan: Batch) -> bool:
        """Settle a batch; tell whether to go on with the same target at once."""
        now = self._clock.monotonic()
        with self._state.lock:
            was_troubled, error = target.is_troubled, target.error
            target.error, target.is_stalled = None, False
            self._state.troubled.discard(target)
            target.written_at = now
            target.is_unsynced = self._options.fsync == "interval"
            if target in self._state.open:
                self._state.open.move_to_end(target)
            if target.path in self._state.targets:
                self._state.targets.move_to_end(target.path)
            size = sum(map(len, plan.buffers))
            target.written_bytes += size
            self._state.written_bytes += size
            self._state.repeated += plan.repeated
            self._state.budget.give(target.done(chunks))
            moved = set()
            for pending in chunks:
                pending.source.settle(pending)
                moved.add(pending.source)
            if target.cycle is not None:
                target.cycle.flushed_at = self._clock.wall()
                self._completion.check_after(target.cycle.arrived_at)
            moved.update(self._grant())
            # An error's first success was a careful, small batch: go on.
            goes_on = bool(target.waiting) and (was_troubled or self._is_enough(target))
            if not goes_on:
                self._release(target)
                if target.waiting:
                    self.arrange(target, now)
            self._state.settled.notify_all()
        if error is not None:
            _logger.info("%r can be written again", target.path)
        notify(moved)
        return goes_on

    def _on_error(self, target: Target, error: OSError) -> None:
        with self._state.lock:
            is_new = target.error is None
            retry_s = target.failed(error)
            target.is_stalled = False
            self._state.troubled.add(target)
            self._release(target)
            self._ticker.call_at(self._clock.monotonic() + retry_s, lambda: self._on_due(target))
            moved = self._grant()
            self._state.settled.notify_all()
        if is_new:
            why = error.strerror or error
            _logger.error("%r cannot be written: %s; its data waits", target.path, why)
        notify(moved)

    def _on_unsafe(self, target: Target, error: OSError) -> None:
        reason = f"not a place for a log: {target.path!r}: {error.strerror or error}"
        refusal = Refusal("INVALID_ARGUMENT", reason)
        with self._state.lock:
            target.is_refused = True
            self._state.targets.pop(target.path, None)
            self._state.troubled.discard(target)
            chunks = list(target.waiting)
            self._state.budget.give(target.done(chunks))
            moved = set()
            for pending in chunks:
                self._state.lost_bytes += len(pending.data)
                pending.source.abandon(pending)
                pending.source.refuse(refusal, pending.seq)
                moved.add(pending.source)
            self._release(target)
            moved.update(self._grant())
            self._state.settled.notify_all()
        notify(moved)

    def _watch(self) -> None:
        """Look after writers that hang, as long as any work."""
        now = self._clock.monotonic()
        hanging = []
        with self._state.lock:
            for target in self._state.working:
                since = target.working_since
                is_slow = since is not None and now - since > self._options.stall_s
                if is_slow and not target.is_stalled:
                    target.is_stalled = True
                    self._state.troubled.add(target)
                    hanging.append(target.path)
            self._is_watching = bool(self._state.working)
            if self._is_watching:
                self._ticker.call_at(now + _WATCH_S, self._watch)
            moved = self._grant() if hanging else []
            self._state.settled.notify_all()
        notify(moved)
        self._writers.relieve()
        for path in hanging:
            _logger.warning("writing %r hangs; its data waits", path)

    def _sync_all(self) -> None:
        with self._state.lock:
            for target in self._state.open:
                if target.is_unsynced and not target.is_busy:
                    self.submit(target)
        self._ticker.call_at(self._clock.monotonic() + _SYNC_S, self._sync_all)
