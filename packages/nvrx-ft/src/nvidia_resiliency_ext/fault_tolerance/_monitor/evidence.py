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
from nvidia_resiliency_ext.shared_utils.rank_activity import Kernel, inspect_kernel

__all__ = ["Evidence", "inspect_process", "save_evidence"]

logger = logging.getLogger("nvrx")

_MAX_SAME_NAME = 1000
_CANNOT_ANSWER = frozenset("TtDZX?")


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
