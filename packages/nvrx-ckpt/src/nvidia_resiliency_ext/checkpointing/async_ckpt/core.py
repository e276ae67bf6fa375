# SPDX-License-Identifier: Apache-2.0
"""Queues of asynchronous saves: schedule on the trainer, write elsewhere, finalise on all ranks.

A save is staged when it is scheduled, so the trainer may change its tensors at once. A worker
process writes it. `maybe_finalize_async_calls` collects the result of the oldest save on all ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed.checkpoint.api import CheckpointException

from nvidia_resiliency_ext.checkpointing._errors import AsyncSaveError
from nvidia_resiliency_ext.shared_utils.abort_hooks import register_abort_hook
from nvidia_resiliency_ext.shared_utils.clock import Deadline

from ._agreement import control_group
from ._callers import (
    AsyncCaller,
    Call,
    CallState,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    publication_of,
)
from ._options import QueueOptions
from ._record import SaveRecorder
from ._requests import AsyncRequest, converted

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "AsyncSaveError",
    "ObjectTracker",
    "PersistentAsyncCaller",
    "QueueFullError",
    "QueueStats",
    "TemporalAsyncCaller",
    "abort_nvrx_checkpoint",
]

logger = logging.getLogger("nvrx")

_LOOK_S = 0.25  # while this rank waits for its own writer, it hears this often of others' failures
SKIPPED = -1


class QueueFullError(AsyncSaveError):
    """`on_full="error"`: a save was scheduled while `max_pending` saves were pending."""


class ObjectTracker(type):
    """Metaclass that knows the living instances of a class, without keeping them alive.

    Its own arguments `name`, `bases` and `namespace` are those of `type`; `args` and `kwargs` of a
    call are those of the class that is instantiated.
    """

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        cls._instances: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance and remember it."""
        instance = super().__call__(*args, **kwargs)
        cls._instances.add(instance)
        return instance

    def get_instances(cls) -> list[Any]:
        """Return the instances that are alive."""
        return list(cls._instances)


@dataclass
class QueueStats:
    """Counts and times of a queue on this rank.

    Attributes:
        scheduled: Saves scheduled.
        finalized: Saves finalised.
        failed: Saves that failed.
        failed_in_a_row: Failures since the last successful save.
        skipped: Saves skipped because the queue was full.
        stage_s: Seconds that staging the last save took; training waited.
        write_s: Seconds that writing the last save took.
        finalize_s: Seconds that its finalize functions took; training waited.
        nbytes: Bytes of the last save on this rank.
        durable_lag_s: Seconds from scheduling the last save until it was durable on all ranks.
    """

    scheduled: int = 0
    finalized: int = 0
    failed: int = 0
    failed_in_a_row: int = 0
    skipped: int = 0
    stage_s: float = 0.0
    write_s: float = 0.0
    finalize_s: float = 0.0
    nbytes: int = 0
    durable_lag_s: float = 0.0


class AsyncCallsQueue(metaclass=ObjectTracker):
    """Pending saves, finalised in the order in which they were scheduled.

    Example:
        >>> from nvidia_resiliency_ext.checkpointing.async_ckpt.core import (
        ...     AsyncCallsQueue, AsyncRequest)
        >>> queue = AsyncCallsQueue()
        >>> request = AsyncRequest(print, ("saved",), [lambda: None])
        >>> queue.schedule_async_request(request)
        0
        >>> queue.maybe_finalize_async_calls(blocking=True)
        [0]
        >>> queue.close()

    Args:
        persistent: Keep one worker process. Otherwise one runs only while saves are pending, and a
            thread runs functions that cannot be pickled. Default True.
        is_daemon: Accepted for compatibility; the worker never outlives the trainer.
        cpu_priority: Niceness of the worker, 0 to 19. Default 10.
        io_priority: Class of disk priority, 0 to 3 (3 = idle); None keeps it.
        sigterm_timeout: Seconds between SIGTERM and SIGKILL when the worker is stopped. Default 30.
        cpu_shm_mode: Accepted for compatibility; the worker never has a CUDA context.
        save_timeout: Seconds after which an unwritten save counts as failed. Default
            `NVRX_CKPT_SAVE_TIMEOUT`, else never.
        max_pending: Number of saves that may hold a staging buffer, each as large as the state.
            Default `NVRX_CKPT_MAX_PENDING`, else 1.
        on_full: Reaction to a further save: "wait" until the oldest is written, "skip" (the index
            is then -1 and nothing is saved), or "error" (`QueueFullError`).
        on_error: "raise" a failed save in `maybe_finalize_async_calls`, or "warn": log and count it
            and continue. Default `NVRX_CKPT_ON_ERROR`, else "raise".
        retries: Number of retries of the worker after an error of the file system. Default 3 with
            "warn", else 0.
        retry_delay: Seconds before the first retry; doubled each time, at most 60. Default 1.
        max_failures: With "warn": raise after this number of failures in a row. Default: never.

    Raises:
        ValueError: An argument or an environment variable has a value that is not allowed.

    Attributes:
        persistent: As given.
        async_calls: The pending calls, oldest first.
    """

    _warm: ClassVar[PersistentAsyncCaller | None] = None

    def __init__(  # noqa: PLR0913 - given
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        *,
        save_timeout: float | None = None,
        max_pending: int | None = None,
        on_full: str = "wait",
        on_error: str | None = None,
        retries: int | None = None,
        retry_delay: float = 1.0,
        max_failures: int | None = None,
    ) -> None:
        self.async_calls: deque[Call] = deque()
        self.persistent = persistent
        self.is_daemon = is_daemon
        self.cpu_priority = cpu_priority
        self.io_priority = io_priority
        self.sigterm_timeout = sigterm_timeout
        self.cpu_shm_mode = cpu_shm_mode
        self.options = QueueOptions(
            save_timeout=save_timeout,
            max_pending=max_pending,
            on_full=on_full,
            on_error=on_error,
            retries=retries,
            retry_delay=retry_delay,
            max_failures=max_failures,
        )
        self._caller: AsyncCaller | None = None
        self._next_idx = 0
        self._finalized: list[int] = []  # by scheduling, and not yet returned
        self._stats = QueueStats()
        self._control = control_group()
        self._recorder = SaveRecorder()
        register_abort_hook("nvrx-ckpt", abort_nvrx_checkpoint)
        if persistent:
            self._get_async_caller().start()

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,  # noqa: ARG003 - given; the worker needs no device
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start a worker process now, for the next persistent queue; the second call does nothing.

        An existing queue has already started its own worker.

        Args:
            rank: Accepted for compatibility; the worker needs no device.
            is_daemon: As for the queue, like all that follow.
            cpu_priority: Niceness of the worker, 0 to 19. Default 10.
            io_priority: Class of disk priority, 0 to 3; None keeps it.
            sigterm_timeout: Seconds between SIGTERM and SIGKILL when the worker is stopped. Default
                30.
            cpu_shm_mode: Accepted for compatibility.
        """
        running = any(queue.persistent_caller for queue in cls.get_instances())
        if cls._warm is None and not running:
            cls._warm = PersistentAsyncCaller(
                is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode
            )
            cls._warm.start()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Stage a save and write it in the background; all ranks that finalise it must call this.

        When it returns, the trainer may change all data of the request. Failures are reported by
        `maybe_finalize_async_calls`. While an older save to the same directory is pending, all
        pending saves are finalised first; all ranks wait for that.

        Args:
            async_request: The save: an `AsyncRequest`, or another object with the same fields
                (Megatron-LM has its own class).

        Returns:
            The index of the call: 0, 1, 2, ...; -1 if it was skipped.

        Raises:
            QueueFullError: `max_pending` saves are pending, and `on_full` is "error".
            TypeError: `async_request` is not a request.
            AsyncSaveError: An older save failed while it was waited for; this one is not scheduled.
                Not with `on_error="warn"`.
            Exception: The exception of a finalize function of an older save; this one is not
                scheduled.
        """
        request = converted(async_request)
        # Counted in calls that all ranks have, so that all of them decide alike.
        if self.options.on_full != "wait" and len(self.async_calls) >= self.options.max_pending:
            if self.options.on_full == "error":
                cause = f"{len(self.async_calls)} are pending, {self.options.max_pending} allowed"
                raise QueueFullError(self._next_idx, self._control.rank, cause)
            self._stats.skipped += 1
            logger.warning("a save is skipped: %d are pending", len(self.async_calls))
            return SKIPPED
        self._finalize_older(request)
        idx = self._next_idx
        self._next_idx += 1
        call = Call(request._replace(call_idx=idx).freeze(), idx)
        if self.options.save_timeout is not None:
            call.expires = call.started + self.options.save_timeout
        self.async_calls.append(call)
        self._get_async_caller().schedule(call)
        self._stats.scheduled += 1
        self._stats.stage_s = call.stage_s
        return idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalise the saves that are written on all ranks, oldest first.

        Args:
            blocking: Wait for all scheduled saves. Default False.
            no_dist: Check only this rank; otherwise all ranks must call this. Default False.

        Returns:
            The indices of the calls finalised since the last call, also by scheduling another one.

        Raises:
            AsyncSaveError: A save failed on some rank; all ranks raise it. This save is dropped,
                later ones are not. Not with `on_error="warn"`.
            Exception: The exception of a finalize function.
        """
        done, self._finalized = self._finalized, []
        while self.async_calls:
            call = self.async_calls[0]
            state, failure = self._outcome(call, blocking, no_dist)
            if state is CallState.RUNNING:
                break
            if self.async_calls and self.async_calls[0] is call:
                self.async_calls.popleft()
            try:
                if failure is None:
                    failure = self._finalize(call)
            finally:
                if self._caller is not None:
                    self._caller.release(call)
            if failure is None:
                done.append(call.idx)
            else:
                self._fail(call, failure)
        return done

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of pending calls."""
        return len(self.async_calls)

    def stats(self) -> QueueStats:
        """Return the statistics of this queue; not a copy."""
        return self._stats

    def close(self, abort: bool = False) -> None:
        """Finalise everything and stop the worker; the queue can be used again afterwards.

        Args:
            abort: Discard pending saves instead: no finalize function runs, and the call does not
                wait for other ranks. May be called from any thread. Default False.
        """
        try:
            if not abort:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            self._stop(abort=abort)

    def _get_async_caller(self) -> AsyncCaller:
        if self._caller is None:
            if self.persistent and AsyncCallsQueue._warm is not None:
                self._caller, AsyncCallsQueue._warm = AsyncCallsQueue._warm, None
            else:
                kind = PersistentAsyncCaller if self.persistent else TemporalAsyncCaller
                self._caller = kind(
                    self.is_daemon,
                    self.cpu_priority,
                    self.io_priority,
                    self.sigterm_timeout,
                    self.cpu_shm_mode,
                )
            options = self.options
            self._caller._set_limits(  # noqa: SLF001 - our own class
                options.max_pending, options.retries, options.retry_delay
            )
        return self._caller

    @property
    def persistent_caller(self) -> PersistentAsyncCaller | None:
        """The caller that keeps the worker process, or None."""
        return self._caller if isinstance(self._caller, PersistentAsyncCaller) else None

    def _finalize_older(self, request: AsyncRequest) -> None:
        """Finalise all pending saves if one of them is to the directory of the request."""
        publication = publication_of(request)
        pending = (call.publication for call in self.async_calls)
        if publication is not None and publication.place in [p.place for p in pending if p]:
            self._finalized = self.maybe_finalize_async_calls(blocking=True)

    def _outcome(
        self, call: Call, blocking: bool, no_dist: bool
    ) -> tuple[CallState, BaseException | None]:
        """Return how far a call is, on all ranks unless `no_dist`, and why it failed."""
        while True:
            alone = self._control.size == 1
            self._wait_here(call, blocking, alone=no_dist or alone)
            if alone and self._can_publish(call):
                self._get_async_caller().publish(call)
                continue
            if no_dist or alone:
                failed = call.state is CallState.FAILED
                return call.state, self._error(call, call.cause) if failed else None
            state, same, publishes = self._agree(call)
            if not same:
                raise AssertionError("ranks finalise different calls: all must schedule the same")
            if state is CallState.FAILED:
                return state, self._shared_error(call)
            if state is CallState.WRITTEN and publishes:
                self._get_async_caller().publish(call)
                continue
            if state is CallState.WRITTEN or not blocking:
                return state, None

    def _wait_here(self, call: Call, blocking: bool, *, alone: bool) -> None:
        caller = self._get_async_caller()
        if not blocking:
            wait_s: float | None = 0.0
        else:
            wait_s = None if alone else _LOOK_S
        caller.wait(call, wait_s)
        self._recorder.progress(call, caller)

    @staticmethod
    def _can_publish(call: Call) -> bool:
        publication = call.publication
        written = call.state is CallState.WRITTEN
        return written and publication is not None and not publication.begun

    def _agree(self, call: Call) -> tuple[CallState, bool, bool]:
        """Return how far a call is on all ranks, whether all mean it, and whether all publish."""
        written = int(call.state is CallState.WRITTEN)
        ok = int(call.state is not CallState.FAILED)
        publishes = int(self._can_publish(call))
        values = self._control.minimum([written, ok, call.idx, -call.idx, publishes])
        if not values[1]:
            state = CallState.FAILED
        else:
            state = CallState.WRITTEN if values[0] else CallState.RUNNING
        return state, values[2] == -values[3], bool(values[4])

    def _error(self, call: Call, cause: str, rank: int | None = None) -> BaseException:
        rank = self._control.rank if rank is None else rank
        staged = call.staged
        if staged is not None:
            return staged.error(call.idx, rank, cause)
        return AsyncSaveError(call.idx, rank, cause)

    def _shared_error(self, call: Call) -> BaseException:
        """Return the error of a call that failed on some rank, the same on all of them."""
        mine = call.cause if call.state is CallState.FAILED else ""
        if call.state is CallState.RUNNING:
            self._get_async_caller().give_up(call, "it failed on another rank")
        causes = self._control.gather_texts(mine)
        failed = ((rank, cause) for rank, cause in enumerate(causes) if cause)
        rank, cause = next(failed, (None, "the rank that failed did not say why"))
        return self._error(call, str(cause), rank)

    def _finalize(self, call: Call) -> BaseException | None:
        begin = time.perf_counter()
        try:
            call.request.execute_finalize_fns(validate_matching_call_idx=False)
        except (Exception, CheckpointException) as error:
            if self.options.on_error == "raise":
                self._count_failure(call, error)
                raise
            return error
        stats = self._stats
        stats.finalize_s = time.perf_counter() - begin
        stats.write_s, stats.nbytes = call.write_s, call.nbytes
        stats.durable_lag_s = time.monotonic() - call.started
        stats.finalized += 1
        stats.failed_in_a_row = 0
        if call.attempts > 1:
            logger.warning("save %d was written at attempt %d", call.idx, call.attempts)
        self._recorder.ended(call, stats.finalize_s, None)
        return None

    def _fail(self, call: Call, error: BaseException) -> None:
        self._count_failure(call, error)
        options, stats = self.options, self._stats
        if options.on_error == "raise":
            raise error
        logger.error("training goes on without save %d: %s", call.idx, error)
        if options.max_failures is not None and stats.failed_in_a_row >= options.max_failures:
            logger.error("%d saves in a row have failed", stats.failed_in_a_row)
            raise error

    def _count_failure(self, call: Call, error: BaseException) -> None:
        self._stats.failed += 1
        self._stats.failed_in_a_row += 1
        self._recorder.ended(call, 0.0, error)

    def _stop(self, *, abort: bool) -> None:
        caller, self._caller = self._caller, None
        self.async_calls.clear()
        self._finalized.clear()
        self._next_idx = 0
        if caller is not None:
            caller.close(abort=abort)

    def _leave(self, deadline: Deadline) -> None:
        """Let the worker finish what it writes, for a while; at the interpreter's end."""
        caller = self._caller
        if caller is not None and self.async_calls:
            for call in self.async_calls:
                caller.wait(call, deadline.remaining())
            self._warn_of_lost_saves("the program ends")
        self._stop(abort=True)

    def __del__(self) -> None:
        # Its worker ends with its caller; nothing is waited for.
        if self.async_calls:
            self._warn_of_lost_saves("a queue is dropped")

    def _warn_of_lost_saves(self, event: str) -> None:
        numbers = ", ".join(str(call.idx) for call in self.async_calls)
        logger.warning("%s while saves were not finalised: %s", event, numbers)


def abort_nvrx_checkpoint() -> None:
    """Stop all queues of this process and discard their saves; from any thread."""
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)


def _leave_all() -> None:
    for queue in AsyncCallsQueue.get_instances():
        queue._leave(Deadline.after(queue.sigterm_timeout))  # noqa: SLF001 - our own class
    if AsyncCallsQueue._warm is not None:  # noqa: SLF001 - our own class
        AsyncCallsQueue._warm.close(abort=True)  # noqa: SLF001 - our own class


def _forget_all() -> None:
    """Leave all queues to the process that this one was forked from: the workers are its."""
    for queue in AsyncCallsQueue.get_instances():
        queue.async_calls.clear()
    AsyncCallsQueue._instances.clear()  # noqa: SLF001 - our own class
    AsyncCallsQueue._warm = None  # noqa: SLF001 - our own class


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget_all)
