# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012 - an exception that comes from outside may meet any statement
"""How a rank leaves its function, in the wrapper and with `MonitorThread`."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from interrupters import await_waiter, is_held_by_others

from nvidia_resiliency_ext.inprocess._call.interrupt import (
    AtomicLock,
    MainThreadInterrupter,
    terminate,
)
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.exception import TimeoutError as ThreadTimeoutError
from nvidia_resiliency_ext.inprocess.monitor_thread import MonitorThread, RankShouldRestart
from nvidia_resiliency_ext.inprocess.progress_watchdog import ProgressWatchdog
from nvidia_resiliency_ext.inprocess.state import FrozenState, State

STATE = State(1, 4).freeze()
QUIET_S = 20.0


def spin(seconds: float = 30.0) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Scene:
    """The parts of a termination; notes the order of what happens."""

    def __init__(self) -> None:
        self.interrupter = MainThreadInterrupter()
        self.lock = AtomicLock()
        self.happened: list[str] = []
        self.phases: list[tuple[float, float]] = []

    def abort(self, state: FrozenState) -> FrozenState:
        assert is_held_by_others(self.lock)
        self.happened.append("abort")
        return state

    def pause(self) -> None:
        self.happened.append("pause")

    def start(self, abort: object = None, quiet_s: float = QUIET_S) -> threading.Thread:
        """Begin in a thread, which is kept before it can interrupt the caller."""

        def run() -> None:
            chosen = self.abort if abort is None else abort
            parts = (chosen, STATE, self.interrupter, self.lock, self.pause)
            self.phases.append(terminate(*parts, "because", quiet_s=quiet_s))  # type: ignore[arg-type]

        self.thread = threading.Thread(target=run)
        self.thread.start()
        return self.thread


def test_order_of_a_termination() -> None:
    """Abort, then the watchdog's pause, then the exception; both times are returned."""
    scene = Scene()
    with pytest.raises(RankShouldRestart, match="because"), scene.interrupter:
        try:
            scene.start()
            spin()
        finally:
            scene.happened.append("unwound")
    scene.thread.join()
    assert scene.happened == ["abort", "pause", "unwound"]
    (phases,) = scene.phases
    assert min(phases) >= 0


def test_nothing_begins_during_an_atomic_block() -> None:
    """The abort waits for the end of the block, and the next block for the interruption."""
    scene = Scene()
    with pytest.raises(RankShouldRestart), scene.interrupter:
        with scene.lock:
            scene.start()
            await_waiter(scene.lock)
            spin(0.05)
            assert scene.happened == []
        with scene.lock:
            pytest.fail("entered although the interruption had begun")
    scene.thread.join()
    abort_s, _ = scene.phases[0]
    assert abort_s > 0.01


def test_failing_abort(caplog: pytest.LogCaptureFixture) -> None:
    """The main thread is interrupted all the same."""
    scene = Scene()

    def fail(_state: FrozenState) -> FrozenState:
        raise OSError("broken")

    with pytest.raises(RankShouldRestart), scene.interrupter:
        scene.start(fail)
        spin()
    scene.thread.join()
    assert "broken" in caplog.text


def test_abort_that_cannot_be_run(caplog: pytest.LogCaptureFixture) -> None:
    """An object that fails before it is called keeps nobody inside, either."""

    class Broken(Compose):
        """Does not tell its members."""

        def __getattribute__(self, name: str) -> object:
            raise OSError("broken")

    scene = Scene()
    with pytest.raises(RankShouldRestart), scene.interrupter:
        scene.start(object.__new__(Broken))
        spin()
    scene.thread.join()
    assert "broken" in caplog.text


def test_main_thread_that_has_left_by_itself() -> None:
    """The abort is done, and nothing is raised any more."""
    scene = Scene()
    scene.start().join()
    spin(0.005)
    assert scene.happened == ["abort", "pause"]
    assert len(scene.phases) == 1


def test_atomic_blocks_while_unwinding() -> None:
    """The clean-up of the function may enter atomic blocks: the lock is free again."""
    scene = Scene()
    entered = False
    with pytest.raises(RankShouldRestart), scene.interrupter:
        try:
            scene.start()
            spin()
        finally:
            with scene.lock:
                entered = True
    scene.thread.join()
    assert entered


class Store:
    """A store that is interrupted by an event."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()
        self.happened: list[str] = []

    def wait_for_interrupted(self, timeout: timedelta) -> None:
        if not self.interrupted.wait(timeout.total_seconds()):
            raise dist.DistStoreError("expired")

    def lock_interruption_records(self) -> None:
        self.happened.append("locked")

    def get_interruption_records(self) -> list[InterruptionRecord]:
        return [InterruptionRecord(2, Interruption.EXCEPTION)]

    def send_timestamp(self, _timestamp: object) -> None:
        """Take it."""


def monitor_thread(store: Store, interval: float = 0.01) -> MonitorThread:
    watchdog = ProgressWatchdog(1, store, timedelta(seconds=1))
    seconds = timedelta(seconds=QUIET_S)
    thread = MonitorThread(
        STATE,
        store,
        None,
        timedelta(seconds=interval),
        watchdog,
        seconds,
        timedelta(0),
        AtomicLock(),
        True,
    )
    thread.start()
    return thread


def test_monitor_thread_interrupts() -> None:
    """An interruption in the store ends what the main thread does, with the records as message."""
    store = Store()
    thread = monitor_thread(store)
    with pytest.raises(RankShouldRestart, match="EXCEPTION"):
        store.interrupted.set()
        spin()
    thread.maybe_join()
    assert not thread.is_alive()
    assert store.happened == ["locked"]


def test_monitor_thread_without_interruption() -> None:
    """It ends at `shutdown`, and not before."""
    thread = monitor_thread(Store())
    thread.maybe_join()
    assert thread.is_alive()
    thread.shutdown()
    assert not thread.is_alive()


def test_monitor_thread_that_does_not_end() -> None:
    """A thread that is stuck in its store is an error, not a hang."""
    store = Store()
    thread = monitor_thread(store, interval=30)
    with pytest.raises(ThreadTimeoutError):
        thread._join(0.01)
    thread.maybe_join()  # an interruption from here on raises nothing
    store.interrupted.set()
    thread.shutdown()
