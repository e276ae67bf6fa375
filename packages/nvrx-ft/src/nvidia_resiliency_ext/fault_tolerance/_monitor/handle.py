# SPDX-License-Identifier: Apache-2.0
"""Owns a monitor process from its parent's side.

It is an isolated interpreter without `site`, so that it starts in tens of milliseconds and carries
no torch; it gets the parent's module search path over the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._env import RUN_ID
from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import Child, PidHandle, start_child, wait_readable
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.unix_sockets import Channel

from .messages import LAUNCHER_MESSAGES, Leave, LogLine, Ready, SlotReplaced, Start
from .slot import SlotError, SlotLayout, SlotMemory

SWEEP_LIMIT_S = 1.5
QUIET_SCANS = 2
_MOST_QUIET_SCANS = 20
_ROUND_S = 0.05


def sweep(
    run_id: str, pgids: Collection[int], *, spared: Collection[int], limit_s: float = SWEEP_LIMIT_S
) -> list[int]:
    """Kill the process groups and every process that carries the run's id.

    Such a process is killed with its whole group, unless its session is ours or that of a spared
    one: a signal to a group reaches also what it forks at that moment. This is done until none is
    left; processes that are still there after `limit_s` are returned.
    """
    give_up_at = time.monotonic() + limit_s
    own_group = os.getpgid(0)
    spared_stats = (procfs.read_stat(pid) for pid in (os.getpid(), *spared))
    kept_sessions = {stat.sid for stat in spared_stats if stat is not None}
    groups = {pgid for pgid in pgids if pgid > 1 and pgid != own_group}
    quiet_scans = 0
    listed = set(procfs.pids())
    while True:
        # Scanned anew each time: a process may have forked between the scan and its death.
        strays = procfs.processes_with_environ(RUN_ID, run_id)
        groups |= {stat.pgid for stat in strays if stat.sid not in kept_sessions}
        for pgid in groups:
            # Nobody left, or a recycled number that belongs to somebody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pgid, signal.SIGKILL)
        found = {*(stat.pid for stat in strays), *procfs.pids_in_groups(groups)}
        found -= {os.getpid(), *spared}
        quiet_scans = 0 if found else quiet_scans + 1
        # A scan can miss a process that comes and goes; then the numbers have changed meanwhile.
        before, listed = listed, set(procfs.pids())
        if quiet_scans >= (QUIET_SCANS if listed == before else _MOST_QUIET_SCANS):
            return []
        handles = [handle for pid in found if (handle := _kill(pid, run_id, groups)) is not None]
        round_ends_at = min(time.monotonic() + _ROUND_S, give_up_at)
        for handle in handles:
            handle.wait(max(0.0, round_ends_at - time.monotonic()))
            handle.close()
        if time.monotonic() >= give_up_at:
            return sorted(pid for pid in found if procfs.is_running(pid))


def _kill(pid: int, run_id: str, groups: Collection[int]) -> PidHandle | None:
    try:
        handle = PidHandle(pid)
    except OSError:
        return None  # gone, or no descriptor is left: its turn comes when this round's are closed
    # Asked again now that the handle holds the process: the number may have been recycled.
    stat = procfs.read_stat(pid)
    is_in_group = stat is not None and stat.pgid in groups
    if is_in_group or procfs.environ_value(pid, RUN_ID) == run_id:
        with contextlib.suppress(PermissionError):
            handle.signal(signal.SIGKILL)
            return handle
    handle.close()
    return None


logger = logging.getLogger("nvrx")

_BOOT = (
    "import os,sys\n"
    "f=int(sys.argv[1])\n"
    "def r(n):\n"
    " b=b''\n"
    " while len(b)<n:\n"
    "  c=os.read(f,n-len(b))\n"
    "  if not c: os._exit(1)\n"
    "  b+=c\n"
    " return b\n"
    "sys.path[:]=r(int.from_bytes(r(4),'big')).decode('utf-8','surrogateescape').split('\\0')\n"
    "from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import main\n"
    "main(f)\n"
)
_SEND_LIMIT_S = 10.0


class MonitorStartError(NvrxError, RuntimeError):
    """The monitor process did not come up."""


class MonitorHandle:
    """A running monitor: its process, its socket and the slots of its ranks; made by `launch`.

    Closing the socket (or dying) makes the monitor sweep and leave. Not thread-safe.
    """

    def __init__(
        self, child: Child, channel: Channel, layout: SlotLayout, local_ranks: Sequence[int]
    ) -> None:
        self.child = child
        self.layout = layout
        self._channel = channel
        self._local_ranks = tuple(local_ranks)
        self._memories: list[SlotMemory] = []
        self._early: list[object] = []

    @classmethod
    def launch(
        cls,
        config: Mapping[str, Any],
        socket_paths: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        ready_limit_s: float | None = None,
        **order: Any,
    ) -> MonitorHandle:
        """Start a monitor, and wait until its sockets listen if there is a `ready_limit_s`.

        Without one `Ready` is among the first messages of `receive`.
        """
        begin = Start(config=dict(config), socket_paths=list(socket_paths), **order)
        path = "\0".join(os.path.abspath(p) for p in sys.path).encode("utf-8", "surrogateescape")
        first_words = len(path).to_bytes(4, "big") + path + LAUNCHER_MESSAGES.encode(begin)
        layout = SlotLayout(tuple(config["rank_section_timeouts"]))
        # An outer run's id would let the outer sweep kill this monitor before its own sweep.
        given = dict(os.environ if env is None else env)
        given.pop(RUN_ID, None)
        with contextlib.ExitStack() as on_failure:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            on_failure.callback(ours.close)
            with theirs:
                fd = theirs.fileno()
                argv = [sys.executable, "-I", "-S", "-c", _BOOT, str(fd)]
                child = start_child(argv, env=given, pass_fds=[fd], wake_when_orphaned=True)
            on_failure.callback(child.close)
            try:
                ours.settimeout(_SEND_LIMIT_S)
                ours.sendall(first_words)
            except OSError as exc:
                raise MonitorStartError(f"the rank monitor did not take its order: {exc}") from exc
            local_ranks = begin.local_ranks or range(len(begin.socket_paths))
            handle = cls(child, Channel(ours, LAUNCHER_MESSAGES), layout, local_ranks)
            on_failure.pop_all()  # From here on it owns both.
            on_failure.callback(handle.close)
            if ready_limit_s is not None:
                handle.wait_ready(ready_limit_s)
            on_failure.pop_all()
        return handle

    @property
    def slots(self) -> list[memoryview]:
        """Words of each slot, in the order of the socket paths."""
        return [memory.words for memory in self._memories]

    @property
    def is_ready(self) -> bool:
        return len(self._memories) == len(self._local_ranks)

    @property
    def is_over(self) -> bool:
        return self._channel.is_over

    def fileno(self) -> int:
        return self._channel.fileno()

    def receive(self) -> list[object]:
        """Return the monitor's messages but for log lines and new slots; never waits.

        With `is_over` afterwards the monitor is gone: look at `child`.
        """
        received, self._early = self._early, []
        self._channel.flush()
        for message in self._channel.receive():
            match message:
                case LogLine(level, text):
                    logger.log(level, "%s", text)
                case SlotReplaced(local_rank):
                    index = self._local_ranks.index(local_rank)
                    for memory in self._adopted(1):
                        self._memories[index].close()
                        self._memories[index] = memory
                case Ready():
                    self._memories.extend(self._adopted(len(self._local_ranks)))
                    received.append(message)
                case _:
                    received.append(message)
        return received

    def send(self, message: object) -> None:
        """Send a message; never waits. A monitor that is gone is not an error here."""
        self._channel.send(message)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the monitor listens; keep its other messages for `receive`."""
        deadline = Deadline.after(timeout_s)
        while not self.is_ready:
            wait_readable(self.fileno(), deadline.remaining())
            self._early = [m for m in self.receive() if not isinstance(m, Ready)]
            if self._channel.is_over:
                status = self.child.wait(1.0)
                how = "closed its socket" if status is None else status.describe()
                raise MonitorStartError(f"the rank monitor did not start: {how}")
            if deadline.expired() and not self.is_ready:
                raise MonitorStartError(f"the rank monitor was not ready after {timeout_s} s")

    def leave(self, timeout_s: float) -> bool:
        """Order the monitor to sweep and leave; kill it if it does not; return whether it left."""
        self.send(Leave())
        status = self.child.wait(timeout_s)
        self._early = self.receive()  # its last log lines
        self.close()
        return status is not None

    def close(self) -> None:
        """Close the socket, end the process if it still runs, give back the memory; idempotent."""
        self._channel.close()
        self.child.close()
        for memory in self._memories:
            memory.close()
        self._memories = []

    def _adopted(self, count: int) -> Iterator[SlotMemory]:
        for fd in self._channel.take_fds(count):
            try:
                yield SlotMemory.adopt(fd, self.layout, must_be_sealed=False)
            except SlotError:
                os.close(fd)
                raise
