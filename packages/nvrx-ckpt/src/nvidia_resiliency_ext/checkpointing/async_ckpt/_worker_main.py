# SPDX-License-Identifier: Apache-2.0
"""The worker process: writes staged bytes, or calls a function, one job after the other.

It imports torch only when a job brings a function. It ends when its trainer does, in any way: the
trainer's end of the socket closes, or the kernel reports the end of the process, whichever is seen
first (forked children of the trainer may keep the socket open).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.checkpointing import _checksum
from nvidia_resiliency_ext.checkpointing._durable import FileSaver, SaveCancelledError
from nvidia_resiliency_ext.checkpointing._flush import LocalCopy
from nvidia_resiliency_ext.checkpointing._locks import SaveLock
from nvidia_resiliency_ext.checkpointing._manifest import write_rank_manifest
from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer
from nvidia_resiliency_ext.checkpointing._write_plan import WritePlan
from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall
from nvidia_resiliency_ext.shared_utils.children import end_with_parent
from nvidia_resiliency_ext.shared_utils.wire import (
    FrameReader,
    receive_with_fds,
    send_message,
)

from ._messages import MESSAGES, Cancel, Finished, Job, JobMemory, Released, Run, Settings
from ._priority import apply_priorities, io_class_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.checkpointing._write_plan import FileResult

_READ_BYTES = 1 << 16
_MAX_FDS = 8
_PARENT_LOOK_MS = 500
_CLEAN_UP_S = 1.0
_MAX_DELAY_S = 60.0
_FLUSH_RETRIES = 8


def main(socket_fd: int) -> None:
    """Serve the trainer at the other end of a socket until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    server = _Server(socket.socket(fileno=socket_fd))
    code = 1
    try:
        code = server.serve()
    except SystemExit:
        server.remove_unfinished()
        # Whoever asks how it ended is told of the signal.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    except BaseException:  # noqa: BLE001 - the process ends in any case
        traceback.print_exc()
    finally:
        server.remove_unfinished()
        os._exit(code)


def _stop(_signal: int, _frame: object) -> None:
    raise SystemExit


class _Server:
    """Receives messages in the main thread; a second thread carries out the jobs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._jobs: queue.Queue[tuple[Run, StagingBuffer, JobMemory]] = queue.Queue()
        self._flushes: queue.Queue[tuple[Run, JobMemory, float, LocalCopy]] = queue.Queue()
        self._active: dict[Job, FileSaver | LocalCopy] = {}
        self._send_lock = threading.Lock()
        self._cancelled: set[Job] = set()
        self._buffers: dict[int, StagingBuffer] = {}
        # By path, with the last job that asked for it: a job may save where one before it did.
        self._locks: dict[str, tuple[Job, SaveLock]] = {}
        self._locking = threading.Lock()
        self._fds: list[int] = []
        self._exit_code = 0

    def serve(self) -> int:
        """Serve until the trainer is gone; return the exit code."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        parent = _watch_parent()
        if parent is not None:
            poller.register(parent, select.POLLIN)
        pid = os.getppid()
        while os.getppid() == pid:
            for fd, _ in poller.poll(_PARENT_LOOK_MS if parent is None else None):
                if fd != self._sock.fileno() or not self._receive():
                    return self._exit_code
        return self._exit_code

    def _run_thread(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ConnectionError:
            pass  # the trainer is gone: the main thread sees that, too
        except BaseException:  # noqa: BLE001 - the trainer would wait for a result for ever
            traceback.print_exc()
            self._exit_code = 1
            self._sock.shutdown(socket.SHUT_RDWR)  # ends `serve`

    def _receive(self) -> bool:
        try:
            data, fds = receive_with_fds(self._sock, _READ_BYTES, _MAX_FDS)
        except OSError:
            return False
        self._fds += fds
        for payload in self._reader.feed(data):
            self._dispatch(MESSAGES.decode(payload))
        return bool(data)

    def _dispatch(self, message: object) -> None:
        if isinstance(message, Settings):
            self._begin(message)
        elif isinstance(message, Run):
            staging, memory = self._fds.pop(0), self._fds.pop(0)
            buffer = self._attach(staging, message.max_buffers)
            self._jobs.put((message, buffer, JobMemory(memory)))
        elif isinstance(message, Cancel):
            self._cancelled.add(message.job)
            active = self._active.get(message.job)
            if active is not None:
                active.cancel()
        elif isinstance(message, Released):
            self._unlock(message.job)

    def _begin(self, settings: Settings) -> None:
        apply_priorities(settings.cpu_priority, settings.io_priority)
        self._send(Settings(os.getpriority(os.PRIO_PROCESS, 0), io_class_of(0)))
        # Only now: a thread has the priorities of the one that starts it.
        for name, work in (("nvrx-job", self._work), ("nvrx-flush", self._flush)):
            target = functools.partial(self._run_thread, work)
            threading.Thread(target=target, name=name, daemon=True).start()

    def _lock(self, job: Job, plan: WritePlan) -> None:
        if plan.manifest is None:
            return
        path = plan.manifest
        with self._locking:
            _, lock = self._locks.pop(path, (job, None))
        lock = lock or SaveLock(path)
        lock.renew()
        with self._locking:
            self._locks[path] = job, lock

    def _unlock(self, job: Job | None, wait_s: float = 0.0) -> None:
        """Close the locks of a job, or all; wait for that a while."""
        close = functools.partial(self._close_locks, job)
        try:
            # Not in this thread: the directory may hang, and messages of other jobs come.
            AbandonableCall("unlock", close).ended.wait(wait_s)
        except RuntimeError:  # the system gives no thread
            close()

    def _close_locks(self, job: Job | None) -> None:
        with self._locking:
            over = [path for path, (holder, _) in self._locks.items() if job in (None, holder)]
            locks = [self._locks.pop(path)[1] for path in over]
        for lock in locks:
            lock.close()

    def _attach(self, fd: int, max_buffers: int) -> StagingBuffer:
        # A mapping is kept: mapping the same memory again costs a page fault for each page.
        inode = os.fstat(fd).st_ino
        if inode in self._buffers:
            os.close(fd)
            self._buffers[inode] = self._buffers.pop(inode)  # the newest is the last
            return self._buffers[inode]
        # The trainer has no more than that: the oldest one was replaced, and its jobs are over.
        while len(self._buffers) >= max_buffers:
            self._buffers.pop(next(iter(self._buffers))).close()
        self._buffers[inode] = StagingBuffer.attach(fd)
        return self._buffers[inode]

    def remove_unfinished(self) -> None:
        """Remove temporary files if that is quick."""
        active = list(self._active.values())
        for one in active:
            one.cancel()
        for one in active:
            if isinstance(one, LocalCopy):
                one.remove()
            else:
                one.ended.wait(_CLEAN_UP_S)
        self._unlock(None, _CLEAN_UP_S)

    def _work(self) -> None:
        _checksum.crc32(bytes(4 << 20))  # imports numpy before the first save
        while True:
            run, buffer, memory = self._jobs.get()
            begin = time.monotonic()
            try:
                plan_text = memory.part(0, run.plan_bytes)
                if run.job in self._cancelled:
                    raise SaveCancelledError  # noqa: TRY301 - as while it is written
                if run.kind in {"call", "bytes"}:
                    from ._function import call_payload, call_with_bytes

                    call = call_payload if run.kind == "call" else call_with_bytes
                    call(plan_text, buffer)
                    self._finish(run, memory, begin, None)
                    continue
                plan = WritePlan.from_json(plan_text)
                if plan.staging_dir is None:
                    result = self._write(run, plan, buffer, memory)
                    self._finish(run, memory, begin, result)
                else:
                    local = self._write_local(run, plan, buffer, memory)
                    self._flushes.put((run, memory, begin, local))
            except BaseException as error:  # noqa: BLE001 - the trainer reports it
                self._finish(run, memory, begin, error)

    def _flush(self) -> None:
        while True:
            run, memory, begin, local = self._flushes.get()
            attempt = functools.partial(self._flush_locked, run.job, local)
            result: Any
            try:
                result = self._retry(run, local, attempt, local.plan, _FLUSH_RETRIES)
            except BaseException as error:  # noqa: BLE001 - the trainer reports it
                result = error
            local.remove()
            self._finish(run, memory, begin, result)

    def _flush_locked(self, job: Job, local: LocalCopy) -> list[FileResult]:
        self._lock(job, local.plan)
        return local.flush()

    def _write(self, run: Run, plan: WritePlan, buffer: StagingBuffer, memory: JobMemory) -> Any:
        opener = None
        if run.code_bytes:
            from ._function import load_code

            opener = load_code(memory.part(run.plan_bytes, run.code_bytes))

        def attempt() -> list[FileResult]:
            counter = _ProgressCounter(memory)
            saver = FileSaver(
                plan, buffer.view, opener=opener, renames=run.renames, on_progress=counter.add
            )
            self._start(run, saver)
            self._lock(run.job, plan)
            return saver.run()

        return self._retry(run, None, attempt, plan, 0)

    def _write_local(
        self, run: Run, plan: WritePlan, buffer: StagingBuffer, memory: JobMemory
    ) -> LocalCopy:
        local = LocalCopy(plan, buffer.view, _ProgressCounter(memory).add)
        self._start(run, local)
        local.write()
        self._send(Released(run.job))
        return local

    def _retry(
        self,
        run: Run,
        local: LocalCopy | None,
        attempt: Callable[[], list[FileResult]],
        plan: WritePlan,
        least: int,
    ) -> dict[str, Any]:
        """Return the manifest of the files that an attempt wrote, and how many it took."""
        retries, delay = max(run.retries, least), run.retry_delay
        for number in range(retries + 1):
            try:
                manifest = write_rank_manifest(plan, attempt())
                self._lock(run.job, plan)  # what has taken the place of the locked file
                about = None if manifest is None else asdict(manifest)
                return {"attempts": number + 1, "manifest": about}
            except OSError:
                active = local or self._active.get(run.job)
                if number == retries or active is None or active.stopped.wait(delay):
                    raise
                delay = min(2 * delay, _MAX_DELAY_S)
        raise AssertionError("the last attempt returns or raises")

    def _start(self, run: Run, active: FileSaver | LocalCopy) -> None:
        self._active[run.job] = active
        if run.job in self._cancelled:
            active.cancel()

    def _finish(self, run: Run, memory: JobMemory, begin: float, result: Any) -> None:
        ok = not isinstance(result, BaseException)
        value = result if ok else "".join(traceback.format_exception(result))
        text = json.dumps(value, separators=(",", ":")).encode()
        position = memory.append(text)
        memory.close()
        self._active.pop(run.job, None)
        if not ok:
            self._unlock(run.job, _CLEAN_UP_S)
        self._cancelled.discard(run.job)
        self._send(Finished(run.job, ok, position, len(text), time.monotonic() - begin))

    def _send(self, message: object) -> None:
        with self._send_lock:
            send_message(self._sock, MESSAGES, message, None)


class _ProgressCounter:
    """Add up the bytes that several threads have written."""

    def __init__(self, memory: JobMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._total = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._total += nbytes
            self._memory.progress = self._total


def _watch_parent() -> int | None:
    """Return a descriptor that is readable when the trainer has ended; None on old kernels."""
    with contextlib.suppress(OSError):
        end_with_parent(signal.SIGCONT)  # one that is stopped goes on, and sees the end
    try:
        return os.pidfd_open(os.getppid())
    except (OSError, AttributeError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
