# SPDX-License-Identifier: Apache-2.0
"""The stamps of a main thread that makes progress, and their absence when it makes none."""

import ctypes
import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest

from nvidia_resiliency_ext.inprocess._call import watchdog as watchdog_module
from nvidia_resiliency_ext.inprocess._call.watchdog import Watchdog
from nvidia_resiliency_ext.inprocess._monitor.page import PageView
from nvidia_resiliency_ext.inprocess.monitor_process import MonitorProcess
from nvidia_resiliency_ext.inprocess.progress_watchdog import ProgressWatchdog, Timestamp
from nvidia_resiliency_ext.inprocess.store import FileStore

INTERVAL_S = 0.005
LIMIT_S = 60.0


class Target:
    """Keeps stamps."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def stamp_auto(self) -> None:
        self.stamps.append(time.monotonic())

    def send_timestamp(self, timestamp: Timestamp) -> None:
        self.sent = [*getattr(self, "sent", []), timestamp]


def run_until(condition: object) -> None:
    """Run bytecode in this thread until a condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def watchdog(target: Target) -> Iterator[Watchdog]:
    made = Watchdog(target.stamp_auto, INTERVAL_S)
    made.start()
    yield made
    assert made.stop(LIMIT_S)


def test_who_was_not_started_holds_nothing() -> None:
    """A call that fails before it begins leaves its page to nobody: no collection is needed."""
    target = Target()
    held = weakref.ref(target)
    gc.disable()
    try:
        made = Watchdog(target.stamp_auto, INTERVAL_S)
        del made, target
        assert held() is None
    finally:
        gc.enable()


def test_stamps_of_a_running_thread(watchdog: Watchdog, target: Target) -> None:
    """Bytecode in the main thread brings a stamp per interval, not more."""
    start, before = time.monotonic(), len(target.stamps)
    run_until(lambda: len(target.stamps) >= before + 6)
    assert time.monotonic() - start >= 4 * INTERVAL_S
    assert target.stamps == sorted(target.stamps)


def test_stamp_is_the_current_one(watchdog: Watchdog, target: Target) -> None:
    """A stamp is made when the main thread has run bytecode, not one interval later."""
    run_until(lambda: len(target.stamps) >= 2)
    # No bytecode runs meanwhile, and the interpreter is free for the other threads.
    ctypes.CDLL(None).usleep(20 * 5000)
    back = time.monotonic()
    seen = len(target.stamps)
    run_until(lambda: len(target.stamps) > seen)
    assert target.stamps[seen] >= back


def test_no_stamp_without_bytecode(watchdog: Watchdog, target: Target) -> None:
    """A main thread that stays in a C function gets at most the stamp that was under way."""
    run_until(lambda: len(target.stamps) >= 2)
    count = functools.partial(len, target.stamps)
    stay = functools.partial(ctypes.CDLL(None).usleep, 20 * 5000)
    # All in one C function: bytecode between them could be stamped, too.
    before, _, after = map(functools.partial.__call__, (count, stay, count))
    assert after <= before + 1


def test_pause_and_resume(watchdog: Watchdog, target: Target) -> None:
    """A pause stamps once and is then silent; after it stamps come again."""
    run_until(lambda: len(target.stamps) >= 2)
    watchdog.pause()
    paused = len(target.stamps)
    watchdog.pause()
    end = time.monotonic() + 6 * INTERVAL_S
    run_until(lambda: time.monotonic() > end)
    assert len(target.stamps) == paused
    watchdog.resume()
    run_until(lambda: len(target.stamps) >= paused + 3)


def test_stop_while_the_main_thread_is_stuck(target: Target) -> None:
    """The thread ends although the main thread never answered, and the answer may come later."""
    watchdog = Watchdog(target.stamp_auto, 0.0001)
    asked = threading.Event()
    request = watchdog._semaphore.request

    def seen() -> bool:
        asked.set()
        return request()

    watchdog._semaphore.request = seen  # type: ignore[method-assign]
    watchdog.start()
    asked.wait(LIMIT_S)
    assert watchdog.stop(LIMIT_S)
    assert watchdog.stop(LIMIT_S)
    after = len(target.stamps)
    del watchdog
    gc.collect()
    end = time.monotonic() + 0.01
    run_until(lambda: time.monotonic() > end)
    assert len(target.stamps) == after


def test_stop_before_start(target: Target) -> None:
    """A watchdog that was never started can be stopped."""
    assert Watchdog(target.stamp_auto, 1.0).stop()


def test_interpreter_that_takes_no_more_requests(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When too many calls are pending it tries again at the next interval."""
    answers = iter([-1, -1, -1])
    add = watchdog_module._add_pending_call
    monkeypatch.setattr(
        watchdog_module, "_add_pending_call", lambda *args: next(answers, None) or add(*args)
    )
    watchdog = Watchdog(target.stamp_auto, INTERVAL_S)
    watchdog.start()
    run_until(lambda: len(target.stamps) >= 2)
    assert watchdog.stop(LIMIT_S)
    assert next(answers, None) is None


def test_time_stamp() -> None:
    """A time stamp is timed out if one of its two values is older than the timeout."""
    now = time.monotonic()
    old, limit = now - 10, timedelta(seconds=5)
    assert not Timestamp().is_timed_out(limit)
    assert not Timestamp(now, now).is_timed_out(limit)
    assert not Timestamp(auto=now).is_timed_out(limit)
    assert Timestamp(auto=old, manual=now).is_timed_out(limit)
    assert Timestamp(auto=now, manual=old).is_timed_out(limit)


def test_progress_watchdog(target: Target) -> None:
    """It sends automatic stamps, pings and resets, and pauses and ends as its callers know it."""
    watchdog = ProgressWatchdog(0, target, timedelta(seconds=INTERVAL_S))
    watchdog.start()
    run_until(lambda: len(target.sent) >= 4)
    assert all(stamp.manual is None for stamp in target.sent)
    watchdog.ping()
    run_until(lambda: len(target.sent) >= 8)
    assert target.sent[-1].manual is not None
    autos = [stamp.auto for stamp in target.sent]
    assert autos == sorted(autos)
    watchdog.pause_and_synchronize()
    watchdog.spin_till_paused()
    assert target.sent[-1].manual is None
    paused = len(target.sent)
    end = time.monotonic() + 6 * INTERVAL_S
    run_until(lambda: time.monotonic() > end)
    assert len(target.sent) == paused
    watchdog.resume()
    watchdog.resume()
    run_until(lambda: len(target.sent) >= paused + 2)
    watchdog.pause_and_synchronize()
    before = len(target.sent)
    watchdog.shutdown()
    watchdog.shutdown()
    assert len(target.sent) == before + 1
    with pytest.raises(RuntimeError, match="shut down"):
        watchdog.resume()


def test_a_monitor_process_takes_the_stamps_of_a_progress_watchdog() -> None:
    """What a `ProgressWatchdog` sends reaches the monitor's page with the times in it."""
    times = [timedelta(seconds=each) for each in (60, 90, 5, 120, 1, 1, 30)]
    monitor = MonitorProcess(0, 1, *times, None, None, FileStore, {"path": "/nowhere"})
    view = PageView(os.dup(monitor._page.fd))
    watchdog = ProgressWatchdog(0, monitor, timedelta(hours=1))
    try:
        watchdog.ping()
        before = time.monotonic()
        watchdog.stamp_auto()
        seen = view.read()
        assert seen.auto_s >= before - 1e-6
        assert seen.manual_s is not None
        assert seen.manual_s <= before
        watchdog.reset()
        assert view.read().manual_s is None
    finally:
        view.close()
        monitor._page.close()


def test_old_objects_are_frozen_where_python_itself_has_frozen_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 begins with 375 frozen objects: a restart must not search all of torch for it."""
    gc.unfreeze()  # the tests' guard froze them
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    with watchdog_module.old_objects_frozen():
        monkeypatch.undo()
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    # What a program has frozen stays so.
    gc.freeze()
    try:
        with watchdog_module.old_objects_frozen():
            pass
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
