# SPDX-License-Identifier: Apache-2.0
"""A signal of one's own: not one that Python, or a C library behind its back, handles."""

import ctypes
import signal
import threading
from collections.abc import Iterator

import pytest

from nvidia_resiliency_ext.shared_utils._faults import interpreter
from nvidia_resiliency_ext.shared_utils.abandonable import ParkedAtExit
from nvidia_resiliency_ext.shared_utils.unused_signal import unused_realtime_signal


@pytest.fixture
def of_a_library() -> Iterator[list[int]]:
    """Have a C library handle the signals that would be taken next, unknown to Python."""
    libc = ctypes.CDLL(None)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
    numbers = []
    for _ in range(2):
        numbers.append(unused_realtime_signal())
        libc.signal(numbers[-1], handler)
    yield numbers
    for number in numbers:
        libc.signal(number, 0)


def test_signal_is_one_that_nobody_uses() -> None:
    """Signals that Python handles, or a library behind its back, or that are ignored, are not."""
    libc = ctypes.CDLL(None)
    first = unused_realtime_signal()
    before = signal.signal(first, lambda *_: None)
    second = unused_realtime_signal()
    libc.signal(second, 1)  # SIG_IGN
    third = unused_realtime_signal()
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: None)
    libc.signal(third, handler)
    try:
        assert len({first, second, third, unused_realtime_signal()}) == 4
    finally:
        signal.signal(first, before)
        libc.signal(second, 0)
        libc.signal(third, 0)


def test_parked_thread_leaves_a_librarys_signal_alone(of_a_library: list[int]) -> None:
    """A thread that may have to be parked takes another signal."""

    class Parked(ParkedAtExit):
        def run(self) -> None:
            self.begin()

    thread = Parked("parked")
    thread.start()
    thread.join()
    assert thread.parking_signal not in (None, *of_a_library)


def test_injected_hang_leaves_a_librarys_signal_alone(
    of_a_library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds up the main thread takes another signal."""
    monkeypatch.setattr(interpreter, "_signal", None)
    interpreter.hang()
    taken = interpreter._signal
    try:
        assert taken not in (None, *of_a_library)
        called = threading.Event()
        interpreter._run_in_main_thread(called.set)
        assert called.wait(30)
    finally:
        if taken is not None:
            signal.signal(taken, signal.SIG_DFL)
