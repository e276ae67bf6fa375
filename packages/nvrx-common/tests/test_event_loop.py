# SPDX-License-Identifier: Apache-2.0
"""The event loop, its wake-up descriptor and the worker thread beside it."""

import os
import subprocess
import sys
import threading

import pytest

from nvidia_resiliency_ext.shared_utils.clock import ManualClock, SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop, WakeUp, WorkerThread


@pytest.fixture
def loop():
    it = EventLoop()
    yield it
    it.close()


def turn(loop, done):
    """Run the loop until something is so, for at most 30 s."""
    end = SystemClock().monotonic() + 30.0
    while not done():
        assert SystemClock().monotonic() < end
        loop.run_once(until=end)


def test_posted_calls_run_in_order_in_the_thread_of_the_loop(loop):
    """Calls of another thread wake the loop and run there, in order."""
    seen = []

    def work():
        for number in range(1000):
            loop.post(lambda number=number: seen.append((number, threading.get_ident())))

    thread = threading.Thread(target=work)
    thread.start()
    turn(loop, lambda: len(seen) == 1000)
    thread.join()
    assert seen == [(number, threading.get_ident()) for number in range(1000)]


def test_a_descriptor_that_was_unwatched_in_the_same_round_is_not_called(loop):
    """Two descriptors are ready; the first callback unwatches the other one."""
    ends, seen = [os.pipe() for _ in range(2)], []

    def called(own, other):
        seen.append(own)
        loop.unwatch(other)
        loop.unwatch(own)

    (first, second) = (reading for reading, _ in ends)
    loop.watch(first, lambda: called(first, second))
    loop.watch(second, lambda: called(second, first))
    for _, writing in ends:
        os.write(writing, b"x")
    turn(loop, lambda: seen)
    loop.run_once(until=0.0)
    assert len(seen) == 1
    for end in ends:
        os.close(end[0])
        os.close(end[1])


def test_writable_descriptors_are_watched_on_demand(loop):
    """Watching again changes what a descriptor is watched for."""
    reading, writing = os.pipe()
    seen = []
    loop.watch(writing, lambda: seen.append("quiet"))
    loop.run_once(until=0.0)
    assert not seen
    loop.watch(writing, lambda: seen.append("writable"), write=True)
    turn(loop, lambda: seen)
    assert seen == ["writable"]
    loop.unwatch(writing)
    os.close(reading)
    os.close(writing)


def test_closed_objects_can_be_unwatched(loop):
    """An object that was closed first leaves nothing behind for its number's next owner."""
    wake_up = WakeUp()
    loop.watch(wake_up, lambda: None)
    wake_up.close()
    loop.unwatch(wake_up)
    again = WakeUp()
    loop.watch(again, lambda: None)
    loop.unwatch(again)
    again.close()


@pytest.mark.parametrize("as_number", [True, False])
def test_the_next_owner_of_a_closed_descriptors_number_is_watched(loop, as_number):
    """A descriptor that was closed while it was watched hides nothing from its number's next."""
    seen, first = [], WakeUp()
    kept = first.fileno() if as_number else first
    loop.watch(kept, lambda: seen.append("first"))
    first.close()
    second = WakeUp()
    assert not as_number or second.fileno() == kept
    loop.watch(second.fileno() if as_number else second, lambda: seen.append("second"))
    second.set()
    loop.run_once(until=0.0)
    assert seen == ["second"]
    loop.unwatch(second)
    second.close()


def test_cancelled_timers_are_removed():
    """Timers that are cancelled do not pile up, and the others fire in order."""
    clock, seen = ManualClock(), []
    loop = EventLoop(clock)
    for number in range(1000):
        loop.call_at(clock.monotonic() + 1e6 + number, lambda: seen.append("late")).cancel()
    assert len(loop._timers) < 20
    loop.call_at(clock.monotonic() + 2, lambda: seen.append(2))
    loop.call_at(clock.monotonic() + 1, lambda: seen.append(1))
    clock.advance(3.0)
    loop.run_once()
    assert seen == [1, 2]
    loop.close()


def test_callbacks_go_through_the_guard():
    """An exception of one callback reaches the guard and leaves the others to be called."""
    caught, seen = [], []

    def guard(callback):
        try:
            callback()
        except ZeroDivisionError as error:
            caught.append(error)

    loop = EventLoop(call=guard)
    loop.post(lambda: 1 / 0)
    loop.post(lambda: seen.append(1))
    loop.call_at(0.0, lambda: 1 / 0)
    loop.run_once(until=0.0)
    assert (len(caught), seen) == (2, [1])
    loop.close()


def test_calls_behind_one_that_raises_come_in_the_next_round(loop):
    """Without a guard an exception ends the round; nobody has to post again."""
    seen = []
    loop.post(lambda: 1 / 0)
    loop.post(lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        loop.run_once(until=0.0)
    loop.run_once(until=0.0)
    assert seen == [1]


FORKS = """
import os, signal, threading
from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp
wake_up = WakeUp()
is_held = threading.Event()

def hold():
    with wake_up._lock:
        is_held.set()
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
assert is_held.wait(30)
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    wake_up.set()
    wake_up.close()
    os._exit(0)
os._exit(os.waitpid(pid, 0)[1])
"""


def test_a_forked_child_can_close_a_wake_up_whose_lock_was_held():
    """The thread that held the lock does not exist in the child."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_a_wake_up_is_harmless_after_close():
    """Setting it after `close` writes into nobody's descriptor."""
    wake_up = WakeUp()
    number = wake_up.fileno()
    wake_up.set()
    wake_up.close()
    successor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    assert successor == number
    wake_up.set()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(successor)
    wake_up.close()
    os.close(successor)


def test_jobs_run_in_order_and_a_failed_one_gives_none(loop, caplog):
    """Results come back to the loop's thread; a job that raises is logged."""
    worker, seen = WorkerThread(), []
    loop.watch(worker, worker.collect)
    worker.submit(lambda: 1 / 0, seen.append)
    worker.submit(lambda: sys.exit(3), seen.append)
    worker.submit(threading.get_ident, seen.append)
    turn(loop, lambda: len(seen) == 3)
    assert seen[:2] == [None, None]
    assert seen[2] != threading.get_ident()
    assert "division by zero" in caplog.text
    loop.unwatch(worker)
    worker.close()
    worker.wake()
