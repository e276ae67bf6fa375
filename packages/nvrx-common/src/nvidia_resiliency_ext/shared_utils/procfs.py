# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about processes, read from /proc; it writes nothing and signals nobody.

A process may vanish at any moment, so every reader answers `None`, `False` or "not in the list"
for a process that is gone or that we may not look at. Other errors, such as too many open files,
are raised: they say nothing about the process, and a caller must not take it for dead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

__all__ = [
    "Memory", "ProcStat", "Thread", "boot_id", "catches_signal", "cmdline", "environ_value",
    "is_available", "is_running", "maps_name", "memory", "pid_namespace", "pids", "pids_in_groups",
    "processes_with_environ", "read_stat", "running_in_groups", "syscall", "threads", "wchan",
]  # fmt: skip

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError, NotADirectoryError)
_CHUNK_BYTES = 65536
_LARGEST_READ_BYTES = 64 << 20
_LARGEST_CMDLINE_BYTES = 1 << 20
# Fields of /proc/<pid>/stat, counted from the one after the command's closing parenthesis.
_STATE, _PPID, _PGID, _SID, _START_TICKS = 0, 1, 2, 3, 19
_DEAD_STATES = frozenset("ZXx")
_SIZE = re.compile(rb"^(\w+):\s+(\d+) kB$", re.MULTILINE)  # in smaps_rollup


@dataclass(frozen=True, slots=True)
class ProcStat:
    """One line of /proc/<pid>/stat.

    Attributes:
        pid: Process.
        state: One letter, such as `R`, `S`, `D`, `T` or `Z`.
        ppid: Parent.
        pgid: Process group.
        sid: Session.
        start_ticks: Start since boot in clock ticks; pid and this name one process of one boot.
        comm: Name of the program, at most 15 bytes.
    """

    pid: int
    state: str
    ppid: int
    pgid: int
    sid: int
    start_ticks: int
    comm: str

    @property
    def running(self) -> bool:
        """Whether the process runs, and is no zombie that waits for its parent."""
        return self.state not in _DEAD_STATES


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one process in bytes; `None` where the kernel tells only the resident size.

    Attributes:
        rss: Resident, with everything shared counted in full.
        pss: Resident, with shared pages divided by their users.
        uss: Resident and private: what its end would free.
    """

    rss: int
    pss: int | None
    uss: int | None


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process: number `tid`, `state` as in `ProcStat`, `name` of 15 bytes."""

    tid: int
    state: str
    name: str


def is_available() -> bool:
    """Return whether /proc is mounted and shows this process under its own number."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def read_stat(pid: int) -> ProcStat | None:
    """Return the kernel's record of process `pid`; None if it does not exist.

    Example:
        >>> read_stat(os.getpid()).running
        True
    """
    return _parse_stat(pid, _read(f"/proc/{pid}/stat"))


def is_running(pid: int) -> bool:
    """Return whether process `pid` exists and is no zombie."""
    stat = read_stat(pid)
    return stat is not None and stat.running


def cmdline(pid: int) -> bytes:
    """Return the command line of process `pid`, NUL between arguments; empty if it is gone."""
    return (_read(f"/proc/{pid}/cmdline") or b"")[:_LARGEST_CMDLINE_BYTES]


def environ_value(pid: int, name: str) -> str | None:
    """Return variable `name` of the environment with which process `pid` was started.

    A program that changes its title can overwrite that memory; then None is returned.
    """
    entries = (_read(f"/proc/{pid}/environ") or b"").split(b"\0")
    prefix = os.fsencode(name) + b"="
    values = (os.fsdecode(each[len(prefix) :]) for each in entries if each.startswith(prefix))
    return next(values, None)


def processes_with_environ(name: str, value: str) -> list[ProcStat]:
    """Return the other processes that were started with `name` set to `value`, in one scan.

    The newest ones are looked at first, for a process that forks and leaves every millisecond may
    be gone before its turn. Zombies are not among them: their environment is gone.
    """
    needle = b"\0" + os.fsencode(f"{name}={value}") + b"\0"
    found = []
    for pid in sorted(pids(), reverse=True):
        if pid == os.getpid():
            continue
        data = _read(f"/proc/{pid}/environ")
        if data and needle in b"\0" + data + b"\0":
            stat = read_stat(pid)
            if stat is not None:
                found.append(stat)
    return found


def running_in_groups(pgids: Collection[int]) -> list[ProcStat]:
    """Return the processes of the groups `pgids` that are no zombies."""
    wanted = frozenset(pgids)
    if not wanted:
        return []
    stats = (read_stat(pid) for pid in pids())
    return [stat for stat in stats if stat is not None and stat.pgid in wanted and stat.running]


def pids_in_groups(pgids: Collection[int]) -> list[int]:
    """Return the numbers of the processes of the groups `pgids` that are no zombies."""
    return [stat.pid for stat in running_in_groups(pgids)]


def maps_name(pid: int, needle: str) -> bool:
    """Return whether process `pid` maps a file whose path contains `needle`."""
    wanted = os.fsencode(needle)
    # A line is "address perms offset device inode path"; the path may contain blanks.
    lines = (line.split(None, 5) for line in (_read(f"/proc/{pid}/maps") or b"").splitlines())
    return any(len(fields) > 5 and wanted in fields[5] for fields in lines)  # noqa: PLR2004


def boot_id() -> str:
    """Return the kernel's name for this boot, or `""` where it is hidden."""
    return (_read("/proc/sys/kernel/random/boot_id") or b"").decode("ascii", "replace").strip()


def pid_namespace() -> str:
    """Return the name of the namespace in which our process numbers count, or `""`."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def catches_signal(pid: int, sig: int) -> bool:
    """Return whether process `pid` has installed a handler for signal `sig`."""
    for line in (_read(f"/proc/{pid}/status") or b"").splitlines():
        name, _, mask = line.partition(b":")
        if name == b"SigCgt":
            return bool(int(mask, 16) >> (sig - 1) & 1)
    return False


def wchan(pid: int) -> str | None:
    """Return the kernel function in which process `pid` waits; empty if it does not wait."""
    data = _read(f"/proc/{pid}/wchan")
    if data is None:
        return None
    name = data.decode("ascii", "replace").strip()
    return "" if name == "0" else name


def threads(pid: int, limit: int) -> list[Thread]:
    """Return the threads of process `pid`, the `limit` oldest ones first; `[]` when it is gone."""
    try:
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))[:limit]
    except _GONE:
        return []
    stats = (_parse_stat(tid, _read(f"/proc/{pid}/task/{tid}/stat")) for tid in tids)
    return [Thread(stat.pid, stat.state, stat.comm) for stat in stats if stat is not None]


def syscall(pid: int, tid: int) -> tuple[int, ...] | None:
    """Return number and arguments of the system call in which thread `tid` of `pid` is blocked.

    They are empty for a thread that runs, and None if this process may not trace the other.
    """
    words = (_read(f"/proc/{pid}/task/{tid}/syscall") or b"").split()
    if not words:
        return None
    if words[0] == b"running":
        return ()
    return (int(words[0]), *(int(word, 16) for word in words[1:7]))


def memory(pid: int) -> Memory | None:
    """Return the memory of process `pid`; None if it does not exist."""
    rollup = _read(f"/proc/{pid}/smaps_rollup") or b""
    sizes = {key: int(kib) * 1024 for key, kib in _SIZE.findall(rollup)}
    if b"Rss" in sizes:
        private = sizes.get(b"Private_Clean", 0) + sizes.get(b"Private_Dirty", 0)
        return Memory(sizes[b"Rss"], sizes.get(b"Pss"), private)
    pages = _read(f"/proc/{pid}/statm")
    if not pages:
        return None
    return Memory(int(pages.split()[1]) * os.sysconf("SC_PAGE_SIZE"), None, None)


def pids() -> Iterator[int]:
    """Return the numbers of all processes, in no order."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _parse_stat(pid: int, data: bytes | None) -> ProcStat | None:
    data = data or b""
    # The command stands in parentheses and may itself contain blanks and parentheses.
    opening, closing = data.find(b"("), data.rfind(b")")
    fields = data[closing + 1 :].split()
    if opening < 0 or len(fields) <= _START_TICKS:
        return None
    return ProcStat(
        pid=pid,
        state=fields[_STATE].decode("ascii"),
        ppid=int(fields[_PPID]),
        pgid=int(fields[_PGID]),
        sid=int(fields[_SID]),
        start_ticks=int(fields[_START_TICKS]),
        comm=data[opening + 1 : closing].decode("utf-8", "replace"),
    )


def _read(path: str) -> bytes | None:
    # A process that vanishes after open() fails the read with ESRCH.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except _GONE:
        return None
    try:
        data = chunk = os.read(descriptor, _CHUNK_BYTES)
        while chunk and len(data) < _LARGEST_READ_BYTES:
            chunk = os.read(descriptor, _CHUNK_BYTES)
            data += chunk
    except _GONE:
        return None
    finally:
        os.close(descriptor)
    return data
