# SPDX-License-Identifier: Apache-2.0
"""Child processes: start, watch, signal, reap; and handles on processes of others.

It does not decide when a process must end. Where the kernel has no `pidfd_open` (before 5.3, or
behind a seccomp filter) children are watched by a thread in `waitid`, and processes of others are
told apart by their start time. Setting `NVRX_FORCE_NO_PIDFD=1` forces that path.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import signal as signals
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError

__all__ = ["Child", "ExitStatus", "PidHandle", "pidfd_available", "start_child"]

logger = logging.getLogger("nvrx")

_PR_SET_PDEATHSIG = 1
_LOST_STATUS = 255
_CLOSE_WAIT_S = 10.0


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
        """Return it in words, such as `exit code 1` or `killed by SIGKILL (9)`."""
        if self.lost:
            return "ended, but another waiter took its exit status"
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            name = signals.Signals(self.signal).name
        except ValueError:
            name = "signal"
        return f"killed by {name} ({self.signal})"

    @classmethod
    def from_wait_status(cls, status: int) -> ExitStatus:
        """Return the meaning of the number that `os.waitpid` gives."""
        code = os.waitstatus_to_exitcode(status)
        return cls(None, -code) if code < 0 else cls(code)


class Child:
    """One child process from its start until it is reaped; made by `start_child`.

    The exit status is read once and kept. Nothing is ever signalled after the process was reaped,
    so a recycled process number is safe. All methods may be called from several threads.

    Example:
        >>> with start_child(["/bin/sh", "-c", "exit 3"]) as child:
        ...     child.wait(timeout_s=10.0).describe()
        'exit code 3'

    Attributes:
        pid: Its number.
        argv: The command that was started.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], argv: tuple[str, ...], *, new_session: bool
    ) -> None:
        self.pid = process.pid
        self.argv = argv
        self._process = process
        self._leads_group = new_session
        self._lock = threading.Lock()
        self._status: ExitStatus | None = None
        self._watch = _open_watch(process.pid)

    @property
    def stdin(self) -> IO[bytes] | None:
        """Our end of its input when it was started with a pipe."""
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        """Our end of its output when it was started with a pipe."""
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """Our end of its error output when it was started with a pipe."""
        return self._process.stderr

    def fileno(self) -> int:
        """Return a descriptor that is readable from the moment the process has ended.

        Never read it: call `poll` when a selector reports it.
        """
        return self._watch.fileno()

    def poll(self) -> ExitStatus | None:
        """Reap the process if it has ended; return how it ended, or `None` while it runs."""
        with self._lock:
            return self._reap()

    def wait(self, timeout_s: float | None = None) -> ExitStatus | None:
        """Wait until the process ends; return `None` when the time is up first."""
        deadline = Deadline.after(timeout_s)
        status = self.poll()
        while status is None and not deadline.expired():
            _wait_readable(self.fileno(), deadline.timeout())
            status = self.poll()
        return status

    def signal(self, sig: int) -> bool:
        """Send a signal to the process alone; return whether it was still there to get it."""
        with self._lock:
            return self._reap() is None and self._send(sig)

    def signal_group(self, sig: int) -> bool:
        """Send a signal to its whole process group; return whether anybody was there to get it.

        The group may outlive the process. It is then signalled only while /proc shows members of
        the session that the process made and nobody new under its number.

        Raises:
            ValueError: The process was started without a session of its own, so that its group
                is ours.
        """
        if not self._leads_group:
            raise ValueError(f"process {self.pid} shares our process group: signal it alone")
        with self._lock:
            try:
                if self._status is not None:
                    # Only an unreaped leader, even an ended one, surely holds on to the number.
                    os.killpg(self.pid, 0)
                    if not _group_remains(self.pid):
                        return False
                os.killpg(self.pid, sig)
            except ProcessLookupError:
                return False
            return True

    def stop(self, grace_s: float, *, first: int = signals.SIGTERM) -> ExitStatus | None:
        """End it and its group: `first`, then SIGKILL after `grace_s` seconds; reap it.

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
        """Kill what still runs, reap it and give the descriptors back; harmless when repeated."""
        if self._process.returncode is None and self.poll() is None:
            if self.stop(0.0, first=signals.SIGKILL) is None:
                logger.warning("process %d does not end after SIGKILL", self.pid)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                _close_pipe(pipe)
        self._watch.close()

    def __enter__(self) -> Child:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return its number and how it ended."""
        state = "running" if self._status is None else self._status.describe()
        return f"Child(pid={self.pid}, {state})"

    def _send(self, sig: int) -> bool:
        try:
            self._watch.send(sig)
        except ProcessLookupError:
            return False
        return True

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


class PidHandle:
    """A hold on a process that is not our child: it never acts on a recycled number.

    Attributes:
        pid: Its number.
        start_ticks: Its start since boot in clock ticks.
    """

    def __init__(self, pid: int, start_ticks: int | None = None) -> None:
        """Take hold of a running process.

        Args:
            pid: Its number.
            start_ticks: Its start, where the caller knows it from before.

        Raises:
            ProcessLookupError: No such process runs, or one that started at another time.
        """
        self.pid = pid
        self._descriptor = os.pidfd_open(pid) if pidfd_available() else None
        stat = procfs.read_stat(pid)
        # Alive after the stat was read means that the stat is of the process behind the pidfd.
        if stat is None or not stat.running or self._ended():
            self.close()
            raise ProcessLookupError(f"there is no running process {pid}")
        self.start_ticks = stat.start_ticks
        if start_ticks is not None and start_ticks != stat.start_ticks:
            self.close()
            raise ProcessLookupError(f"process {pid} is another one that took over its number")

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
        """Send it a signal; return whether it was still there to get it."""
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
        """Wait until the process has ended; return whether it has.

        Without pidfd this looks at /proc ten times a second: the kernel tells nobody but a parent.
        """
        deadline = Deadline.after(timeout_s)
        while self.alive() and not deadline.expired():
            if self._descriptor is not None:
                _wait_readable(self._descriptor, deadline.timeout())
            else:
                select.select([], [], [], min(0.1, deadline.remaining()))
        return not self.alive()

    def close(self) -> None:
        """Give the descriptor back; the process is left alone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> PidHandle:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _ended(self) -> bool:
        return self._descriptor is not None and _wait_readable(self._descriptor, 0.0)


def start_child(
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
) -> Child:
    """Start a program and return its owner.

    The child gets default SIGPIPE handling, no blocked signals, and no descriptors but its three
    streams and `pass_fds`.

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

    Raises:
        ChildStartError: The program cannot be run.
    """
    command = tuple(argv)
    _keep_exit_statuses()
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
            preexec_fn=_child_setup(die_with_parent=die_with_parent),  # noqa: PLW1509
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ChildStartError(command, str(error)) from error
    try:
        return Child(process, command, new_session=new_session)
    except OSError as error:
        process.kill()
        process.wait()
        raise ChildStartError(command, f"it cannot be watched: {error}") from error


@functools.lru_cache(maxsize=1)
def pidfd_available() -> bool:
    """Return whether processes can be watched and signalled through pidfds; probed once."""
    if os.environ.get("NVRX_FORCE_NO_PIDFD") == "1" or not hasattr(os, "pidfd_open"):
        return False
    try:
        descriptor = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        signals.pidfd_send_signal(descriptor, 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class _PidfdWatch:
    """Watches and signals a process through its pidfd."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def send(self, sig: int) -> None:
        signals.pidfd_send_signal(self._descriptor, sig)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _ThreadWatch:
    """Watches a child of ours with a thread that ends, and closes a pipe, when the child does."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._reader, writer = os.pipe()
        self._thread = threading.Thread(
            target=_close_at_exit_of, args=(pid, writer), name=f"nvrx-watch-{pid}", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        return self._reader

    def send(self, sig: int) -> None:
        os.kill(self._pid, sig)

    def close(self) -> None:
        descriptor, self._reader = self._reader, -1
        if descriptor >= 0:
            self._thread.join(_CLOSE_WAIT_S)
            os.close(descriptor)


def _open_watch(pid: int) -> _PidfdWatch | _ThreadWatch:
    return _PidfdWatch(pid) if pidfd_available() else _ThreadWatch(pid)


def _close_at_exit_of(pid: int, writer: int) -> None:
    try:
        # WNOWAIT leaves the status to Child.poll, which may also be faster than this thread.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        pass
    finally:
        os.close(writer)


def _group_remains(pgid: int) -> bool:
    # While a group has members the kernel gives its number to no new process, so a process under
    # that number, or a member of another session, means that the group is somebody else's.
    members = procfs.running_in_groups([pgid])
    return any(stat.sid == pgid for stat in members) and all(stat.pid != pgid for stat in members)


def _wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    # A day at most per call: the milliseconds of a longer time overflow.
    return bool(poller.poll(None if timeout_s is None else min(timeout_s, 86400.0) * 1000.0))


def _close_pipe(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:
        logger.debug("a child ended before it read all of its input")


def _keep_exit_statuses() -> None:
    # A parent that ignored SIGCHLD leaves that to us, and the kernel then drops exit statuses.
    if signals.getsignal(signals.SIGCHLD) is not signals.SIG_IGN:
        return
    if threading.current_thread() is threading.main_thread():
        signals.signal(signals.SIGCHLD, signals.SIG_DFL)
    else:
        logger.warning("SIGCHLD is ignored: exit statuses of child processes will be lost")


def _child_setup(*, die_with_parent: bool) -> Callable[[], None] | None:
    """Return what the child runs before exec; `None` lets Popen use the faster vfork."""
    masked = bool(signals.pthread_sigmask(signals.SIG_BLOCK, ()))
    if not die_with_parent and not masked:
        return None
    # Everything is looked up here: between fork and exec nothing may be imported.
    set_death_signal = _load_prctl() if die_with_parent else None
    return functools.partial(_set_up_child, os.getpid(), set_death_signal)


def _set_up_child(parent_pid: int, set_death_signal: Callable[[int, int], int] | None) -> None:
    signals.pthread_sigmask(signals.SIG_SETMASK, ())
    if set_death_signal is None:
        return
    if set_death_signal(_PR_SET_PDEATHSIG, signals.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) was refused")
    # The parent may have died before the call above; the kernel then sends nothing.
    if os.getppid() != parent_pid:
        os._exit(1)


@functools.lru_cache(maxsize=1)
def _load_prctl() -> Callable[[int, int], int]:
    import ctypes  # noqa: PLC0415 - costs milliseconds that most starts need not pay

    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong)
    prctl.restype = ctypes.c_int
    function: Callable[[int, int], int] = prctl
    return function
