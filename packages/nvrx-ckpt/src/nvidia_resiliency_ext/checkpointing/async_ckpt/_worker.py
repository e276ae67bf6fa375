# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of a worker process: start, jobs, results, and its end in any way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.children import Child, ExitStatus, start_child
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import WireError
from nvidia_resiliency_ext.shared_utils.wire import FrameReader, send_message, send_with_fds

from ._messages import MESSAGES, Cancel, Finished, Job, JobMemory, Released, Run, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer

logger = logging.getLogger("nvrx")

_BOOT = """\
import json, sys
with open(int(sys.argv[2]), "rb") as file:
    sys.path[:] = json.load(file)
from nvidia_resiliency_ext.checkpointing.async_ckpt._worker_main import main
main(int(sys.argv[1]))
"""
_SEND_S = 30.0
_READ_BYTES = 1 << 16


class WorkerLostError(Exception):
    """The worker process ended before it had done what it was asked to."""


class Worker:
    """One worker process, from its start to its end.

    Args:
        cpu_priority: Niceness from 0 to 19.
        io_priority: Class of `ionice`, or None.

    Raises:
        ChildStartError: It cannot be started.
        OSError: No descriptors are left.
    """

    def __init__(self, cpu_priority: int, io_priority: int | None) -> None:
        self._lock = threading.RLock()
        self._reader = FrameReader()
        self._memories: dict[Job, JobMemory] = {}
        self._given_up = False
        self._hung_up = False
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._child = _start(theirs)
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self._send(Settings(cpu_priority, io_priority))

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._child.pid

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        status: ExitStatus | None = self._child.poll()
        return None if status is None else status.returncode

    def is_alive(self) -> bool:
        """Return whether the worker runs."""
        return self._child.poll() is None

    def submit(self, run: Run, staging: StagingBuffer, plan: bytes, code: bytes = b"") -> None:
        """Give the worker a job; jobs are carried out in order.

        Raises:
            WorkerLostError: It has ended.
        """
        memory = JobMemory.create(plan, code)
        with self._lock:
            self._memories[run.job] = memory
            try:
                send_with_fds(
                    self._sock, MESSAGES.encode(run), [staging.fd, memory.fd], timeout_s=_SEND_S
                )
            except (OSError, WireError) as error:
                raise WorkerLostError(self.describe_end()) from error

    def cancel(self, job: Job) -> None:
        """Ask the worker to give a job up; the job's result then says so."""
        self._send(Cancel(job))

    def release(self, job: Job) -> None:
        """Tell the worker that a job is finalised, or not needed: others may save there."""
        self._send(Released(job))

    def progress(self, job: Job) -> int:
        """Return how many bytes of a job have been written."""
        memory = self._memories.get(job)
        return 0 if memory is None else memory.progress

    def wait(self, timeout_s: float | None) -> list[tuple[Finished | Released, Any]]:
        """Return the worker's messages on its jobs; wait for the first one or for the worker's end.

        With `Finished` comes the result, or the traceback of the failure; with `Released` None.

        Raises:
            WorkerLostError: It has ended, and all its results have been returned.
        """
        deadline = Deadline.after(timeout_s)
        with self._lock:
            while True:
                poller = select.poll()
                poller.register(self._child.fileno(), select.POLLIN)
                if not self._hung_up:  # else it is always readable, while the worker cleans up
                    poller.register(self._sock, select.POLLIN)
                left = deadline.timeout()
                ready = poller.poll(None if left is None else -(-left * 1000 // 1))
                if not ready:
                    return []
                results = self._receive()
                if results:
                    return results
                if self._given_up or self._child.poll() is not None:
                    raise WorkerLostError(self.describe_end())

    def describe_end(self) -> str:
        """Return in words how the worker ended."""
        status = self._child.wait(1.0)
        if status is None:
            return f"the worker process {self.pid} does not answer, and has not ended"
        return f"the worker process {self.pid} is gone: {status.describe()}"

    def stop(self, grace_s: float) -> None:
        """End the worker: SIGTERM, after `grace_s` seconds SIGKILL; any thread, harmless twice."""
        if self._child.poll() is None and self._child.stop(grace_s, first=signal.SIGTERM) is None:
            self._given_up = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes up whoever waits for it
        with self._lock:  # whoever waits for it has seen its end
            self._sock.close()
            self._child.close()
            for memory in self._memories.values():
                memory.close()
            self._memories.clear()

    def _send(self, message: object) -> None:
        try:
            with self._lock:
                send_message(self._sock, MESSAGES, message, _SEND_S)
        except (OSError, WireError):
            return  # its end is seen by whoever waits for a result

    def _receive(self) -> list[tuple[Finished | Released, Any]]:
        try:
            data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            self._hung_up = True
            return []
        results: list[tuple[Finished | Released, Any]] = []
        for payload in self._reader.feed(data):
            message = MESSAGES.decode(payload)
            if isinstance(message, Settings):
                logger.info(
                    "worker process %d has niceness %d and disk priority class %s",
                    self.pid,
                    message.cpu_priority,
                    message.io_priority,
                )
            if isinstance(message, Released):
                results.append((message, None))
            if isinstance(message, Finished) and message.job in self._memories:
                memory = self._memories.pop(message.job)
                text = memory.read(message.result_at, message.result_bytes)
                memory.close()
                results.append((message, json.loads(text)))
        return results


def _start(theirs: socket.socket) -> Child:
    if not sys.executable:
        raise OSError("this interpreter does not know its own path, to start another one")
    paths = [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path]
    # Not a pipe: nobody reads it yet, and it takes no more than 64 KiB until somebody does.
    reader = os.memfd_create("nvrx-ckpt-path", os.MFD_CLOEXEC)
    try:
        with open(reader, "wb", closefd=False) as file:
            file.write(json.dumps(paths).encode())
        os.lseek(reader, 0, os.SEEK_SET)
        # Without site and user settings: nothing but what the trainer's path has is imported.
        argv = [sys.executable, "-I", "-S", "-c", _BOOT, str(theirs.fileno()), str(reader)]
        return start_child(
            argv, env=_environment(), pass_fds=[theirs.fileno(), reader], new_session=True
        )
    finally:
        os.close(reader)


def _environment() -> Mapping[str, str]:
    # One thread of numpy and OpenMP each is enough to move bytes.
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
