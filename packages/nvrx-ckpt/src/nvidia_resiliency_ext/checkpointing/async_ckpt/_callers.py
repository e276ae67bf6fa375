# SPDX-License-Identifier: Apache-2.0
"""Carry out requests: stage them on the trainer, hand them to a worker, and track their state."""

from __future__ import annotations

import enum
import functools
import logging
import secrets
import threading
import time
import traceback
import weakref
from abc import ABC
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.checkpointing._staged_write import (
    NoArguments,
    Publication,
    StagedWrite,
)
from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer, StagingPool
from nvidia_resiliency_ext.checkpointing._write_plan import FileResult
from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from ._agreement import control_group
from ._messages import Finished, Job, Released, Run
from ._payload import FunctionPayload, dump_code
from ._priority import check_priorities
from ._requests import AsyncRequest, converted
from ._worker import Worker, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("nvrx")

_GIVE_UP_S = 1.0
"""How long a worker may go on with a call that was given up, while others need its buffer."""


class CallState(enum.Enum):
    """How far a call is on this rank."""

    RUNNING = "running"
    WRITTEN = "written"
    FAILED = "failed"


def publication_of(request: AsyncRequest) -> Publication | None:
    """Return the publication that follows a save on all ranks; None where only the caller knows."""
    if isinstance(request.async_fn, StagedWrite):
        return request.async_fn.publication
    args: Any = request.async_fn_args  # of any type: it is the caller's
    return args.publication if isinstance(args, NoArguments) else None


@dataclass
class Call:
    """One scheduled request on this rank.

    Attributes:
        request: The frozen request.
        idx: Its index in the queue.
        state: How far it is.
        cause: Why it failed.
        started: Monotonic time at which it was scheduled.
        stage_s: Seconds that staging took.
        write_s: Seconds that writing took.
        nbytes: Bytes staged.
        attempts: How often writing was tried.
        expires: Monotonic time at which it has taken too long; None for never.
        given_up: Monotonic time from which on nobody waits for it any more; None until then.
        epoch: How often its caller had been closed when it was scheduled.
    """

    request: AsyncRequest
    idx: int
    state: CallState = CallState.RUNNING
    cause: str = ""
    started: float = field(default_factory=time.monotonic)
    stage_s: float = 0.0
    write_s: float = 0.0
    nbytes: int = 0
    attempts: int = 1
    expires: float | None = None
    given_up: float | None = None
    epoch: int = 0
    buffer: StagingBuffer | None = None
    run: Run | None = None
    plan: bytes = b""
    code: bytes = b""
    thread: AbandonableCall[Any] | None = None

    def fail(self, cause: str) -> None:
        """Mark the call as failed."""
        self.state, self.cause = CallState.FAILED, cause

    @property
    def staged(self) -> StagedWrite | None:
        """The save, if it only writes bytes."""
        fn = self.request.async_fn
        return fn if isinstance(fn, StagedWrite) else None

    @property
    def publication(self) -> Publication | None:
        """The publication when all ranks have written; None where only the caller knows."""
        return publication_of(self.request)


class AsyncCaller(ABC):  # noqa: B024 - users derive from it; it is complete as it is
    """Carries out requests one after the other, away from the training thread.

    Args:
        is_daemon: Accepted for compatibility: the worker never outlives the trainer.
        cpu_priority: Niceness of the worker, 0 to 19.
        io_priority: Class of disk priority, 0 to 3 (3 = idle); None keeps it.
        sigterm_timeout: Seconds between SIGTERM and SIGKILL when the worker is stopped.
        cpu_shm_mode: Accepted for compatibility: the worker never has a CUDA context.
        max_pending: How many calls may hold a staging buffer.
        retries: How often the worker tries again after an error of the file system.
        retry_delay: Seconds before the first new attempt.
    """

    _keeps_worker = True
    _may_use_thread = False

    def __init__(  # noqa: PLR0913 - given
        self,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        *,
        max_pending: int = 1,
        retries: int = 0,
        retry_delay: float = 1.0,
    ) -> None:
        self.is_daemon = is_daemon
        self.cpu_shm_mode = cpu_shm_mode
        self.cpu_priority = cpu_priority
        self.io_priority = check_priorities(cpu_priority, io_priority)
        self.sigterm_timeout = sigterm_timeout
        self.start_time: float | None = None
        self._set_limits(max_pending, retries, retry_delay)
        self._identity = secrets.token_hex(8)
        self._generation = 0
        self._worker: Worker | None = None
        self._end_worker: weakref.finalize[Any, Any] | None = None
        self._calls: dict[Job, Call] = {}
        self._threads: list[Call] = []
        self._restart_callbacks: list[Callable[[], None]] = []
        self._closing = threading.RLock()
        self._epoch = 0
        self._control = control_group()
        self._current: Call | None = None

    def _set_limits(self, max_pending: int, retries: int, retry_delay: float) -> None:
        """Set the limits of pending saves and of retries; before the first call."""
        self._pool = StagingPool(max_pending)
        self._retries, self._retry_delay = retries, retry_delay

    @property
    def process(self) -> Worker | None:
        """The worker process, or None while there is none."""
        return self._worker

    @property
    def rank(self) -> int:
        """Global rank of this process; 0 without torch.distributed."""
        return self._control.rank

    def start(self) -> None:
        """Start the worker process unless one runs."""
        if self._worker is None:
            self._generation += 1
            self._worker = Worker(self.cpu_priority, self.io_priority)
            # A caller that is forgotten ends its worker. At the interpreter's end queues do that.
            self._end_worker = weakref.finalize(self, self._worker.stop, 0.0)
            self._end_worker.atexit = False
            for callback in self._restart_callbacks if self._generation > 1 else ():
                callback()

    def schedule(self, call: Call) -> None:
        """Stage a call and hand it to the worker; a failure is recorded in the call.

        Args:
            call: The save; its `stage_s` is set to the seconds that staging took.
        """
        begin = time.perf_counter()
        self.start_time = time.time()
        call.epoch = self._epoch
        try:
            self._stage(call)
        # Whatever the user's functions raise is the call's failure, and an interrupt leaves no call
        # behind that nobody carries out.
        except BaseException as error:
            call.fail(f"it could not be staged:\n{traceback.format_exc()}")
            self._release(call)
            if not isinstance(error, Exception):
                raise
        call.stage_s = time.perf_counter() - begin

    def wait(self, call: Call, timeout_s: float | None) -> bool:
        """Wait until a call is no longer running; return whether that is so.

        Args:
            call: The save to wait for. One that exceeds its `save_timeout` is abandoned and counts
                as failed.
            timeout_s: Seconds to wait at most; 0 looks once, None waits without limit.
        """
        deadline = Deadline.after(timeout_s)
        while call.state is CallState.RUNNING:
            if call.thread is not None:
                call.thread.ended.wait(_shorter(deadline.timeout(), self._next_limit()))
                self._collect_threads()
            else:
                self._take_results(deadline.timeout())
            if deadline.expired():
                break
        return call.state is not CallState.RUNNING

    def publish(self, call: Call) -> None:
        """Begin to publish a call that all ranks have written; all ranks call this.

        On the rank that publishes, the call is running again until its metadata is durable.

        Args:
            call: The save.
        """
        publication = call.publication
        if publication is None:
            return
        if publication.gather():
            write = functools.partial(publication.write, lambda: call.given_up is not None)
            call.state = CallState.RUNNING
            try:
                self._run_in_thread(call, write)
            except RuntimeError as error:
                # The other ranks are agreed that it is published now.
                logger.warning("training waits for the metadata of save %d: %s", call.idx, error)
                write()
                call.state = CallState.WRITTEN

    def give_up(self, call: Call, cause: str) -> None:
        """Mark a running call as failed and cancel its job; its result is dropped.

        Args:
            call: The save to abandon.
            cause: The reason, for the error message.
        """
        call.given_up = time.monotonic()
        call.fail(cause)
        if call.run is not None and self._worker is not None:
            self._worker.cancel(call.run.job)

    def release(self, call: Call) -> None:
        """Let other processes save where a call has saved; nobody asks for it any more.

        Args:
            call: The save, which is finalised or has failed.
        """
        worker = self._worker
        if worker is None:
            return
        # What was given up may still be written; its worker knows when that is over.
        if call.run is not None and call.given_up is None:
            worker.release(call.run.job)
        if not self._calls and not self._keeps_worker:
            self._drop_worker(worker, self.sigterm_timeout)

    def progress(self, call: Call) -> int:
        """Return how many bytes of a running call are written.

        Args:
            call: The save; 0 is returned for one that a thread carries out.
        """
        if call.run is None or self._worker is None:
            return 0
        return self._worker.progress(call.run.job)

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Carry out one request; `is_current_async_call_done` tells when it is over.

        Args:
            async_req: The request; see `AsyncCallsQueue.schedule_async_request`.
        """
        request = converted(async_req)
        self._current = Call(request, request.call_idx)
        self.schedule(self._current)

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether the last call is over, on all ranks unless `no_dist`.

        Args:
            blocking: Wait for the end of the call instead of looking once. Default False.
            no_dist: Report this rank's call alone, without asking the other ranks. Default False.
        """
        if self._current is None:
            return True
        over = self.wait(self._current, None if blocking else 0.0)
        if not no_dist:
            over = not self.sync_all_async_calls(int(not over))
        if over:
            self.release(self._current)
            self._current = None
        return over

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Return whether a call is still running on any rank; all ranks call it.

        Args:
            is_alive: 1 if it still runs on this rank, else 0.
        """
        return not self._control.all_true(not is_alive)

    def close(self, abort: bool = False) -> None:
        """Stop the worker; with `abort` at once, else after the calls that run.

        Callable from another thread while this one waits for a call.
        """
        if not abort:
            for call in list(self._calls.values()):
                self.wait(call, None)
            for call in self._threads:
                self.wait(call, None)
        with self._closing:
            self._epoch += 1  # what is being staged now is not written any more
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.stop(self.sigterm_timeout if self._calls else 0.0)
            if self._end_worker is not None:
                self._end_worker.detach()
            for call in list(self._calls.values()):
                call.fail("it was aborted")
                self._release(call)
            self._calls.clear()
        for call in self._threads:
            self.give_up(call, "it was aborted")
            if call.publication is not None and call.thread is not None:
                call.thread.ended.wait(self.sigterm_timeout)  # nothing is published after this
        self._threads.clear()
        self._current = None
        self._pool.close()

    def _debug_is_async_process_running(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def _stage(self, call: Call) -> None:
        request, staged = call.request, call.staged
        if request.async_fn is None:
            call.state = CallState.WRITTEN
        elif staged is not None:
            size = staged.staging_bytes()
            call.buffer = self._take_buffer(size, staged.pinned)
            plan = staged.stage(call.buffer)
            call.nbytes = plan.nbytes
            call.plan = plan.to_json()
            call.code = b"" if staged.opener is None else dump_code(staged.opener)
            self._submit(call, "write", staged.renames)
        else:
            self._stage_function(call)

    def _stage_function(self, call: Call) -> None:
        request = call.request
        args, kwargs = request.loaded_args(), request.async_fn_kwargs or {}
        try:
            payload = FunctionPayload(request.async_fn, args, kwargs)
        except Exception as error:
            if not self._may_use_thread:
                raise
            logger.warning("save %d cannot be pickled (%s): a thread does it", call.idx, error)
            self._start_thread(call, args, kwargs)
            return
        call.buffer = self._take_buffer(payload.nbytes, payload.pinned)
        payload.stage(call.buffer)
        call.nbytes, call.plan = payload.nbytes, payload.code
        self._submit(call, "bytes" if payload.takes_bytes else "call", renames=False)

    def _take_buffer(self, nbytes: int, pinned: bool) -> StagingBuffer:
        while self._pool.full:
            self._take_results(None)
        return self._pool.take(nbytes, pinned=pinned)

    def _submit(self, call: Call, kind: str, renames: bool) -> None:
        for attempt in range(2):
            with self._closing:
                if call.epoch != self._epoch:
                    raise WorkerLostError("it was aborted while it was staged")
                self.start()
                worker = self._worker
            if worker is None or call.buffer is None:
                raise WorkerLostError("the queue was closed meanwhile")
            job = Job(self._identity, call.idx, self._generation)
            call.run = Run(job, kind, len(call.plan), len(call.code), renames,
                           self._pool.limit, self._retries, self._retry_delay)  # fmt: skip
            try:
                worker.submit(call.run, call.buffer, call.plan, call.code)
            except WorkerLostError:
                # It died while it had nothing to do; what it had to do before is settled first.
                self._lose_worker(worker, worker.describe_end())
                if attempt:
                    raise
            else:
                self._calls[job] = call
                return

    def _next_limit(self) -> float | None:
        """Give up calls that have taken too long; return the seconds until the next check."""
        now = time.monotonic()
        limits = []
        for call in [*self._calls.values(), *self._threads]:
            if call.expires is not None and call.state is CallState.RUNNING:
                limits.append(max(0.0, call.expires - now))
                if call.expires <= now:
                    seconds = call.expires - call.started
                    self.give_up(call, f"it was not written within {seconds:.6g} s")
            if call.given_up is not None and call.buffer is not None:
                limits.append(max(0.0, call.given_up + _GIVE_UP_S - now))
        return min(limits, default=None)

    def _take_results(self, timeout_s: float | None) -> None:
        timeout_s = _shorter(timeout_s, self._next_limit())
        worker = self._worker
        self._collect_threads()
        if worker is None:
            with self._closing:  # another thread aborts: it settles the calls
                return
        if not self._calls:
            return
        try:
            results = worker.wait(timeout_s)
        except WorkerLostError as error:
            self._lose_worker(worker, str(error))
            return
        for message, value in results:
            self._settle(message, value)
        overdue = time.monotonic() - _GIVE_UP_S
        if any(c.buffer and c.given_up and c.given_up <= overdue for c in self._calls.values()):
            # It holds the buffer that the next save needs, and does not get to the next call.
            logger.warning(
                "the worker process %d does not give up a save: it is replaced", worker.pid
            )
            self._lose_worker(worker)

    def _settle(self, message: Finished | Released, value: Any) -> None:
        if isinstance(message, Released):
            if message.job in self._calls:
                self._release(self._calls[message.job])
            return
        call = self._calls.pop(message.job, None)
        if call is None:
            return  # of a worker or a queue before
        if call.given_up is not None:
            self._release(call)
            return
        call.write_s = message.seconds
        if not message.ok:
            call.fail(value)
        else:
            if call.staged is not None:
                call.attempts = value["attempts"]
                about = value["manifest"]
                call.staged.written(None if about is None else FileResult(**about))
            call.state = CallState.WRITTEN
        self._release(call)

    def _lose_worker(self, worker: Worker, cause: str | None = None) -> None:
        """Settle the calls of a worker; those that it had not begun go to the next worker.

        Args:
            worker: The worker.
            cause: How it ended, which fails its oldest call; None if it has to be ended for a call
                that was given up.
        """
        if self._worker is not worker:
            return
        self._drop_worker(worker, 0.0 if cause is None else self.sigterm_timeout)
        lost, self._calls = list(self._calls.values()), {}
        for number, call in enumerate(lost):
            begun = number == 0 and cause is not None
            if begun or call.given_up is not None or call.run is None or call.buffer is None:
                if call.given_up is None:
                    call.fail(cause or "its worker had to be ended")
                self._release(call, reusable=not worker.is_alive())
                continue
            try:
                self._submit(call, call.run.kind, call.run.renames)
            except (WorkerLostError, NvrxError, OSError) as error:
                call.fail(str(error))
                self._release(call)

    def _drop_worker(self, worker: Worker, grace_s: float) -> None:
        self._worker = None
        if self._end_worker is not None:
            self._end_worker.detach()
        worker.stop(grace_s)

    def _release(self, call: Call, *, reusable: bool = True) -> None:
        buffer, call.buffer = call.buffer, None
        call.plan = call.code = b""
        if buffer is not None and reusable:
            self._pool.give_back(buffer)
        elif buffer is not None:
            self._pool.discard(buffer)  # the kernel holds its reader in an uninterruptible wait

    def _start_thread(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch
        from torch.utils import _pytree

        def copy(value: Any) -> Any:
            return value.detach().clone() if isinstance(value, torch.Tensor) else value

        args, kwargs = _pytree.tree_map(copy, (args, kwargs))
        function: Any = call.request.async_fn
        self._run_in_thread(call, functools.partial(function, *args, **kwargs))

    def _run_in_thread(self, call: Call, function: Callable[[], Any]) -> None:
        call.thread = AbandonableCall("save", functools.partial(_problem_of, function))
        self._threads.append(call)

    def _collect_threads(self) -> None:
        for call in [c for c in self._threads if c.thread and c.thread.ended.is_set()]:
            if call.given_up is None and call.thread is not None:
                # It does not raise: what is raised here is meant for this thread.
                problem = call.thread.result()
                if problem:
                    call.fail(problem)
                else:
                    call.state = CallState.WRITTEN
            self._threads.remove(call)


def _problem_of(function: Callable[[], Any]) -> str:
    """Return the traceback of a call that fails, else an empty text."""
    try:
        function()
    except BaseException:  # noqa: BLE001 - it is the call's failure
        return traceback.format_exc()
    return ""


def _shorter(left: float | None, right: float | None) -> float | None:
    """Return the shorter of two timeouts; None is endless."""
    return min((value for value in (left, right) if value is not None), default=None)


class PersistentAsyncCaller(AsyncCaller):
    """Keeps one worker process between calls; what it is to run must be picklable."""

    def register_worker_restart_callback(self, fn: Callable[[], None]) -> None:
        """Call a function each time a worker replaces one that ended.

        Args:
            fn: The function; it takes no argument and runs in the trainer's process.
        """
        self._restart_callbacks.append(fn)

    def cleanup_worker_data_cache(self) -> None:
        """Do nothing: the worker keeps no data of earlier calls."""


class TemporalAsyncCaller(AsyncCaller):
    """Has a worker process only while there are calls.

    A function or argument that cannot be pickled is run by a thread of the trainer, with copies of
    the tensors in its arguments; nothing is forked.
    """

    _keeps_worker = False
    _may_use_thread = True
