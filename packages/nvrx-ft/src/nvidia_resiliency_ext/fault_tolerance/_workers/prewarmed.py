# SPDX-License-Identifier: Apache-2.0
"""One prewarmed worker: its process and its socket, from the start until it is a worker or ended.

All calls come from the launcher's loop, and none but `end` waits. Start prewarmed workers from a
thread that lasts as long as the launcher: the kernel ties their lives to the thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.wire import rights

from .command import WorkerCommand
from .conditions import DEFAULT_IMPORTS, WATCH_LIST, with_optional

logger = logging.getLogger("nvrx")

HOOK_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
FD_VARIABLE = "NVRX_STANDBY_FD"
PYTHONPATH_VARIABLE = "NVRX_STANDBY_PYTHONPATH"
# A packet must fit the default send buffer (212992 bytes) while the prewarmed worker does not read.
_LARGEST_MESSAGE_BYTES = 96 << 10
_LARGEST_PROBLEM = 1000
_LARGEST_REPLY_BYTES = 1 << 20
_STATUS_WAIT_S = 0.2
_LARGEST_OUTPUT_BYTES = 4096


class PrewarmError(NvrxError):
    """A prewarmed worker cannot be started or activated; start the worker cold."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The imports are done, after so many seconds, and the prewarmed worker waits."""

    seconds: float
    private_bytes: int | None  # None where the kernel does not say.
    problem: str | None  # Why it must not become a worker.


@dataclass(frozen=True, slots=True)
class Begun:
    """Message: the worker's script runs, after `seconds` of imports."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Message: the prewarmed worker is unusable, before "go" or after; start the worker cold."""

    reason: str


_MESSAGES: dict[str, type[Ready | Begun | Failed]] = {
    "ready": Ready, "begun": Begun, "failed": Failed
}  # fmt: skip


class PrewarmedWorker:
    """A process that imports ahead and waits, from its start until `end` or `release`.

    `slot` is the local rank that it stands by for; `ready` what it said after its imports.
    """

    def __init__(  # noqa: PLR0913 - what a process is started with
        self,
        command: WorkerCommand,
        env: Mapping[str, str],
        slot: int,
        *,
        paths: Sequence[str | None] = (None, None),
        is_piped: bool = False,
        imports: Sequence[str] = DEFAULT_IMPORTS,
        hook_folder: str = HOOK_FOLDER,
    ) -> None:
        """Start the command of a worker, held until a cycle needs it.

        Python chooses the buffering of a stream by the kind of its file, when it starts. So until
        the worker is told to go, stdout and stderr are another file of the same kind as theirs: a
        file in memory for a path in `paths`, or a pipe with `is_piped`; None is the launcher's own
        stream.

        Raises ChildStartError: the command cannot be run; PrewarmError: there are too many modules
        to name, or the kernel does not give what a prewarmed worker needs.
        """
        outputs: list[int | None] = []
        kept: list[int] = []
        with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                on_failure.callback(ours.close)
                always.callback(theirs.close)
                if is_piped:
                    from nvidia_resiliency_ext.fault_tolerance._logs.reader import open_pipe

                    reading, writing = open_pipe()
                    on_failure.callback(os.close, reading)
                    always.callback(os.close, writing)
                    # Neither end ever waits: too much output fails the import.
                    os.set_blocking(writing, False)
                    outputs += (writing, writing)
                    kept.append(reading)
                else:
                    for path in paths:
                        outputs.append(fd := _placeholder(path))
                        if fd is not None:
                            on_failure.callback(os.close, fd)
                            kept.append(fd)
            except (OSError, AttributeError) as error:  # the latter: a libc without memfd
                raise PrewarmError(f"it cannot be prepared: {error}") from error
            ours.setblocking(False)
            _send(ours, _first_message(command, env, imports))
            self.child = start_child(
                command.for_local_rank(slot),
                env=_prewarm_env(env, theirs.fileno(), hook_folder),
                stdout=outputs[0],
                stderr=outputs[1],
                pass_fds=(theirs.fileno(),),
                new_session=True,
                die_with_parent=True,
            )
            on_failure.pop_all()
        self.slot, self.env = slot, dict(env)
        self._control_socket = ours
        self._outputs = tuple(kept)
        self._files = [file_stamp(os.path.realpath(self.child.argv[0]))]
        self._is_activated = False
        self.ready: Ready | None = None

    def fileno(self) -> int:
        return self._control_socket.fileno()

    def receive(self) -> Ready | Begun | Failed | None:
        """Return the next message without waiting, or None. `Begun` and `Failed` are the last."""
        try:
            try:
                data = self._control_socket.recv(_LARGEST_REPLY_BYTES)
            except ConnectionResetError:
                # It left with our "go" unread. The kernel reports that once, and only then hands
                # out its last words.
                data = self._control_socket.recv(_LARGEST_REPLY_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            return Failed(f"its socket failed: {error}")
        if not data:
            return Failed(self._describe_end())
        try:
            fields = json.loads(data)
            kind = fields.pop("kind")
            if kind == "ready":
                self._files += [file_stamp(path) for path in fields.pop("files")]
                memory = procfs.memory(self.child.pid)
                fields["private_bytes"] = None if memory is None else memory.uss
                fields["seconds"] = float(fields["seconds"])
                if fields["problem"] is not None:
                    fields["problem"] = " ".join(str(fields["problem"]).split())[:_LARGEST_PROBLEM]
            message = _MESSAGES[kind](**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return Failed(f"it sent an unreadable message ({type(error).__name__})")
        if isinstance(message, Ready):
            self.ready = message
        if not isinstance(message, Begun):
            self._log_output()
        return message

    def go(
        self,
        env: Mapping[str, str],
        stdio_fds: Sequence[int | None] = (None, None, None),
        not_before: float | None = None,
    ) -> None:
        """Order this process to become the worker, with this environment, after its imports.

        `stdio_fds` stay the caller's; None keeps a stream. Until `not_before` (monotonic s) it runs
        no script.
        """
        streams = {i: fd for i, fd in enumerate(stdio_fds) if fd is not None}
        message = {
            "set": {k: v for k, v in env.items() if self.env.get(k) != v},
            "unset": [k for k in self.env if k not in env],
            "streams": list(streams),
            "not_before": not_before,
        }
        _send(self._control_socket, message, list(streams.values()))
        self._is_activated = True
        # Whoever stopped it while it waited did not mean the worker that it is now.
        self.child.signal(signal.SIGCONT)

    def stale_file(self) -> str | None:
        return next((stamp[0] for stamp in self._files if file_stamp(stamp[0]) != stamp), None)

    def end(self) -> None:
        """Kill and reap the process; it holds nothing that could be lost."""
        self.release()
        self.child.close()

    def release(self) -> None:
        """Close the socket, and leave the process alone: it is a worker now."""
        self._control_socket.close()
        outputs, self._outputs = self._outputs, ()
        for fd in outputs:
            os.close(fd)

    def _describe_end(self) -> str:
        status = self.child.wait(_STATUS_WAIT_S)
        how = "it closed its socket" if status is None else f"it ended ({status.describe()})"
        return f"{how} {'when told to go' if self._is_activated else 'before it was ready'}"

    def _log_output(self) -> None:
        for fd in self._outputs:
            try:
                is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
                size = _LARGEST_OUTPUT_BYTES
                data = os.read(fd, size) if is_pipe else os.pread(fd, size, 0)
            except OSError:
                continue  # Nothing is in the pipe; or a null device that cannot be read.
            if text := data.decode(errors="replace").strip():
                logger.info("standby %d wrote while it imported: %s", self.slot, text)


def file_stamp(path: str) -> tuple[str, int, int]:
    """Return a file's path, size and time of change (ns); -1 for both when it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, status.st_size, status.st_mtime_ns


def _prewarm_env(env: Mapping[str, str], fd: int, hook_folder: str) -> dict[str, str]:
    old = env.get("PYTHONPATH")
    changed = {**env, FD_VARIABLE: str(fd)}
    # An empty value means "nothing"; after a colon it would mean the working directory.
    changed["PYTHONPATH"] = f"{hook_folder}{os.pathsep}{old}" if old else hook_folder
    if old is not None:
        changed[PYTHONPATH_VARIABLE] = old
    return changed


def _first_message(
    command: WorkerCommand, env: Mapping[str, str], imports: Sequence[str]
) -> dict[str, Any]:
    # The folder that Python searches first; `--run-path` runs a module of ours.
    entry = os.path.realpath(command.entry)
    folder: str | None = entry if os.path.isdir(entry) else os.path.dirname(entry)
    if env.get("PYTHONSAFEPATH"):
        folder = None
    elif "-m" in command.argv[:3]:
        folder = os.getcwd()
    return {
        "parent": os.getpid(),
        "imports": with_optional(imports),
        "watch": WATCH_LIST,
        "entry_dir": folder,
        "path_dirs": [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part],
    }


def _placeholder(path: str | None) -> int | None:
    if path is None:
        return None
    if path == os.devnull:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    return os.memfd_create("nvrx-standby", os.MFD_CLOEXEC)


def _send(
    control_socket: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()
) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > _LARGEST_MESSAGE_BYTES:
        raise PrewarmError(f"the order is too large ({len(data)} bytes)")
    try:
        control_socket.sendmsg([data], rights(fds))
    except OSError as error:
        raise PrewarmError(f"it does not listen: {error.strerror}") from error
