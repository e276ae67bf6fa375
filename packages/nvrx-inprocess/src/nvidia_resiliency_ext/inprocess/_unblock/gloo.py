# SPDX-License-Identifier: Apache-2.0
"""End gloo's connections of this process, so that a blocked collective fails.

gloo has no abort that ends a collective, and its process group is not closed while anything refers
to it. Each gloo device has a thread that waits for all its sockets with one epoll descriptor.
`/proc` tells which thread is gloo's, which descriptor it waits for and which sockets that watches:
nothing is guessed from addresses.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

from nvidia_resiliency_ext.inprocess import _inputs
from nvidia_resiliency_ext.inprocess._unblock.waits import is_in_futex
from nvidia_resiliency_ext.shared_utils.procfs import read_stat
from nvidia_resiliency_ext.shared_utils.store_sockets import socket_copy, tcp_socket

from .waits import StoreWaits, system_call, thread_name

_Wait = tuple[int, int, int]


class UnreadConnections:
    """Ends connections for this process first, and for their peers a while later.

    gloo forgets who waits for a write that fails while the peer is being stopped: its
    `Pair::signalException` tells those that wait for their turn, not those under way. So a
    connection takes in what is written until the peer has stopped, too. Where descriptors are
    scarce (the last quarter is left to others), or threads, both sides are ended at once.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._kept: dict[str, socket.socket] = {}
        self._timer: threading.Timer | None = None

    def add(self, name: str, connection: socket.socket) -> None:
        """Shut down the read side, accept peer writes until released; OSError: no connection."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            with self._lock:
                connection.shutdown(socket.SHUT_RD)
                if name in self._kept:
                    return
                # A new descriptor has the lowest free number: so many are in use.
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
                if connection.fileno() >= most or not self._arm_timer():
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                self._kept[name] = connection
                stack.pop_all()

    def release(self) -> None:
        """Shut the kept connections down for their peers, which have stopped or had their time."""
        with self._lock:
            kept, self._kept = self._kept, {}
            timer, self._timer = self._timer, None
        for connection in kept.values():
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()
            timer.join()

    def _arm_timer(self) -> bool:
        """Start the timer that releases them; `False` where no thread can be started."""
        # In a forked process the parent's thread is not alive.
        if self._timer is None or not self._timer.is_alive():
            timer = threading.Timer(self._linger_s, self.release)
            timer.name = "nvrx-unread"
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # too many threads, or the interpreter ends
                return False
            self._timer = timer
        return True


_TASKS = "/proc/self/task"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_LOOP_NAMES = frozenset({"gloo_tcp_loop", "gloo_tls_loop"})
_WAIT_CALLS = {"x86_64": (232, 281, 441), "aarch64": (22, 441)}  # epoll_wait, _pwait, _pwait2

# How gloo's loop waits: space for so many events, for so many milliseconds. For versions (before
# 2026) in which the thread has no name.
_LOOP_WAIT = (64, 10)
_SEQUENCE_NUMBER = struct.Struct("=q")
_CONNECT_S = 1.0

# A loop rests at least every few milliseconds, but not while the host lets it wait for a processor.
_NAMED_S = 0.3
_OTHERS_S = 0.05
_LOOK_S = 0.0005

# The aborts of a job begin within milliseconds of each other, on a busy host within some hundred. A
# rank that does not abort yet, as in an atomic block, waits so long for one that does.
_LINGER_S = 1.0

# By thread and its start: a loop keeps its descriptor. One that never rests, as when a connection
# was cut in the middle of a message, is known from when it did.
_known: dict[tuple[str, int], int] = {}
_ended = UnreadConnections(_LINGER_S)


def end_gloo_connections() -> int:
    """End every connection of every gloo device of this process; return how many there were.

    The sockets stay open: they are gloo's to close. The other side can write until
    `release_gloo_connections`, or for a second.
    """
    ended = 0
    for descriptor in _watched_sockets():
        with contextlib.suppress(OSError):
            ended += _end(descriptor)
    return ended


def release_gloo_connections() -> None:
    """End for their peers, too, the connections that were ended for this process."""
    _ended.release()


def end_gloo_rendezvous(world_size: int) -> int:
    """End waits of this process for other ranks to connect to its gloo devices; count devices.

    A group that is being made waits, for minutes and without any socket to shut down, for ranks
    that connect and say in 8 bytes which one they are. Here all of them do, and hang up.
    """
    devices = 0
    for descriptor in _watched_sockets():
        with contextlib.suppress(OSError):
            devices += _connect_as_all(descriptor, world_size)
    return devices


def _connect_as_all(descriptor: int, world_size: int) -> bool:
    """Connect to a socket as each rank, if it listens."""
    found = tcp_socket(descriptor)
    if found is None:
        return False
    with found[1] as listener:
        if not _listens(listener):
            return False
        address = listener.getsockname()
        for number in range(world_size):
            with socket.socket(listener.family, socket.SOCK_STREAM) as peer:
                peer.settimeout(_CONNECT_S)
                peer.connect(address)
                peer.sendall(_SEQUENCE_NUMBER.pack(number))
    return True


def _watched_sockets() -> Iterator[int]:
    for loop in _loops():
        yield from _targets(loop)


def _loops() -> set[int]:
    """Return the epoll descriptors of gloo's threads."""
    tasks = os.listdir(_TASKS)
    named = [task for task in tasks if thread_name(task) in _LOOP_NAMES]
    if not named:
        # A version whose threads have no name, or no gloo at all.
        # After a fork Python still has the parent's number of the main thread.
        python_threads = {str(os.getpid())} | {str(t.native_id) for t in threading.enumerate()}
        others = [task for task in tasks if task not in python_threads]
        likely = _likely_epolls()
        theirs = _waits(others, _OTHERS_S, likely)
        return {wait[0] for wait in theirs.values() if wait[1:] == _LOOP_WAIT} & likely
    epolls = _epolls_of(named)
    found = set(epolls.values())
    if len(epolls) < len(named):
        # One that never rests is not seen to wait. Its descriptor is one for which nobody else is.
        others = [task for task in tasks if task not in named]
        likely = _likely_epolls() - found
        found |= likely - {wait[0] for wait in _waits(others, _OTHERS_S, likely).values()}
    return found


def _epolls_of(loops: list[str]) -> dict[str, int]:
    """Return the epoll descriptors of gloo's threads, as far as they are known or can be seen."""
    keys = {task: (task, stat.start_ticks) for task in loops if (stat := read_stat(int(task)))}
    for ended in _known.keys() - set(keys.values()):
        _known.pop(ended, None)
    waits = _waits([task for task in loops if keys.get(task) not in _known], _NAMED_S)
    _known.update({keys[task]: wait[0] for task, wait in waits.items() if task in keys})
    # Another thread may do the same at this moment.
    return {task: epoll for task, key in keys.items() if (epoll := _known.get(key)) is not None}


def _waits(tasks: list[str], within_s: float, epolls: set[int] | None = None) -> dict[str, _Wait]:
    """Return the epoll call of each thread that is seen in one, until all of `epolls` were seen."""
    until_s = time.monotonic() + within_s
    left = tasks
    seen: dict[str, _Wait] = {}
    while left and (epolls is None or not epolls <= {wait[0] for wait in seen.values()}):
        seen |= {task: wait for task in left if (wait := _wait(task)) is not None}
        left = [task for task in left if task not in seen and os.path.exists(f"{_TASKS}/{task}")]
        if not left or time.monotonic() >= until_s:
            break
        time.sleep(_LOOK_S)  # nothing tells when a thread begins to wait
    return seen


def _likely_epolls() -> set[int]:
    fds = (int(name) for name in os.listdir("/proc/self/fd"))
    epolls = (fd for fd in fds if _link(fd) == "anon_inode:[eventpoll]")
    return {epoll for epoll in epolls if _is_like_gloos(epoll)}


def _wait(task: str) -> _Wait | None:
    """Return descriptor, event limit and timeout of the epoll call that a thread is in, if any."""
    call = system_call(task)
    if not call or call[0] not in _WAIT_CALLS.get(platform.machine(), ()):
        return None
    _, descriptor, _, most_events, timeout = call[:5]
    return descriptor, most_events, timeout


def _is_like_gloos(epoll: int) -> bool:
    """Return whether `epoll` watches one pipe, one listening TCP socket, and else TCP sockets."""
    pipes = listening = 0
    for descriptor in _targets(epoll):
        link = _link(descriptor)
        if link.startswith("pipe:"):
            pipes += 1
        elif not link.startswith("socket:"):
            return False
        else:
            with contextlib.suppress(OSError), socket_copy(descriptor) as each:
                if each.type != socket.SOCK_STREAM or each.family not in _FAMILIES:
                    return False
                listening += _listens(each)
    return pipes == 1 and listening == 1


def _targets(epoll: int) -> list[int]:
    try:
        with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii", errors="replace") as file:
            return [int(line.split()[1]) for line in file if line.startswith("tfd:")]
    except OSError:
        return []


def _end(descriptor: int) -> bool:
    """End the connection of a descriptor; by now the number may belong to something else."""
    found = tcp_socket(descriptor)
    if found is None:
        return False
    name, connection = found
    if _listens(connection):
        connection.close()
        return False
    _ended.add(name, connection)
    return True


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _link(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


class BlockedCalls:
    """End waits at torch's stores and waits of gloo.

    That is ranks that do not come any more, and collectives: the abort is over, but a main thread
    that was making a group meanwhile may have gone on into a collective of that group.
    """

    def __init__(self, native_id: int) -> None:
        self._native_id = native_id
        self._waits = StoreWaits(native_id)

    def end(self) -> None:
        """End the store wait or gloo wait that blocks the thread now, if any."""
        if not self._waits.end() and is_in_futex(self._native_id):
            # A process that has no descriptor left may have one the next time.
            with contextlib.suppress(OSError):
                end_gloo_connections()
                end_gloo_rendezvous(_inputs.optional_number("WORLD_SIZE") or 0)
