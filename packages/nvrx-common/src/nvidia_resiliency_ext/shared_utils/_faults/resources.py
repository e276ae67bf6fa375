# SPDX-License-Identifier: Apache-2.0
"""Faults that take something away from the process: processor time, memory, sockets, disk space."""

from __future__ import annotations

import os
import stat
import threading

from .actions import Action, Plain, refusal

__all__ = ["disk_full", "drop_network", "exhaust_memory", "spin"]

_MIB = 1 << 20
_LARGEST_BLOCK = 64 * _MIB
_SMALLEST_BLOCK = 4096
_LARGEST_DISK = 16 << 30
_DISK_VARIABLE = "NVRX_FAULT_DISK_DIR"


def spin(due: float, has_callback: bool) -> Action:
    """Prepare a thread that burns a core and contends for the GIL."""
    del due, has_callback

    def act(stop: threading.Event) -> None:
        while not stop.is_set():
            pass

    return Plain(act)


def exhaust_memory(due: float, has_callback: bool) -> Action:
    """Prepare to take memory until there is none; the kernel is told to kill this process first."""
    del due, has_callback

    def act(stop: threading.Event) -> None:
        before = _set_oom_score(b"1000")
        taken: list[bytes] = []
        size = _LARGEST_BLOCK
        while size >= _SMALLEST_BLOCK and not stop.is_set():
            try:
                # Bytes other than 0, so that each page is really there.
                taken.append(b"\1" * size)
            except MemoryError:
                size //= 2
        stop.wait()
        taken.clear()
        if before is not None:
            _set_oom_score(before)

    return Plain(act)


def drop_network(due: float, has_callback: bool) -> Action:
    """Prepare to shut every IPv4 and IPv6 socket of the process down.

    They are not closed: the next file would get the number, and a library would write into it.
    """
    del due, has_callback
    import socket

    from nvidia_resiliency_ext.shared_utils.store_sockets import socket_copy

    def act(stop: threading.Event) -> None:
        del stop
        for name in os.listdir("/proc/self/fd"):
            try:
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    _shut_down(socket_copy(int(name)))
            except OSError:
                continue  # closed meanwhile

    def _shut_down(found: socket.socket) -> None:
        with found:
            if found.family in {socket.AF_INET, socket.AF_INET6}:
                # ENOTCONN for a socket without a peer, which is shut down nevertheless.
                found.shutdown(socket.SHUT_RDWR)

    return Plain(act)


def disk_full(due: float, has_callback: bool) -> Action:
    """Prepare to fill the mount that `NVRX_FAULT_DISK_DIR` names, as long as the process lives."""
    del due, has_callback
    directory = os.environ.get(_DISK_VARIABLE, "")
    if not os.path.isabs(directory) or os.path.normpath(directory) == "/":
        raise refusal("DISK_FULL", f"{_DISK_VARIABLE} must name a mount of its own to fill")
    try:
        is_mount = os.path.ismount(directory)
        space = os.statvfs(directory)
        descriptor = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise refusal("DISK_FULL", f"{directory} cannot be written: {error.strerror}") from error
    if not is_mount or space.f_bavail * space.f_frsize > _LARGEST_DISK:
        os.close(descriptor)
        reason = f"{directory} is no mount of its own" if not is_mount else f"{directory} is large"
        raise refusal("DISK_FULL", f"{reason}; mount a small tmpfs there")
    return _Filling(descriptor)


class _Filling(Action):
    """Owns a file without a name: whatever ends the process also frees the space."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def act(self, stop: threading.Event) -> None:
        size, block = 0, _LARGEST_BLOCK
        while block >= _SMALLEST_BLOCK and not stop.is_set():
            try:
                os.posix_fallocate(self._descriptor, size, block)
            except OSError:
                block //= 2
            else:
                size += block
        stop.wait()
        os.close(self._descriptor)

    def withdraw(self) -> bool:
        os.close(self._descriptor)
        return True


def _set_oom_score(score: bytes) -> bytes | None:
    # Raising it is always allowed; lowering it again, to what it was, nearly always.
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        before = os.read(descriptor, 16)
        os.write(descriptor, score)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return before
