# SPDX-License-Identifier: Apache-2.0
"""Owns the look at the host: facilities of the kernel and of file systems; changes nothing.

Each probe tries the facility instead of comparing versions: containers forbid what a kernel has.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from .finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["host_findings"]

_SYS_OPENAT2 = 437
_PR_GET_PDEATHSIG = 2
_SMALL_SHM_BYTES = 256 * 1024 * 1024
_TMP = "/tmp"  # noqa: S108 - looked at only
_SHM = "/dev/shm"  # noqa: S108 - looked at only
_MIB = 1024 * 1024


def host_findings() -> Iterator[Finding]:
    """Yield one finding per facility, with what is used instead where it is missing."""
    from nvidia_resiliency_ext.shared_utils.children import pidfd_available

    yield _facility(
        "pidfd_open",
        pidfd_available(),
        "a thread in waitid per child, start times of other processes",
    )
    yield _facility(
        "memfd_create",
        _has_memfd(),
        "files without a name in the run directory; workers may start cold",
    )
    found = "found" if _has_openat2() else "not found"
    yield Finding("info", "openat2", f"{found}; not used, paths are opened component by component")
    yield _facility("PDEATHSIG", _has_pdeathsig(), "the monitor's sweep alone")
    yield _shared_memory()
    yield _runtime_directory()
    yield _run_directory()
    yield _temporary_directory()
    home = os.path.expanduser("~")
    is_writable = os.access(home, os.W_OK)
    yield Finding("info", "home", f"{home} is {'' if is_writable else 'not '}writable")


def _facility(topic: str, is_there: bool, instead: str) -> Finding:
    if is_there:
        return Finding("ok", topic, "found")
    return Finding("warning", topic, f"not found; used instead: {instead}")


def _has_memfd() -> bool:
    import fcntl

    try:
        fd = os.memfd_create("nvrx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except (OSError, AttributeError):
        return False
    finally:
        os.close(fd)
    return True


def _has_openat2() -> bool:
    how = (ctypes.c_uint64 * 3)(os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(_SYS_OPENAT2), ctypes.c_int(-1), ctypes.c_char_p(b"/"))
    fd = libc.syscall(*arguments, ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
    if fd < 0:
        return False
    os.close(fd)
    return True


def _has_pdeathsig() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    found = ctypes.c_int(0)
    return bool(libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(found), 0, 0, 0) == 0)


def _shared_memory() -> Finding:
    try:
        status = os.statvfs(_SHM)
    except OSError as error:
        return Finding("warning", _SHM, f"not usable: {error.strerror}")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    level: Level = "warning" if size < _SMALL_SHM_BYTES else "ok"
    hint = "; data loaders and NCCL may need more" if level == "warning" else ""
    return Finding(level, _SHM, f"{size // _MIB} MiB, {free // _MIB} MiB free{hint}")


def _runtime_directory() -> Finding:
    path = os.environ.get("XDG_RUNTIME_DIR")
    if not path:
        return Finding("info", "XDG_RUNTIME_DIR", "not set; run directories go to TMPDIR or /tmp")
    if not os.access(path, os.W_OK | os.X_OK):
        text = f"{path} is not writable; run directories go to TMPDIR or /tmp"
        return Finding("warning", "XDG_RUNTIME_DIR", text)
    return Finding("ok", "XDG_RUNTIME_DIR", path)


def _run_directory() -> Finding:
    """Make a run directory as the launcher does, and see how long a socket's path gets in it."""
    from nvidia_resiliency_ext.shared_utils.rundir import MAX_SOCKET_PATH_BYTES, RunDir

    try:
        with RunDir.create("doctor") as run_dir:
            length = len(os.fsencode(run_dir.socket_path("launcher.sock")))
            place = os.path.dirname(run_dir.path)
    except OSError as error:
        return Finding("error", "run directory", f"cannot be made: {error}")
    text = f"in {place}; socket paths take {length} of {MAX_SOCKET_PATH_BYTES} bytes"
    return Finding("ok", "run directory", text)


def _temporary_directory() -> Finding:
    path = os.environ.get("TMPDIR") or _TMP
    try:
        status = os.statvfs(path)
    except OSError as error:
        return Finding("warning", "temporary files", f"{path}: {error.strerror}")
    flags = [
        name
        for bit, name in ((os.ST_RDONLY, "read-only"), (os.ST_NOEXEC, "noexec"))
        if status.f_flag & bit
    ]
    free = f"{status.f_bavail * status.f_frsize // _MIB} MiB free"
    level: Level = "warning" if "read-only" in flags else "ok"
    return Finding(level, "temporary files", ", ".join([f"{path}: {free}", *flags]))
