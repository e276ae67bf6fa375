# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of nvrx-ft; first of all, that a test leaves nothing behind."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

_GRACE_S = 5.0
_SHM = "/dev/shm"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a device where there is none."""
    if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs an NVIDIA device")


def _children() -> dict[str, str]:
    """Return our children, zombies included, but not the tracker that multiprocessing keeps."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    tracker_pid = getattr(getattr(tracker, "_resource_tracker", None), "_pid", None)
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except FileNotFoundError:
            continue
        for pid in pids:
            if int(pid) != tracker_pid:
                found[pid] = _command(pid)
    return found


def _command(pid: str) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return command[:200] or "zombie"


def _threads() -> dict[int, str]:
    return {id(thread): repr(thread) for thread in threading.enumerate()}


def _sockets() -> dict[str, str]:
    """Return open sockets by what the kernel calls them."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found[target] = f"descriptor {descriptor}"
    return found


def _shared_memory() -> dict[str, str]:
    """Return the names in /dev/shm that this process maps or that carry its number.

    Other test processes work there at the same time, so their names are not ours to judge.
    """
    try:
        names = os.listdir(_SHM)
    except FileNotFoundError:
        return {}
    if not names:
        return {}
    maps = Path("/proc/self/maps").read_text()
    pid = str(os.getpid())
    return {name: _SHM for name in names if pid in name or f"{_SHM}/{name}" in maps}


_KINDS: Mapping[str, Callable[[], Mapping[object, str]]] = {
    "child processes": _children,
    "threads": _threads,
    "sockets": _sockets,
    "shared memory": _shared_memory,
}


def _left_behind(before: Mapping[str, Mapping[object, str]]) -> list[str]:
    return [
        f"{kind}: {key} ({what})"
        for kind, look in _KINDS.items()
        for key, what in look().items()
        if key not in before[kind]
    ]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test after which a child, thread, socket or shared memory of its own remains."""
    before = {kind: look() for kind, look in _KINDS.items()}
    yield
    left = _left_behind(before)
    if not left:
        return
    gc.collect()
    deadline = time.monotonic() + _GRACE_S
    while left and time.monotonic() < deadline:
        # Ends of processes and threads of others give no event to wait for; this is a test's look.
        threading.Event().wait(0.02)
        left = _left_behind(before)
    assert not left, "the test left behind: " + "; ".join(left)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide the variables of schedulers and launchers that this machine may have set."""
    prefixes = ("SLURM", "CROSS_SLURM", "NVRX_", "FT_", "TORCHELASTIC_")
    names = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for name in list(os.environ):
        if name in names or name.startswith(prefixes):
            monkeypatch.delenv(name)
    return monkeypatch
