# SPDX-License-Identifier: Apache-2.0
"""The self-check: packages, host, hardware and stale run directories."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from nvidia_resiliency_ext.shared_utils.console import write_out

__all__ = ["Finding", "findings", "main", "package_versions"]

Level = Literal["ok", "info", "warning", "error"]
_DEADLINE_S = 20.0
_LEVELS: dict[str, Level] = {"healthy": "ok", "skipped": "info", "unhealthy": "error"}
_PR_GET_PDEATHSIG = 2
_SMALL_SHM_BYTES = 256 * 1024 * 1024
_TMP = "/tmp"  # noqa: S108 - looked at only
_SHM = "/dev/shm"  # noqa: S108 - looked at only
_MIB = 1024 * 1024
_CONFLICT = "nvidia-resiliency-ext"


@dataclass(frozen=True, slots=True)
class Finding:
    """A result (`text`) about a `topic`; `level` is `error` if a person must act."""

    level: Level
    topic: str
    text: str


def findings() -> list[Finding]:
    """Check packages, host, hardware and stale run directories."""
    from .rundir import stale_run_dirs

    text = "is left from a run that is over; --clean removes it"
    stale = [Finding("warning", "run directory", f"{path} {text}") for path in stale_run_dirs()]
    return [*package_versions(), *host_findings(), *hardware_findings(), *stale]


def package_versions() -> list[Finding]:
    """Check only the installed packages; fast enough for ``--version``.

    Example:
        >>> package_versions()[0].topic
        'python'
    """
    return list(package_findings(installed_versions()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` and return its exit code: 1 when a person must act, else 0."""
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m nvidia_resiliency_ext.shared_utils.doctor",
        description="Check what is installed and what this host offers to the nvrx packages.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")
    parser.add_argument("--clean", action="store_true", help="remove stale run directories")
    options = parser.parse_args(argv)
    found: list[Finding] = []
    if options.clean:
        from .rundir import remove_stale_run_dirs

        removed = remove_stale_run_dirs()
        found = [Finding("info", "run directory", f"removed {path}") for path in removed]
    found += findings()
    if options.json:
        import json

        lines = [json.dumps(asdict(finding)) for finding in found]
    else:
        width = max(len(finding.topic) for finding in found)
        lines = [f"{each.level:<8} {each.topic:<{width}}  {each.text}" for each in found]
    write_out("".join(f"{line}\n" for line in lines))
    return 1 if any(finding.level == "error" for finding in found) else 0


def hardware_findings() -> Iterator[Finding]:
    """Yield one finding per health check; a check that does not end in time is an error."""
    from nvidia_resiliency_ext.shared_utils import health_check

    # What the checks would log is printed as findings.
    logger = logging.getLogger("nvrx")
    silent = logging.NullHandler()
    logger.addHandler(silent)
    try:
        checks = [
            health_check.GPUHealthCheck(),
            health_check.NVLHealthCheck(),
            health_check.NicLinkStateHealthCheck(),
            health_check.DistributedStorageHealthCheck(),
        ]
        results = health_check.run_checks(checks, _DEADLINE_S)
    finally:
        logger.removeHandler(silent)
    for result in results:
        topic = f"{result.name.replace('_', ' ')} health"
        yield Finding(_LEVELS[result.status], topic, result.reason or result.status)


def host_findings() -> Iterator[Finding]:
    """Yield one finding per facility, with what is used instead where it is missing."""
    from nvidia_resiliency_ext.shared_utils.children import pidfd_available

    death_signal = ctypes.byref(ctypes.c_int(0))
    has_pdeathsig = ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, death_signal, 0, 0, 0) == 0
    threads = "a thread in waitid per child, start times of other processes"
    files = "files without a name in the run directory; workers may start cold"
    yield _facility("pidfd_open", pidfd_available(), threads)
    yield _facility("memfd_create", _has_memfd(), files)
    yield _facility("PDEATHSIG", has_pdeathsig, "the monitor's sweep alone")
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

    with contextlib.suppress(OSError, AttributeError):
        fd = os.memfd_create("nvrx-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(fd, "rb") as file:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return True
    return False


def _shared_memory() -> Finding:
    try:
        status = os.statvfs(_SHM)
    except OSError as error:
        return Finding("warning", _SHM, f"not usable: {error.strerror}")
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{size // _MIB} MiB, {free // _MIB} MiB free"
    if size < _SMALL_SHM_BYTES:
        return Finding("warning", _SHM, f"{text}; data loaders and NCCL may need more")
    return Finding("ok", _SHM, text)


def _runtime_directory() -> Finding:
    path = os.environ.get("XDG_RUNTIME_DIR")
    elsewhere = "; run directories go to TMPDIR or /tmp"
    if not path:
        return Finding("info", "XDG_RUNTIME_DIR", f"not set{elsewhere}")
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding("warning", "XDG_RUNTIME_DIR", f"{path} is not writable{elsewhere}")
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
    bits = {"read-only": os.ST_RDONLY, "noexec": os.ST_NOEXEC}
    flags = [name for name, bit in bits.items() if status.f_flag & bit]
    free = f"{status.f_bavail * status.f_frsize // _MIB} MiB free"
    level: Level = "warning" if "read-only" in flags else "ok"
    return Finding(level, "temporary files", ", ".join([f"{path}: {free}", *flags]))


def installed_versions() -> dict[str, str]:
    """Return the version of each installed distribution, by its normalised name."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for distribution in distributions():
        metadata = distribution.metadata
        if "Name" not in metadata or "Version" not in metadata:
            continue  # the rest of a broken installation
        # The first on the path is the one that is imported.
        name = metadata["Name"].lower().replace("_", "-").replace(".", "-")
        found.setdefault(name, metadata["Version"])
    return found


def package_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the installed versions, and an error for a package that owns the same files."""
    yield Finding("info", "python", f"{sys.version.split()[0]} ({sys.executable})")
    for name in sorted(versions):
        if name.startswith("nvrx-") or name == "torch":
            yield Finding("ok", name, versions[name])
    if "nvrx-common" not in versions:
        yield Finding("warning", "nvrx-common", "not installed: it runs from a source folder")
    if _CONFLICT in versions:
        text = f"{versions[_CONFLICT]} is installed and owns the same files as the nvrx packages:"
        action = "uninstall it, then reinstall the nvrx packages"
        yield Finding("error", _CONFLICT, f"{text} {action}")


if __name__ == "__main__":
    sys.exit(main())
