# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of nvrx-common; first of all, that a test leaves nothing behind."""

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.children import pidfd_available

_GRACE_S = 5.0
_MARK = "NVRX_TEST_MARK"


def _processes() -> dict[object, str]:
    """Return children of this process, and all processes that were started by this test."""
    pids = set(procfs.pids_with_environ(_MARK, os.environ.get(_MARK, "-")))
    for task in os.listdir("/proc/self/task"):
        try:
            pids.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
        except FileNotFoundError:
            continue
    return {stat.pid: str(stat) for stat in map(procfs.read_stat, pids) if stat is not None}


def _threads() -> dict[object, str]:
    return {id(thread): thread.name for thread in threading.enumerate()}


def _descriptors() -> dict[object, str]:
    """Return open sockets, pipes and pidfds by what the kernel calls them."""
    found: dict[object, str] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "pipe:", "anon_inode:[pidfd]", "pidfd:")):
            found[descriptor, target] = "open descriptor"
    return found


def _files() -> dict[object, str]:
    """Return run directories and shared memory that carry the number of this process.

    Other test processes work in the same places, so the rest is not ours to judge.
    """
    found: dict[object, str] = {}
    for place in {"/tmp", "/dev/shm", os.environ.get("TMPDIR", "/tmp")}:
        for path in Path(place).glob("nvrx-*/owner.json"):
            try:
                if json.loads(path.read_text())["pid"] == os.getpid():
                    found[path.parent] = "run directory"
            except (OSError, ValueError, KeyError):
                continue
    pid = str(os.getpid())
    found.update((path, "shared memory") for path in Path("/dev/shm").glob(f"*{pid}*"))
    return found


_KINDS: Mapping[str, Callable[[], Mapping[object, str]]] = {
    "process": _processes,
    "thread": _threads,
    "descriptor": _descriptors,
    "file": _files,
}


def _left_behind(before: Mapping[str, Mapping[object, str]]) -> list[str]:
    return [
        f"{kind} {key} ({what})"
        for kind, look in _KINDS.items()
        for key, what in look().items()
        if key not in before[kind]
    ]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which a process, thread, socket, run directory or shared memory remains."""
    before = {kind: look() for kind, look in _KINDS.items()}
    os.environ[_MARK] = f"{os.getpid()}-{request.node.name}-{time.monotonic_ns()}"
    try:
        yield
        left = _left_behind(before)
        if left:
            gc.collect()
        deadline = time.monotonic() + _GRACE_S
        while left and time.monotonic() < deadline:
            # The end of a grandchild gives no event to wait for.
            threading.Event().wait(0.02)
            left = _left_behind(before)
        assert not left, "the test left behind: " + "; ".join(left)
    finally:
        del os.environ[_MARK]


@pytest.fixture(params=["pidfd", "no pidfd"])
def each_watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with pidfds and again with what replaces them on kernels without."""
    pidfd_available.cache_clear()
    if request.param == "no pidfd":
        monkeypatch.setenv("NVRX_FORCE_NO_PIDFD", "1")
    elif not pidfd_available():
        pytest.skip("this kernel lets us use no pidfd")
    yield request.param
    pidfd_available.cache_clear()
