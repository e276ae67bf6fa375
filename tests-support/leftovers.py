# SPDX-License-Identifier: Apache-2.0
"""What a test must not leave behind: looks for it, and the fixture that compares before and after.

A conftest names the looks that its tests need: `_guard = leftovers.guard(leftovers.children, ...)`.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nvidia_resiliency_ext.shared_utils import procfs

# Processes that were there before the test: reading what all of them say takes 10 ms each time.
_older: set[str] = set()

Look = Callable[[], Mapping[object, str]]

_GRACE_S = 5.0
_FROZEN_BY_PYTHON = 10_000  # and more: Python 3.12 begins with 375
_MARK = "NVRX_TEST_MARK"
_SHM = "/dev/shm"
_PROCESS_LOOKS = ("children:", "marked_processes:")
_POLLERS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")


def children() -> dict[object, str]:
    """Return our children, zombies included, but not the tracker that multiprocessing keeps."""
    pids: set[int | None] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            pids.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except FileNotFoundError:
            continue
    return _described(pids - {_tracker("_pid")})


def marked_processes() -> dict[object, str]:
    """Return all processes that were started by this test, whoever their parent is now."""
    mark = os.environ.get(_MARK)
    if mark is None:
        return {}
    pids = {int(name) for name in _numbers() - _older}
    return _described({pid for pid in pids if procfs.environ_value(pid, _MARK) == mark})


def threads() -> dict[object, str]:
    """Return the threads that Python knows."""
    return {id(thread): thread.name for thread in threading.enumerate()}


def descriptors() -> dict[object, str]:
    """Return what is open, by what the kernel calls it, but not devices."""
    found: dict[object, str] = {}
    tracker_fd = str(_tracker("_fd"))
    # gRPC keeps a poller of its own between calls.
    pollers = _POLLERS if "grpc" in sys.modules else ()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if descriptor != tracker_fd and not target.startswith(("/dev/", "/proc/", *pollers)):
            found[descriptor, target] = "open descriptor"
    return found


def open_pipe_of_libuv() -> None:
    """Let torch's first store open the pipe that libuv keeps until the process ends.

    torch asks for the names of its peers, and where nobody answers that takes long. The C library
    reads how long at the first question.
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


def run_directories() -> dict[object, str]:
    """Return run directories that carry the number of this process.

    Other test processes work in the same places, so the rest is not ours to judge.
    """
    found: dict[object, str] = {}
    for place in {"/tmp", _SHM, os.environ.get("TMPDIR", "/tmp")}:
        for path in Path(place).glob("nvrx-*/owner.json"):
            try:
                if json.loads(path.read_text())["pid"] == os.getpid():
                    found[path.parent] = "run directory"
            except (OSError, ValueError, KeyError):
                continue
    return found


def shared_memory() -> dict[object, str]:
    """Return the names in /dev/shm that this process maps or that carry its number."""
    try:
        names = os.listdir(_SHM)
    except FileNotFoundError:
        return {}
    if not names:
        return {}
    # Whole names and whole numbers: those of other processes may hold ours as a part.
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[-1] for line in lines}
    pid = str(os.getpid())
    return {
        name: _SHM
        for name in names
        if pid in re.findall(r"\d+", name) or f"{_SHM}/{name}" in mapped
    }


def guard(*looks: Look, grace_s: float = _GRACE_S) -> Any:
    """Return a fixture that fails each test after which one of the looks shows something new."""

    @pytest.fixture(autouse=True)
    def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
        if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
            # All that is loaded, torch and the tests: a collection takes 0.5 s with it.
            gc.freeze()
        before = _seen(looks)
        _older.clear()
        _older.update(_numbers())
        os.environ[_MARK] = f"{os.getpid()}-{time.monotonic_ns()}-{request.node.name}"
        try:
            yield
            # pytest lets go of the other fixtures' values only after this one.
            request.node.funcargs.clear()
            left = _new(looks, before)
            if left:
                gc.collect()
            deadline = time.monotonic() + grace_s
            while left and time.monotonic() < deadline:
                # Ends of others' processes and threads give no event; this is a test's look.
                threading.Event().wait(0.02)
                left = _new(looks, before)
            if any(line.startswith(_PROCESS_LOOKS) for line in left):
                request.node.add_marker("no_second_try")
            assert not left, "the test left behind: " + "; ".join(left)
        finally:
            os.environ.pop(_MARK, None)

    return _leaves_nothing_behind


def _tracker(name: str) -> int | None:
    """Return a value of the process that multiprocessing keeps, if it has one."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    value: int | None = getattr(getattr(module, "_resource_tracker", None), name, None)
    return value


def _numbers() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


def _described(pids: Iterable[int | None]) -> dict[object, str]:
    return {
        stat.pid: str(stat)
        for stat in map(procfs.read_stat, filter(None, pids))
        if stat is not None
    }


def _seen(looks: tuple[Look, ...]) -> dict[Look, Mapping[object, str]]:
    return {look: look() for look in looks}


def _new(looks: tuple[Look, ...], before: Mapping[Look, Mapping[object, str]]) -> list[str]:
    return [
        f"{look.__name__}: {key} ({what})"
        for look in looks
        for key, what in look().items()
        if key not in before[look]
    ]
