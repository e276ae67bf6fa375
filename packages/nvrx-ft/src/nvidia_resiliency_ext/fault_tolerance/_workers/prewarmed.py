# SPDX-License-Identifier: Apache-2.0
"""One prewarmed worker: its process and its socket, from the start until it is a worker or ended.

It decides neither when one starts nor which worker comes from it. All calls come from the
launcher's loop, and none but `end` waits. Start prewarmed workers from a thread that lasts as long
as the launcher: the kernel ties their lives to the thread.

    standby = PrewarmedWorker.start(command, env, slot=0)
    loop.watch(standby.fileno(), ...)       # receive() -> Ready(...)
    standby.go(GoOrder(env=worker_env))     # receive() -> Begun(...) or Failed(...)
    child = standby.release()
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import signal
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.children import Child, start_child
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .conditions import DEFAULT_IMPORTS, find_interpreter, watch_list, with_optional

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand

logger = logging.getLogger("nvrx")

HOOK_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
FD_VARIABLE = "NVRX_STANDBY_FD"
PYTHONPATH_VARIABLE = "NVRX_STANDBY_PYTHONPATH"
# A packet must fit the default send buffer (212992 bytes) while the prewarmed worker does not read.
_LARGEST_MESSAGE_BYTES = 96 << 10
_LARGEST_REPLY_BYTES = 1 << 20
_STATUS_WAIT_S = 0.2
_LARGEST_OUTPUT_BYTES = 4096


class PrewarmError(NvrxError):
    """A prewarmed worker cannot be started or activated; start the worker cold."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file that a prewarmed worker imported, as it was then."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The imports are done and the prewarmed worker waits.

    Attributes:
        pid: Its process.
        modules: How many modules it has.
        seconds: How long the imports took.
        private_bytes: Memory that it alone holds, or None where the kernel does not say.
        problem: Why it must not become a worker, or None.
        files: What must not change on disk while it waits.
    """

    pid: int
    modules: int
    seconds: float
    private_bytes: int | None
    problem: str | None
    files: tuple[FileStamp, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """It took "go" and runs the worker's script; `seconds` of imports were done before."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """It is of no use, before "go" or after; start the worker cold."""

    reason: str


@dataclass(frozen=True, slots=True)
class GoOrder:
    """What a prewarmed worker needs to become a worker.

    Attributes:
        env: The worker's whole environment.
        stdio_fds: Its three streams; None keeps the one that it has. They stay the caller's.
        not_before: Monotonic seconds before which it must not run the script; None: at once.
    """

    env: Mapping[str, str]
    stdio_fds: tuple[int | None, int | None, int | None] = (None, None, None)
    not_before: float | None = None


@dataclass(frozen=True, slots=True)
class Stdio:
    """What the worker's output will be; None means the launcher's own stream.

    Python chooses buffers when a stream is opened, so a prewarmed worker gets another file of the
    same kind until "go": a file in memory for a path, the null device for that, a pipe for a pipe.
    """

    stdout: str | None = None
    stderr: str | None = None
    is_piped: bool = False


INHERITED = Stdio()
PIPED = Stdio(is_piped=True)


class PrewarmedWorker:
    """A process that imports ahead and waits; made by `start`, ended by `end` or `release`.

    Attributes:
        slot: Local rank that it stands by for.
        env: The environment that it was started with, as the worker will see it.
        child: The process; the worker group's after `release`.
    """

    def __init__(
        self,
        slot: int,
        env: Mapping[str, str],
        child: Child,
        control_socket: socket.socket,
        outputs: tuple[int, ...] = (),
    ) -> None:
        self.slot = slot
        self.env = dict(env)
        self.child = child
        self._control_socket = control_socket
        self._outputs = outputs
        self._files: tuple[FileStamp, ...] = (file_stamp(os.path.realpath(child.argv[0])),)
        self._is_activated = False

    @classmethod
    def start(  # noqa: PLR0913 - what a process is started with
        cls,
        command: WorkerCommand,
        env: Mapping[str, str],
        slot: int,
        stdio: Stdio = INHERITED,
        *,
        argv: Sequence[str] | None = None,
        imports: Sequence[str] = DEFAULT_IMPORTS,
        hook_folder: str = HOOK_FOLDER,
    ) -> PrewarmedWorker:
        """Start the command of a worker, held until a cycle needs it.

        Raises:
            ChildStartError: The command cannot be run.
            PrewarmError: There are too many modules to name, or the kernel does not give what a
                prewarmed worker needs, such as files in memory.
        """
        words = tuple(argv) if argv is not None else command.for_local_rank(slot)
        outputs: list[int | None] = []
        kept: list[int] = []
        with contextlib.ExitStack() as on_failure:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                on_failure.callback(ours.close)
                on_failure.callback(theirs.close)
                if stdio.is_piped:
                    reading, writing = _placeholder_pipe()
                    on_failure.callback(os.close, reading)
                    on_failure.callback(os.close, writing)
                    outputs += (writing, writing)
                    kept.append(reading)
                else:
                    for path in (stdio.stdout, stdio.stderr):
                        fd = _placeholder(path)
                        outputs.append(fd)
                        if fd is not None:
                            on_failure.callback(os.close, fd)
                            kept.append(fd)
            except (OSError, AttributeError) as error:  # the latter: a libc without memfd
                raise PrewarmError(f"it cannot be prepared: {error}") from error
            ours.setblocking(False)
            _send(ours, _first_message(words, command.entry, env, imports))
            child = start_child(
                words,
                env=_prewarm_env(env, theirs.fileno(), hook_folder),
                stdout=outputs[0],
                stderr=outputs[1],
                pass_fds=(theirs.fileno(),),
                new_session=True,
                die_with_parent=True,
            )
            on_failure.pop_all()
        theirs.close()
        if stdio.is_piped:
            os.close(writing)
        return cls(slot, env, child, ours, tuple(kept))

    def fileno(self) -> int:
        """Return the socket, readable when `receive` has something to say."""
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
            message = _parse(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return Failed(f"it sent an unreadable message ({type(error).__name__})")
        if isinstance(message, Ready):
            self._files += message.files
        if not isinstance(message, Begun):
            self._log_output()
        return message

    def go(self, order: GoOrder) -> None:
        """Tell it to become the worker; it may still be importing, and then goes on when it can."""
        streams = [i for i, fd in enumerate(order.stdio_fds) if fd is not None]
        message = {
            "set": {k: v for k, v in order.env.items() if self.env.get(k) != v},
            "unset": [k for k in self.env if k not in order.env],
            "streams": streams,
            "not_before": order.not_before,
        }
        _send(self._control_socket, message, [fd for fd in order.stdio_fds if fd is not None])
        self._is_activated = True
        # Whoever stopped it while it waited did not mean the worker that it is now.
        self.child.signal(signal.SIGCONT)

    def stale_file(self) -> str | None:
        """Return a file that changed since the prewarmed worker imported it, or None."""
        for stamp in self._files:
            if file_stamp(stamp.path) != stamp:
                return stamp.path
        return None

    def release(self) -> Child:
        """Hand the process over: it is a worker now. The socket is closed."""
        self._close()
        return self.child

    def end(self) -> None:
        """Kill and reap the process; it holds nothing that could be lost."""
        self._close()
        self.child.close()

    def _close(self) -> None:
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
                text = _read_start(fd).decode(errors="replace").strip()
            except OSError:
                continue  # Nothing is in the pipe; or a null device that cannot be read.
            if text:
                logger.info("standby %d wrote while it imported: %s", self.slot, text)


def file_stamp(path: str) -> FileStamp:
    """Return a file's size and time of change; -1 for both when it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return FileStamp(path, -1, -1)
    return FileStamp(path, status.st_size, status.st_mtime_ns)


def _prewarm_env(env: Mapping[str, str], fd: int, hook_folder: str) -> dict[str, str]:
    old = env.get("PYTHONPATH")
    changed = {**env, FD_VARIABLE: str(fd)}
    # An empty value means "nothing"; after a colon it would mean the working directory.
    changed["PYTHONPATH"] = f"{hook_folder}{os.pathsep}{old}" if old else hook_folder
    if old is not None:
        changed[PYTHONPATH_VARIABLE] = old
    return changed


def _first_message(
    words: Sequence[str], entry: str, env: Mapping[str, str], imports: Sequence[str]
) -> dict[str, Any]:
    interpreter = find_interpreter(words)
    if interpreter is None:
        raise PrewarmError("the command does not run this Python")
    path_dirs = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        "parent": os.getpid(),
        "imports": with_optional(imports),
        "watch": watch_list(),
        "entry_dir": _entry_dir(interpreter.entry_kind, interpreter.flags, entry, env),
        "path_dirs": path_dirs,
    }


def _entry_dir(kind: str, flags: Sequence[str], entry: str, env: Mapping[str, str]) -> str | None:
    if env.get("PYTHONSAFEPATH") or any(
        not flag.startswith(("--", "-W", "-X")) and "P" in flag for flag in flags
    ):
        return None
    if kind == "module":
        return os.getcwd()
    path = os.path.realpath(entry)
    return path if os.path.isdir(path) else os.path.dirname(path)


def _placeholder(path: str | None) -> int | None:
    if path is None:
        return None
    if path == os.devnull:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    return os.memfd_create("nvrx-standby", os.MFD_CLOEXEC)


def _placeholder_pipe() -> tuple[int, int]:
    """Return a pipe of which neither end ever waits: too much output fails the import."""
    from nvidia_resiliency_ext.fault_tolerance._logs.reader import open_pipe

    reading, writing = open_pipe()
    os.set_blocking(writing, False)
    return reading, writing


def _read_start(fd: int) -> bytes:
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        return os.read(fd, _LARGEST_OUTPUT_BYTES)
    return os.pread(fd, _LARGEST_OUTPUT_BYTES, 0)


def _send(
    control_socket: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()
) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > _LARGEST_MESSAGE_BYTES:
        raise PrewarmError(f"the order is too large ({len(data)} bytes)")
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        control_socket.sendmsg([data], control)
    except OSError as error:
        raise PrewarmError(f"it does not listen: {error.strerror}") from error


def _parse(message: Mapping[str, Any]) -> Ready | Begun | Failed:
    parsers: dict[str, Callable[[Mapping[str, Any]], Ready | Begun | Failed]] = {
        "ready": _parse_ready,
        "begun": lambda fields: Begun(float(fields["seconds"])),
        "failed": lambda fields: Failed(_one_line(fields["reason"])),
    }
    return parsers[message["kind"]](message)


def _parse_ready(fields: Mapping[str, Any]) -> Ready:
    private_bytes = fields["private_bytes"]
    problem = fields["problem"]
    return Ready(
        pid=int(fields["pid"]),
        modules=int(fields["modules"]),
        seconds=float(fields["seconds"]),
        private_bytes=None if private_bytes is None else int(private_bytes),
        problem=None if problem is None else _one_line(problem),
        files=tuple(FileStamp(str(p), int(size), int(at)) for p, size, at in fields["files"]),
    )


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:1000]
