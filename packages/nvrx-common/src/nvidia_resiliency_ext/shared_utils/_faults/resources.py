# SPDX-License-Identifier: Apache-2.0
"""Faults of what a process uses: memory, disk, network, GPU, clock."""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Any

from .kinds import Action, refusal

_MIB = 1 << 20
_LARGEST_BLOCK = 64 * _MIB
_SMALLEST_BLOCK = 4096
_LARGEST_DISK = 16 << 30
_DISK_VARIABLE = "NVRX_FAULT_DISK_DIR"
_FOR_EVER_CYCLES = 1 << 62
_FAR_OUTSIDE = 1 << 40
_GPU_LARGEST_BLOCK = 1 << 30
_GPU_SMALLEST_BLOCK = 1 << 20
SKEW_S = 3600.0
_CAP_SYS_TIME = 25
_WHOLE_MACHINE = ["0", "0", "4294967295"]


def spin(stop: threading.Event) -> None:
    """Burn a core and contend for the GIL."""
    while not stop.is_set():
        pass


def exhaust_memory(stop: threading.Event) -> None:
    """Take memory until there is none; the kernel is told to kill this process first."""
    before = _set_oom_score(b"1000")
    # Bytes other than 0, so that each page is really there.
    sizes = _LARGEST_BLOCK, _SMALLEST_BLOCK
    _hold_all(stop, lambda size: b"\1" * size, sizes, MemoryError)
    if before is not None:
        _set_oom_score(before)


def _hold_all(
    stop: threading.Event,
    take: Callable[[int], object],
    sizes: tuple[int, int],
    error: type[BaseException],
) -> None:
    """Take blocks until even the smallest gives the error; hold them until `stop` is set."""
    size, smallest = sizes
    taken: list[object] = []
    while size >= smallest and not stop.is_set():
        try:
            taken.append(take(size))
        except error:
            size //= 2
    stop.wait()


def drop_network() -> Action:
    """Prepare to shut every IPv4 and IPv6 socket down.

    They are not closed: the next file would get the number, and a library would write into it.
    """
    import socket

    from nvidia_resiliency_ext.shared_utils.store_sockets import socket_copy

    def act(_: threading.Event) -> None:
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

    return Action(act)


def disk_full() -> Action:
    """Prepare to fill the mount that `NVRX_FAULT_DISK_DIR` names, as long as the process lives."""
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

    def take(size: int) -> None:
        # Of a file without a name: whatever ends the process also frees the space.
        os.posix_fallocate(descriptor, os.lseek(descriptor, 0, os.SEEK_END), size)

    def act(stop: threading.Event) -> None:
        _hold_all(stop, take, (_LARGEST_BLOCK, _SMALLEST_BLOCK), OSError)
        os.close(descriptor)

    return Action(act, undo=lambda: os.close(descriptor))


def _set_oom_score(score: bytes) -> bytes | None:
    # Raising it is always allowed; lowering it again, to what it was, nearly always.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b", 0) as file:
        before = file.read(16)
        file.write(score)
        return before
    return None


def gpu_assert() -> Action:
    """Prepare an index far outside of its tensor, which the device asserts against."""
    torch, device = _current_device("GPU_ERROR")

    def act(_: threading.Event) -> None:
        with torch.cuda.device(device):
            values = torch.zeros(1, device=device)
            values[torch.full((1,), _FAR_OUTSIDE, dtype=torch.int64, device=device)]

    return Action(act)


def gpu_spin(device: Any = None) -> Action:
    """Prepare a kernel without end on a device; default: the one that is current now."""
    torch = _require_cuda("GPU_SLEEP")
    device = torch.cuda.current_device() if device is None else device

    def act(_: threading.Event) -> None:
        with torch.cuda.device(device):
            # The same thread's default stream blocks the other streams of the device.
            torch.cuda._sleep(_FOR_EVER_CYCLES)  # noqa: SLF001 - torch has no other one

    return Action(act)


def exhaust_gpu_memory() -> Action:
    """Prepare to take the memory of the current device until there is none."""
    torch, device = _current_device("OOM_GPU")

    def take(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device=device)

    sizes = _GPU_LARGEST_BLOCK, _GPU_SMALLEST_BLOCK
    return Action(lambda stop: _hold_all(stop, take, sizes, torch.cuda.OutOfMemoryError))


def _require_cuda(fault: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise refusal(fault, f"torch cannot be imported ({error})") from error
    if not torch.cuda.is_available():
        raise refusal(fault, "CUDA is not available here")
    return torch


def _current_device(fault: str) -> tuple[Any, int]:
    torch = _require_cuda(fault)
    return torch, torch.cuda.current_device()


def skew_clock() -> Action:
    """Prepare to set the clock an hour ahead until the fault is cancelled or the program ends."""
    if not _may_set_clock():
        raise refusal("CLOCK_SKEW", "this process may not set the clock (CAP_SYS_TIME)")
    is_ahead = False

    def go_back() -> None:
        nonlocal is_ahead
        atexit.unregister(go_back)
        ahead, is_ahead = is_ahead, False
        if ahead:
            time.clock_settime(time.CLOCK_REALTIME, time.time() - SKEW_S)

    def act(stop: threading.Event) -> None:
        nonlocal is_ahead
        time.clock_settime(time.CLOCK_REALTIME, time.time() + SKEW_S)
        is_ahead = True
        atexit.register(go_back)
        stop.wait()
        go_back()

    return Action(act)


def _may_set_clock() -> bool:
    # The right counts in the first user namespace only. Asked of /proc, as a trial sets the clock.
    try:
        with open("/proc/thread-self/status", encoding="ascii", errors="replace") as status:
            rights = next(line for line in status if line.startswith("CapEff:")).split()[1]
        with open("/proc/self/uid_map", encoding="ascii") as users:
            whole = users.read().split() == _WHOLE_MACHINE
    except (OSError, StopIteration):
        return False
    return whole and bool(int(rights, 16) >> _CAP_SYS_TIME & 1)
