# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PT012 - an exception that comes from outside may meet any statement
"""Exceptions raised in other threads by the functions of `monitor_thread`."""

import logging
import re
import sys
import threading
import time

import pytest

from nvidia_resiliency_ext.inprocess import monitor_thread
from nvidia_resiliency_ext.inprocess.monitor_thread import (
    RankShouldRestart,
    async_abort_main_thread,
    async_raise,
    delayed_async_raise,
    reraise_if_unraisable,
)


class Wanted(BaseException):
    """What the tests raise."""


def spin(seconds: float = 30.0) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.fixture(autouse=True)
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(args.exc_type))
    return seen


def test_class_of_the_restart_request() -> None:
    """It is caught by `except BaseException` only, directly below it, and pickles by its name."""
    assert RankShouldRestart.__bases__ == (BaseException,)
    assert RankShouldRestart.__module__ == "nvidia_resiliency_ext.inprocess.monitor_thread"


def test_raises_in_another_thread() -> None:
    """The thread meets the exception, after the event that was to be waited for."""
    caught: list[BaseException] = []
    is_there, event = threading.Event(), threading.Event()

    def run() -> None:
        try:
            is_there.set()
            spin()
        except Wanted as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    helper = threading.Thread(target=async_raise, args=(thread.ident, Wanted, event))
    helper.start()
    assert is_there.wait(30)
    assert thread.is_alive()
    event.set()
    thread.join(30)
    helper.join()
    assert len(caught) == 1


def test_unknown_thread() -> None:
    """A thread that is not there is an error."""
    with pytest.raises(RuntimeError, match="no thread"):
        async_raise(123456789, Wanted)


def test_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one identifier means several threads it is an error, and nothing is raised in any."""
    real = monitor_thread._set_async_exc
    monkeypatch.setattr(monitor_thread, "_set_async_exc", lambda *args: 2 * real(*args))
    caught: list[BaseException] = []
    is_there, is_tried = threading.Event(), threading.Event()

    def run() -> None:
        try:
            is_there.set()
            is_tried.wait(30)
            spin(0.01)
        except BaseException as error:  # noqa: BLE001 - any would be one too many
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_there.wait(30)
    try:
        with pytest.raises(RuntimeError, match="2 threads"):
            async_raise(thread.ident or 0, Wanted)
    finally:
        is_tried.set()
        thread.join(30)
    assert caught == []


def test_nothing_is_raised_at_the_end_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter finalises it does nothing, even for an unknown thread."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    async_raise(123456789, Wanted)


def test_delayed() -> None:
    """It comes from a helper thread, so the caller goes on first."""
    with pytest.raises(Wanted):
        delayed_async_raise(threading.get_ident(), Wanted)
        spin()


@pytest.mark.parametrize("msg", [None, "why"])
def test_main_thread_is_aborted(msg: str | None) -> None:
    """The main thread gets a `RankShouldRestart` of exactly that class with the message."""
    thread = threading.Thread(target=async_abort_main_thread, args=(msg,))
    with pytest.raises(RankShouldRestart) as caught:
        thread.start()
        spin()
    thread.join()
    assert type(caught.value) is RankShouldRestart
    assert caught.value.args == (() if msg is None else (msg,))


class Raises:
    def __del__(self) -> None:
        raise Wanted


def test_unraisable_is_raised_again(unraisable: list[type[BaseException]]) -> None:
    """What a destructor raised comes in the main thread; the earlier hook was called, too."""
    hook = sys.unraisablehook
    with pytest.raises(Wanted), reraise_if_unraisable(Wanted):
        Raises()
        spin()
    assert unraisable == [Wanted]
    assert sys.unraisablehook is hook


def test_unraisable_as_a_decorator(unraisable: list[type[BaseException]]) -> None:
    """It also works around a function, every time that the function is called."""

    @reraise_if_unraisable(Wanted)
    def function() -> None:
        Raises()
        spin()

    for _ in range(2):
        with pytest.raises(Wanted):
            function()
    assert unraisable == [Wanted, Wanted]


def test_unraisable_of_another_class(unraisable: list[type[BaseException]]) -> None:
    """Other exceptions are left to the earlier hook."""
    with reraise_if_unraisable(KeyError):  # type: ignore[arg-type]
        Raises()
        spin(0.02)
    assert unraisable == [Wanted]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hook_is_restored(error: type[BaseException]) -> None:
    """The earlier hook is back after any exception, also of a nested use."""
    hook = sys.unraisablehook
    with pytest.raises(error), reraise_if_unraisable(Wanted), reraise_if_unraisable(Wanted):
        raise error
    assert sys.unraisablehook is hook


def test_unraisable_at_the_very_end() -> None:
    """One that is lost just before the end is raised there, once, and not any later."""
    for _ in range(50):
        with pytest.raises(Wanted), reraise_if_unraisable(Wanted):
            Raises()
        spin(0.0005)


def test_many_unraisable() -> None:
    """However often it is lost, also in the hook's own way out, it arrives in the end."""

    class Slow:
        def __del__(self) -> None:
            spin(0.001)

    for _ in range(20):
        with pytest.raises(Wanted), reraise_if_unraisable(Wanted):
            Raises()
            end = time.perf_counter() + 30
            while time.perf_counter() < end:
                Slow()
                spin(0.001)


def test_swallowed_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """On level DEBUG a line names the place where a request was swallowed."""
    caplog.set_level(logging.DEBUG, logger="nvrx")
    try:
        raise RankShouldRestart("why")  # noqa: TRY301 - where it ends is the point
    except RankShouldRestart:
        line = sys._getframe().f_lineno
    # The end of the block, where the interpreter lets go of it.
    place = rf"test_raising\.py:({line}|{line + 1}) in test_swallowed_request_is_logged"
    assert re.search(place, caplog.text)
    assert "why" in caplog.text
    caplog.clear()
    caplog.set_level(logging.INFO, logger="nvrx")
    RankShouldRestart("quiet")
    assert not caplog.text
