# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012 - an exception that comes from outside may meet any statement
"""The main thread leaves exactly when it was interrupted, and nothing is raised after."""

import _thread
import collections
import contextlib
import gc
import itertools
import operator
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupters import await_waiter, interrupt_main_thread, is_held_by_others

from nvidia_resiliency_ext.inprocess._call.interrupt import (
    AtomicLock,
    InterruptSignal,
    MainThreadInterrupter,
    RankShouldRestart,
    require_main_thread,
)
from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal

QUIET_S = 20.0
TRIALS = 2000
LATEST_S = 0.002


class Helper:
    """A thread that interrupts when it is told to."""

    def __init__(self, interrupter: MainThreadInterrupter, lock: AtomicLock) -> None:
        self._interrupter, self._lock = interrupter, lock
        self._orders: queue.SimpleQueue[tuple[float, float] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._never = threading.Event()
        self.is_coming = False
        self._thread = threading.Thread(target=self._run, name="helper")
        self._thread.start()

    def interrupt(self, delay_s: float = 0.0, quiet_s: float = QUIET_S) -> None:
        self.is_coming = False
        self._orders.put((delay_s, quiet_s))

    def result(self) -> int | None:
        return self._results.get(timeout=60)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            delay_s, quiet_s = order
            self._never.wait(delay_s)
            self.is_coming = True
            self._results.put(
                interrupt_main_thread(self._interrupter, "because", quiet_s, self._lock)
            )


@pytest.fixture
def lock() -> AtomicLock:
    return AtomicLock()


@pytest.fixture
def interrupter() -> MainThreadInterrupter:
    return MainThreadInterrupter()


@pytest.fixture
def helper(interrupter: MainThreadInterrupter, lock: AtomicLock) -> Iterator[Helper]:
    made = Helper(interrupter, lock)
    yield made
    made.close()


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """Collect what could not be passed on; pytest would make errors of it."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
    return seen


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Slow:
    """Takes its time to go."""

    def __del__(self) -> None:
        spin(0.0005)


class Places:
    """Where an interruption can meet the main thread; each function ends by itself in time."""

    def __init__(self, lock: AtomicLock, helper: Helper) -> None:
        self.lock = lock
        self.helper = helper
        self.begun = self.ended = 0

    def spins(self) -> None:
        spin(0.002)

    def sleeps(self) -> None:
        time.sleep(0.002)

    def is_in_finally(self) -> None:
        try:
            spin(0.0005)
        finally:
            spin(0.0015)

    def is_in_a_destructor(self) -> None:
        for _ in range(2):
            spin(0.0005)
            Slow()

    def is_atomic(self) -> None:
        for _ in range(8):
            with self.lock:
                self.begun += 1
                spin(0.00025)
                self.ended += 1

    def is_just_returning(self) -> None:
        while not self.helper.is_coming:
            pass

    def raises_by_itself(self) -> None:
        while not self.helper.is_coming:
            pass
        raise ValueError("its own")

    def catches_exceptions(self) -> None:
        for _ in range(3):
            with contextlib.suppress(Exception):
                spin(0.0007)


PLACES = [name for name in vars(Places) if not name.startswith("_")]


@pytest.mark.parametrize("place", PLACES)
def test_random_interruptions(
    interrupter: MainThreadInterrupter,
    lock: AtomicLock,
    helper: Helper,
    unraisable: list[type[BaseException]],
    place: str,
) -> None:
    """Whenever it comes: it leaves once if, and only if, it was in time, and all is restored."""
    draw = random.Random(place)
    places = Places(lock, helper)
    function: Callable[[], None] = getattr(places, place)
    hook, switch_s = sys.unraisablehook, sys.getswitchinterval()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    number = unused_realtime_signal()
    handler = signal.getsignal(number)
    outcomes: collections.Counter[bool] = collections.Counter()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(TRIALS // len(PLACES)):
            helper.interrupt(draw.uniform(0.0, LATEST_S))
            raised: tuple[object, ...] | None = None
            try:
                with interrupter:
                    function()
            except RankShouldRestart as error:
                raised = error.args
            except ValueError:
                pass
            # What came late would be raised in these.
            spin(0.00005)
            result = helper.result()
            spin(0.00005)
            assert raised == (None if result is None else ("because",))
            assert sys.unraisablehook is hook
            assert signal.getsignal(number) is handler
            outcomes[raised is not None] += 1
    finally:
        sys.setswitchinterval(switch_s)
    assert places.begun == places.ended, "an atomic block was interrupted"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    assert signal.sigpending() == set()
    assert set(unraisable) <= {RankShouldRestart}
    assert outcomes[True] > 0


def _socket() -> Iterator[Callable[[], object]]:
    one, two = socket.socketpair()
    with one, two:
        yield lambda: one.recv(1)


def _pipe() -> Iterator[Callable[[], object]]:
    reading, writing = os.pipe()
    yield lambda: os.read(reading, 1)
    os.close(reading)
    os.close(writing)


def _select() -> Iterator[Callable[[], object]]:
    one, two = socket.socketpair()
    with one, two:
        yield lambda: select.select([one], [], [], 600)


def _process() -> Iterator[Callable[[], object]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.wait


def _lock() -> Iterator[Callable[[], object]]:
    held = threading.Lock()
    held.acquire()
    yield held.acquire


def _simple(function: Callable[[], object]) -> Callable[[], Iterator[Callable[[], object]]]:
    def made() -> Iterator[Callable[[], object]]:
        yield function

    return made


def _join() -> Iterator[Callable[[], object]]:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    yield thread.join
    event.set()
    thread.join()


BLOCKING = {
    "sleep": _simple(lambda: time.sleep(600)),
    "lock": _lock,
    "event": _simple(lambda: threading.Event().wait(600)),
    "queue": _simple(lambda: queue.Queue().get()),
    "simple queue": _simple(lambda: queue.SimpleQueue().get(timeout=600)),
    "join": _join,
    "socket": _socket,
    "pipe": _pipe,
    "select": _select,
    "process": _process,
}


@pytest.mark.parametrize("call", BLOCKING)
def test_blocking_calls_are_left(
    interrupter: MainThreadInterrupter, helper: Helper, call: str
) -> None:
    """A main thread that waits in the kernel is out within a fraction of a second."""
    with contextlib.contextmanager(BLOCKING[call])() as function:
        start = time.monotonic()
        with pytest.raises(RankShouldRestart, match="because"), interrupter:
            helper.interrupt(0.01)
            function()
        assert time.monotonic() - start < 25.0
        assert helper.result() == 1


def test_a_thread_that_blocks_signals_is_left(
    interrupter: MainThreadInterrupter, helper: Helper
) -> None:
    """Even when the function has blocked all signals, its bytecode is interrupted."""
    with pytest.raises(RankShouldRestart), interrupter:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        start = time.perf_counter()
        try:
            helper.interrupt()
            spin(30)
        finally:
            taken_s = time.perf_counter() - start
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert taken_s < 25
    assert helper.result() is not None


def test_signals_blocked_at_the_entry(interrupter: MainThreadInterrupter, helper: Helper) -> None:
    """A program that has blocked all signals is interrupted in a call, and they stay blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        start = time.perf_counter()
        with pytest.raises(RankShouldRestart), interrupter:
            helper.interrupt(0.01)
            time.sleep(30)
        assert time.perf_counter() - start < 25
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert helper.result() is not None


def test_function_that_swallows_is_raised_in_again(
    interrupter: MainThreadInterrupter, helper: Helper
) -> None:
    """It is raised again after the quiet time, then with pauses that grow from 10 ms."""
    seen: list[float] = []
    # On a busy machine one may come while the one before is noted: that trial says nothing.
    for _ in range(20):
        seen.clear()
        with pytest.raises(RankShouldRestart), interrupter:
            helper.interrupt(quiet_s=0.05)
            while len(seen) < 5:
                try:
                    spin(30)
                except RankShouldRestart:
                    seen.append(time.perf_counter())
        result = helper.result()
        pauses = [after - before for before, after in itertools.pairwise(seen)]
        # One that is noted late makes the pause that follows look short: that says nothing, too.
        if len(pauses) == 4 and all(map(operator.ge, pauses, (0.05, 0.01, 0.02, 0.04))):
            break
    else:
        pytest.fail(f"the pauses are too short: {pauses}")
    assert result is not None
    assert result >= 5  # more often if the main thread takes its time to leave


def test_first_unwinding_is_left_in_peace(
    interrupter: MainThreadInterrupter, helper: Helper
) -> None:
    """What the function does in its clean-up is not interrupted within the quiet time."""
    cleaned_up = False
    with pytest.raises(RankShouldRestart), interrupter:
        try:
            helper.interrupt()
            spin(30)
        finally:
            # One that comes by itself, as one that was sent twice, does nothing.
            interrupter._signal.send()
            spin(0.1)
            cleaned_up = True
    result = helper.result()
    assert cleaned_up
    assert result is not None
    assert result == 1


def test_lost_in_a_destructor(
    interrupter: MainThreadInterrupter, helper: Helper, unraisable: list[type[BaseException]]
) -> None:
    """What Python could only report is raised again at once, not after the quiet time."""

    class Stuck:
        def __del__(self) -> None:
            helper.interrupt()
            spin(30)

    start = time.perf_counter()
    with pytest.raises(RankShouldRestart), interrupter:
        try:
            Stuck()
            spin(30)
        finally:
            spin(0.1)
    result = helper.result()
    assert unraisable == [RankShouldRestart]
    assert result is not None
    assert result == 2
    assert time.perf_counter() - start < 25


def test_interruption_takes_the_place_of_an_exception(interrupter: MainThreadInterrupter) -> None:
    """An exception that the abort has brought about does not hide the interruption."""
    with pytest.raises(RankShouldRestart) as caught, interrupter:
        interrupted = threading.Event()

        def interrupt() -> None:
            interrupter._stay.message = "because"  # as if the main thread had not been reached yet
            interrupted.set()

        thread = threading.Thread(target=interrupt)
        thread.start()
        thread.join()
        raise ValueError("connection closed")
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("leaving", [SystemExit, KeyboardInterrupt])
def test_leaving_goes_before_the_interruption(
    interrupter: MainThreadInterrupter, leaving: type[BaseException]
) -> None:
    """What ends the wrapper on this rank is not turned into a restart."""
    with pytest.raises(leaving), interrupter:
        interrupter._stay.message = "because"
        raise leaving


def test_nobody_inside(interrupter: MainThreadInterrupter, lock: AtomicLock) -> None:
    """An interruption while the main thread is not inside returns None; nothing is raised."""
    assert interrupt_main_thread(interrupter, "because", QUIET_S, lock) is None
    with interrupter:
        pass
    assert interrupt_main_thread(interrupter, "because", QUIET_S, lock) is None
    with interrupter:
        spin(0.001)


def test_atomic_block_is_not_interrupted(
    interrupter: MainThreadInterrupter, lock: AtomicLock, helper: Helper
) -> None:
    """The interruption waits for the end of the block, and then comes."""
    with pytest.raises(RankShouldRestart), interrupter:
        with lock, lock:
            helper.interrupt()
            spin(0.05)
            done = True
        spin(30)
    assert done
    assert helper.result() is not None


def test_atomic_block_is_not_interrupted_later_either(
    interrupter: MainThreadInterrupter, lock: AtomicLock
) -> None:
    """A function that has swallowed the exception can still finish its block."""
    is_in_block = threading.Event()
    results: list[int] = []

    def interrupt() -> None:
        with lock:
            interruption = interrupter.begin("because")
        assert interruption is not None
        assert is_in_block.wait(30)
        results.append(interruption.see_out(0.02, lock))

    thread = threading.Thread(target=interrupt)
    with pytest.raises(RankShouldRestart), interrupter:
        try:
            thread.start()
            spin(30)
        except RankShouldRestart:
            with lock:
                is_in_block.set()
                spin(0.1)
                done = True
        spin(30)
    thread.join(30)
    assert done
    # More often if the main thread takes its time to leave.
    assert results[0] >= 2


def test_who_waits_for_the_lock_comes_next(lock: AtomicLock) -> None:
    """A thread that takes the lock over and over does not keep the interruption from it."""
    for _ in range(20):
        had_it = threading.Event()

        def take(had_it: threading.Event = had_it) -> None:
            with lock:
                had_it.set()

        thread = threading.Thread(target=take)
        with lock:
            thread.start()
            await_waiter(lock)
            with lock:
                assert not had_it.is_set(), "a nested block does not wait"
        with lock:
            assert had_it.is_set()
        thread.join()


def test_main_thread_waits_for_the_lock(
    interrupter: MainThreadInterrupter, lock: AtomicLock, helper: Helper
) -> None:
    """A block cannot be entered while somebody interrupts, and its entry can be interrupted."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            assert not is_held_by_others(lock)
            interruption = interrupter.begin("because")
            go_on.wait(30)
        assert interruption is not None
        interruption.see_out(QUIET_S, lock)

    thread = threading.Thread(target=hold)
    with pytest.raises(RankShouldRestart), interrupter:
        thread.start()
        is_held.wait()
        with lock:
            pytest.fail("entered a block while it was being interrupted")
    assert is_held_by_others(lock)
    go_on.set()
    thread.join()
    assert not is_held_by_others(lock)


def test_no_signal_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where every real-time signal is taken, that is said, and nothing is changed."""
    status = tmp_path / "status"
    status.write_text("SigCgt:\tffffffffffffffff\n")
    module = "nvidia_resiliency_ext.shared_utils.unused_signal"
    monkeypatch.setattr(f"{module}._STATUS", str(status))
    hook = sys.unraisablehook
    interrupter = MainThreadInterrupter()
    with pytest.raises(RuntimeError, match="real-time signal"), interrupter:
        pytest.fail("entered without a signal")
    assert sys.unraisablehook is hook
    monkeypatch.undo()
    with interrupter:
        pass


def test_signal_that_comes_late_ends_nothing() -> None:
    """A signal still on its way when the handler is taken down does not kill the process."""
    calls: list[int] = []
    for _ in range(200):
        interrupt_signal = InterruptSignal(lambda number, _frame: calls.append(number))
        interrupt_signal.install()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {interrupt_signal.number})
        interrupt_signal.send()
        interrupt_signal.withdraw()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert signal.getsignal(interrupt_signal.number) is signal.SIG_DFL
    assert len(calls) <= 400


def test_what_the_function_put_there_stays(interrupter: MainThreadInterrupter) -> None:
    """A hook or handler that the function has set itself is not taken away from it."""
    number = unused_realtime_signal()
    before = sys.unraisablehook

    def its_own(*_args: object) -> None:
        """Do nothing."""

    try:
        with interrupter:
            assert signal.getsignal(number) == interrupter._on_signal
            signal.signal(number, its_own)
            sys.unraisablehook = its_own
        assert signal.getsignal(number) is its_own
        assert sys.unraisablehook is its_own
    finally:
        signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, RankShouldRestart])
def test_restored_on_every_way_out(
    interrupter: MainThreadInterrupter, error: type[BaseException]
) -> None:
    """Hook and handler are back, whatever leaves the block, which can be entered again."""
    hook, number = sys.unraisablehook, unused_realtime_signal()
    for _ in range(3):
        with pytest.raises(error), interrupter:
            raise error("out")
        assert sys.unraisablehook is hook
        assert unused_realtime_signal() == number


def test_exit_that_a_handler_prevents(interrupter: MainThreadInterrupter) -> None:
    """A handler that raises where the exit begins leaves a block that can still be left."""

    def fail(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, fail)
    try:
        # One call that has a signal sent and then fails: Python sees to signals only after it.
        with pytest.raises(KeyboardInterrupt), interrupter:
            list(map(_thread.interrupt_main, (signal.SIGUSR1, "no number")))  # type: ignore[arg-type]
        assert interrupter._stay is not None
        interrupter.leave()
        assert interrupter._stay is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_are_refused() -> None:
    """Only the main thread may be interrupted; other threads are refused by name."""
    errors: list[BaseException] = []

    def run() -> None:
        for call in (lambda: require_main_thread("Wrapper"), MainThreadInterrupter):
            try:
                call()
            except RuntimeError as error:
                errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    assert "Wrapper must be called on the main thread" in str(errors[0])
    assert "'other'" in str(errors[1])


def test_entered_twice(interrupter: MainThreadInterrupter) -> None:
    """A second entry is refused and the first one is not harmed."""
    with interrupter:
        with pytest.raises(RuntimeError, match="already inside"):
            interrupter.enter()
        assert interrupter._stay is not None


def test_nothing_is_kept_of_the_exception(
    interrupter: MainThreadInterrupter, helper: Helper
) -> None:
    """It keeps neither exception nor frames, so that groups and models can be freed."""

    class Model:
        alive = 0

        def __init__(self) -> None:
            Model.alive += 1

        def __del__(self) -> None:
            Model.alive -= 1

    def function() -> None:
        model = Model()
        helper.interrupt()
        spin(30)
        del model

    with contextlib.suppress(RankShouldRestart), interrupter:
        function()
    helper.result()
    gc.collect()
    assert Model.alive == 0


def test_requests_of_two_calls_are_distinguished() -> None:
    """An interrupter inside another one knows which of both a request came through."""
    outer, inner, lock = MainThreadInterrupter(), MainThreadInterrupter(), AtomicLock()
    helper = Helper(outer, lock)
    try:
        with pytest.raises(RankShouldRestart) as caught, outer, inner:
            helper.interrupt()
            while True:
                time.sleep(0.01)
    finally:
        helper.close()
    assert inner.is_of_another(caught.value)
    assert not outer.is_of_another(caught.value)
    assert not inner.is_of_another(RankShouldRestart("of the function"))
