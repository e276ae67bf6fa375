# SPDX-License-Identifier: Apache-2.0
"""Child processes: start, watch, signal, reap; and handles on processes of others.

It does not decide when a process must end. Where the kernel has no `pidfd_open` (before 5.3, or
behind a seccomp filter) children are watched by a thread in `waitid`, and processes of others are
told apart by their start time. Setting `NVRX_FORCE_NO_PIDFD=1` forces that path.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import signal as signals
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, final

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError

__all__ = [
    "Child", "ExitStatus", "PidHandle", "end_with_parent", "pidfd_available", "signal_name",
    "start_child",
]  # fmt: skip

logger = logging.getLogger("nvrx")

_PR_SET_PDEATHSIG = 1
_LOST_STATUS = 255
_CLOSE_WAIT_S = 10.0


def signal_name(number: int) -> str:
    """Return the name of signal `number`, such as `SIGKILL`, or `signal 40` for one without."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        code: Exit code, or `None` when a signal ended it.
        signal: The signal that ended it, or `None`.
        lost: Somebody else reaped it, so that `code` is only a stand-in for "failed".
    """

    code: int | None
    signal: int | None = None
    lost: bool = False

    @property
    def returncode(self) -> int:
        """The exit code, negative for a signal, as `subprocess` has it."""
        if self.signal is not None:
            return -self.signal
        return _LOST_STATUS if self.code is None else self.code

    def describe(self) -> str:
        """Return the status in words, such as `exit code 1` or `killed by SIGKILL (9)`."""
        if self.lost:
            return "ended, but another waiter took its exit status"
        if self.signal is None:
            return f"exit code {self.code}"
        name = signal_name(self.signal)
        return f"killed by {name}" if " " in name else f"killed by {name} ({self.signal})"

    @classmethod
    def from_wait_status(cls, status: int) -> ExitStatus:
        """Return the exit status that `status`, a number of `os.waitpid`, means."""
        code = os.waitstatus_to_exitcode(status)
        return cls(None, -code) if code < 0 else cls(code)


@functools.lru_cache(maxsize=1)
def pidfd_available() -> bool:
    """Return whether processes can be watched and signalled through pidfds; probed once."""
    if os.environ.get("NVRX_FORCE_NO_PIDFD") == "1" or not hasattr(os, "pidfd_open"):
        return False
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(os.getpid())
        try:
            signals.pidfd_send_signal(descriptor, 0)
        finally:
            os.close(descriptor)
        return True
    return False


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable or the time is up; return whether it is readable."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    # A day at most per call: the milliseconds of a longer time overflow.
    return bool(poller.poll(None if timeout_s is None else min(timeout_s, 86400.0) * 1000.0))


@final
class PidHandle:
    """A hold on process `pid`, not our child, that never acts on a recycled number.

    Example:
        >>> with PidHandle(os.getpid()) as process:
        ...     assert process.alive()
    """

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        """Take hold of a running process that, if the caller knows it, started at `start_ticks`.

        Raises:
            ProcessLookupError: No such process runs, or one that started at another time.
        """
        self.pid = pid
        self._descriptor = os.pidfd_open(pid) if pidfd_available() else None
        try:
            self.start_ticks = self._identify(start_ticks)
        except BaseException:  # too many open files, for one: the descriptor must not stay behind
            self.close()
            raise

    def _identify(self, start_ticks: int | None) -> int:
        stat = procfs.read_stat(self.pid)
        # Alive after the stat was read means that the stat is of the process behind the pidfd.
        if stat is None or not stat.running or self._ended():
            raise ProcessLookupError(f"there is no running process {self.pid}")
        if start_ticks is not None and start_ticks != stat.start_ticks:
            raise ProcessLookupError(f"process {self.pid} is another one that took over its number")
        return stat.start_ticks

    def fileno(self) -> int | None:
        """Return a descriptor, readable once the process has ended; `None` without pidfd."""
        return self._descriptor

    def alive(self) -> bool:
        """Return whether the process still runs; a zombie does not."""
        if self._descriptor is not None:
            return not self._ended()
        stat = procfs.read_stat(self.pid)
        return stat is not None and stat.running and stat.start_ticks == self.start_ticks

    def signal(self, sig: int) -> bool:
        """Send signal `sig`; return whether the process still existed."""
        try:
            if self._descriptor is not None:
                signals.pidfd_send_signal(self._descriptor, sig)
            elif self.alive():
                os.kill(self.pid, sig)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait `timeout_s` seconds at most for the process to end; return whether it has.

        Without pidfd this looks at /proc ten times a second: the kernel tells nobody but a parent.
        """
        deadline = Deadline.after(timeout_s)
        while self.alive() and not deadline.expired():
            if self._descriptor is not None:
                wait_readable(self._descriptor, deadline.timeout())
            else:
                select.select([], [], [], min(0.1, deadline.remaining()))
        return not self.alive()

    def close(self) -> None:
        """Give the descriptor back; the process is left alone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> PidHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ended(self) -> bool:
        return self._descriptor is not None and wait_readable(self._descriptor, 0.0)


@final
class Child:
    """One child process from its start until it is reaped; made by `start_child`.

    The exit status is read once and kept. Nothing is ever signalled after the process was reaped,
    so a recycled process number is safe. All methods may be called from several threads.

    `process` runs the command `argv`; `new_session` says that it leads its own session and group.

    Attributes:
        pid: Its number.
        argv: The command that was started.
        stdin, stdout, stderr: Our ends of its streams that were started with a pipe, else None.

    Example:
        >>> with start_child(["/bin/sh", "-c", "exit 3"]) as child:
        ...     child.wait(timeout_s=10.0).describe()
        'exit code 3'
    """

    def __init__(
        self, process: subprocess.Popen[bytes], argv: tuple[str, ...], *, new_session: bool
    ) -> None:
        self.pid = process.pid
        self.argv = argv
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._process = process
        self._leads_group = new_session
        self._lock = threading.Lock()
        self._status: ExitStatus | None = None
        self._watch, self._watcher = _open_watch(process.pid)

    def fileno(self) -> int:
        """Return a descriptor that is readable from the moment the process has ended.

        Never read it: call `poll` when a selector reports it.
        """
        return self._watch

    def poll(self) -> ExitStatus | None:
        """Reap the process if it has ended; return how it ended, or `None` while it runs."""
        with self._lock:
            return self._reap()

    def wait(self, timeout_s: float | None = None) -> ExitStatus | None:
        """Wait until the process ends; return None after `timeout_s` seconds (None: no limit)."""
        deadline = Deadline.after(timeout_s)
        status = self.poll()
        while status is None and not deadline.expired():
            wait_readable(self.fileno(), deadline.timeout())
            status = self.poll()
        return status

    def signal(self, sig: int) -> bool:
        """Send signal `sig` to the process alone; return whether the process still existed."""
        with self._lock:
            if self._reap() is not None:
                return False
            try:
                if self._watcher is None:
                    signals.pidfd_send_signal(self._watch, sig)
                else:
                    os.kill(self.pid, sig)
            except ProcessLookupError:
                return False
            return True

    def signal_group(self, sig: int) -> bool:
        """Send signal `sig` to the process group; return whether the group still had a process.

        The group may outlive the process. It is then signalled only while /proc shows members of
        the session that the process made and no new process with its number.

        Raises:
            ValueError: It was started without a session of its own: its group is ours.
        """
        if not self._leads_group:
            raise ValueError(f"process {self.pid} shares our process group: signal it alone")
        with self._lock:
            try:
                if self._status is not None:
                    # Only an unreaped leader, even an ended one, surely holds on to the number.
                    os.killpg(self.pid, 0)
                    # While a group has members the kernel gives its number to no new process, so
                    # a process under that number, or another session's member, is somebody else's.
                    members = procfs.running_in_groups([self.pid])
                    is_taken = any(stat.pid == self.pid for stat in members)
                    if is_taken or all(stat.sid != self.pid for stat in members):
                        return False
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                return False
            return True

    def stop(self, grace_s: float, *, first: int = signals.SIGTERM) -> ExitStatus | None:
        """End the process and its group: `first`, then SIGKILL after `grace_s` seconds; reap it.

        Returns:
            How it ended, or `None` for a process that even SIGKILL does not end, because the
            kernel holds it in an uninterruptible wait.
        """
        send = self.signal_group if self._leads_group else self.signal
        send(signals.SIGCONT)
        send(first)
        status = self.wait(grace_s)
        send(signals.SIGKILL)
        return status if status is not None else self.wait(_CLOSE_WAIT_S)

    def close(self) -> None:
        """Kill the process if it runs, reap it and close all descriptors; harmless if repeated."""
        if self.poll() is None and self.stop(0.0, first=signals.SIGKILL) is None:
            logger.warning("process %d does not end after SIGKILL", self.pid)
        for pipe in (self.stdin, self.stdout, self.stderr):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:
                logger.debug("a child ended before it read all of its input")
        watch, self._watch = self._watch, -1
        if watch >= 0:
            if self._watcher is not None:
                self._watcher.join(_CLOSE_WAIT_S)
            os.close(watch)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reap(self) -> ExitStatus | None:
        # Popen.poll is not used: it reports success for a status that somebody else took.
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = ExitStatus(None, lost=True)
            else:
                if pid == 0:
                    return None
                self._status = ExitStatus.from_wait_status(status)
            self._process.returncode = self._status.returncode
        return self._status


def start_child(  # noqa: PLR0913 - each is one property of the child
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Collection[int] = (),
    new_session: bool = True,
    die_with_parent: bool = False,
    wake_when_orphaned: bool = False,
) -> Child:
    """Start a program and return its owner.

    The child gets default SIGPIPE handling, no blocked signals, its three streams and `pass_fds`.

    Args:
        argv: Program and arguments; the program is looked up in PATH.
        env: Its whole environment; `None` passes ours on.
        cwd: Its working directory; `None` keeps ours.
        stdin: As for `subprocess.Popen`: a descriptor, a file, `DEVNULL`, `PIPE` or `None` (ours).
        stdout: Likewise.
        stderr: Likewise, or `STDOUT`.
        pass_fds: Descriptors that it inherits under the same numbers.
        new_session: Give it a session and a process group of its own.
        die_with_parent: Let the kernel kill it when we die. The kernel means the *thread* that
            called this: call it from one that lasts as long as the child may live.
        wake_when_orphaned: Let the kernel continue it when we die, should it be stopped then, so
            that it can see our end of a pipe close. Without effect beside `die_with_parent`.

    Raises:
        ChildStartError: The program cannot be run.
    """
    command = tuple(argv)
    # A parent that ignored SIGCHLD leaves that to us, and the kernel then drops exit statuses.
    if signals.getsignal(signals.SIGCHLD) is signals.SIG_IGN:
        if threading.current_thread() is threading.main_thread():
            signals.signal(signals.SIGCHLD, signals.SIG_DFL)
        else:
            logger.warning("SIGCHLD is ignored: exit statuses of child processes will be lost")
    setup: Callable[[], None] | None = None  # lets Popen use the faster vfork
    if die_with_parent or wake_when_orphaned:
        _load_prctl()  # between fork and exec nothing may be imported
        death_signal = signals.SIGKILL if die_with_parent else signals.SIGCONT
        setup = functools.partial(_set_up_child, os.getpid(), death_signal)
    elif signals.pthread_sigmask(signals.SIG_BLOCK, ()):
        setup = _unmask
    try:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=new_session,
            preexec_fn=setup,  # noqa: PLW1509
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ChildStartError(command, str(error)) from error
    try:
        return Child(process, command, new_session=new_session)
    except OSError as error:
        process.kill()
        process.wait()
        raise ChildStartError(command, f"it cannot be watched: {error}") from error


def end_with_parent(signum: int = signals.SIGTERM) -> None:
    """Let the kernel send this process `signum` (default SIGTERM) when its parent dies.

    Raises:
        OSError: The kernel refuses.
    """
    if _load_prctl()(_PR_SET_PDEATHSIG, signum) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused")


def _unmask() -> None:
    signals.pthread_sigmask(signals.SIG_SETMASK, ())


def _set_up_child(parent_pid: int, death_signal: int) -> None:
    _unmask()
    end_with_parent(death_signal)
    # The parent may have died before the call above; the kernel then sends nothing.
    if os.getppid() != parent_pid:
        os._exit(1)


@functools.lru_cache(maxsize=1)
def _load_prctl() -> Callable[[int, int], int]:
    import ctypes  # milliseconds that most starts need not pay

    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
    prctl.restype = ctypes.c_int
    function: Callable[[int, int], int] = prctl
    return function


def _open_watch(pid: int) -> tuple[int, threading.Thread | None]:
    """Return a descriptor that a child's end makes readable, and the thread of a pipe or None."""
    if pidfd_available():
        return os.pidfd_open(pid), None
    reader, writer = os.pipe()
    thread = threading.Thread(
        target=_close_at_exit_of, args=(pid, writer), name=f"nvrx-watch-{pid}", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:
        os.close(reader)
        os.close(writer)
        raise OSError(errno.EAGAIN, str(error)) from error
    return reader, thread


def _close_at_exit_of(pid: int, writer: int) -> None:
    try:
        # WNOWAIT leaves the status to Child.poll, which may also be faster than this thread.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        pass
    finally:
        os.close(writer)
