# SPDX-License-Identifier: Apache-2.0
"""Owns what is learned of a hung process before it is killed.

It decides nothing. Whatever may block for long (a record directory on a dead file system, memory
figures of a stuck process) runs in a `SlowThread`, so that judging and killing never wait for it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils import procfs

from .activity import Kernel

__all__ = ["Evidence", "inspect_kernel", "inspect_process", "save_evidence"]

logger = logging.getLogger("nvrx")

MAX_THREADS = 256
_MAX_SAME_NAME = 1000
_STOPPED_STATES = frozenset("Tt")
_CANNOT_ANSWER = frozenset("TtDZX?")
_GLOO_THREAD = "pt_gloo_runloop"
_GPU_THREADS = ("pt_nccl_", "cuda-", "cuda0")
_FUTEX = frozenset({202, 98, 240, 422})
"""Numbers of `futex` on x86-64, on aarch64, and of the older and the 64-bit call on 32 bits."""
_FUTEX_TIMEOUT = 4
"""Place of the time limit in what `procfs.syscall` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a process of a job that hangs."""

    kernel: Kernel
    can_dump: bool
    rss_bytes: int | None = None
    stacks_path: str | None = None


def inspect_process(pid: int, dump_signal: int) -> Evidence:
    """Ask the kernel how a process does, and whether it can write its stacks.

    Args:
        pid: The process.
        dump_signal: The signal at which it writes them; 0 when it never offered to.
    """
    kernel = inspect_kernel(pid)
    can_dump = (
        dump_signal > 0
        and kernel.state not in _CANNOT_ANSWER
        and procfs.catches_signal(pid, dump_signal)
    )
    return Evidence(kernel=kernel, can_dump=can_dump)


def inspect_kernel(pid: int) -> Kernel:
    """Ask the kernel what a process is doing, of its threads the oldest `MAX_THREADS`."""
    stat = procfs.read_stat(pid)
    if stat is None or not stat.running:
        return Kernel("?")
    if stat.state in _STOPPED_STATES:
        return Kernel(stat.state, procfs.wchan(pid) or "")
    threads = procfs.threads(pid, MAX_THREADS)
    gloo = [thread for thread in threads if thread.name == _GLOO_THREAD]
    pending = [
        is_pending for thread in gloo if (is_pending := _in_collective(pid, thread)) is not None
    ]
    return Kernel(
        stat.state,
        procfs.wchan(pid) or "",
        is_pending=any(pending) if pending else None,
        has_gpu=any(thread.name.startswith(_GPU_THREADS) for thread in threads),
    )


def _in_collective(pid: int, thread: procfs.Thread) -> bool | None:
    """Return whether a thread of gloo works on a collective; None when the kernel does not tell.

    An idle one waits for work in a futex without a time limit; one that waits for a peer has one.
    """
    call = procfs.syscall(pid, thread.tid)
    if call is None:
        return None
    is_idle = len(call) > _FUTEX_TIMEOUT and call[0] in _FUTEX and call[_FUTEX_TIMEOUT] == 0
    return not is_idle


def save_evidence(
    directory: str, name: str, pid: int, evidence: Evidence, stacks: bytes
) -> tuple[int | None, str | None]:
    """Complete the evidence and write it to a new file; may block.

    Args:
        directory: Private directory of the record; nothing is written when empty.
        name: Name of the file without its ending.
        pid: The process.
        evidence: What is known so far.
        stacks: What the process wrote.

    Returns:
        Its resident memory in bytes, and the file's path; None for what could not be had.
    """
    kernel, memory = evidence.kernel, procfs.memory(pid)
    rss_bytes = None if memory is None else memory.rss
    text = (
        f"pid {pid} state {kernel.state} wchan {kernel.wchan or '-'} rss_bytes {rss_bytes}\n"
        f"{'' if stacks else 'no stacks: the process is stopped or did not answer'}\n"
    )
    try:
        return rss_bytes, _write_new(directory, name, text.encode() + stacks)
    except OSError as exc:
        logger.warning("cannot write evidence into %s: %s", directory, exc)
        return rss_bytes, None


def _write_new(directory: str, name: str, data: bytes) -> str | None:
    if not directory:
        return None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(_MAX_SAME_NAME):
        suffix = f".{attempt}" if attempt else ""
        path = f"{directory}/{name}{suffix}.txt"
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            continue
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        return path
    return None
