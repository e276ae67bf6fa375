# SPDX-License-Identifier: Apache-2.0
"""A chain of aborts: each member runs, whatever the others do."""

import logging
import threading
import time

import pytest

from nvidia_resiliency_ext.inprocess.abort import Abort, run_abort
from nvidia_resiliency_ext.inprocess.compose import Compose
from nvidia_resiliency_ext.inprocess.state import FrozenState, State

STATE = State(1, 4).freeze()


class Member(Abort):
    """Notes its calls, then does what it is told."""

    def __init__(self, name: str, calls: list[str], error: BaseException | None = None) -> None:
        self.__name__ = name
        self.calls = calls
        self.error = error
        self.given: object = None

    def __call__(self, state: FrozenState) -> FrozenState:
        self.calls.append(self.__name__)
        self.given = state
        if self.error is not None:
            raise self.error
        return state


def test_the_last_one_runs_first() -> None:
    """Members run in the order of `Compose`, nested ones too, and all get the state."""
    calls: list[str] = []
    one, two, three = (Member(name, calls) for name in ("one", "two", "three"))
    run_abort(Compose(one, Compose(two, three)), STATE, 10)
    assert calls == ["three", "two", "one"]
    assert one.given is STATE


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(1)])
def test_one_that_raises(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The others run all the same and get the state; what it raised is logged."""
    caplog.set_level(logging.INFO, logger="nvrx")
    calls: list[str] = []
    one, two, three = Member("one", calls), Member("two", calls, error), Member("three", calls)
    run_abort(Compose(one, two, three), STATE, 10)
    assert calls == ["three", "two", "one"]
    assert one.given is STATE
    assert "abort two failed" in caplog.text
    assert repr(error).partition("(")[0] in caplog.text
    assert "abort one took" in caplog.text


class Unspeakable(Exception):  # noqa: N818
    """Cannot even be named."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


class Nameless:
    """Fails when it is looked at."""

    @property
    def __name__(self) -> str:
        raise OSError("no name")

    def __call__(self, state: FrozenState) -> FrozenState:
        return state


def test_one_without_a_text(caplog: pytest.LogCaptureFixture) -> None:
    """Neither a member nor what it raises has to have a text; what is no abort is an error."""
    calls: list[str] = []
    one, two = Member("one", calls), Member("two", calls, Unspeakable())
    compose = Compose(one, two)
    compose.instances = (one, two, Nameless(), "no abort")  # type: ignore[assignment]
    run_abort(compose, STATE, 10)
    assert calls == ["two", "one"]
    failed = [record for record in caplog.records if "failed" in record.msg]
    assert [(each.args[0], each.exc_info[0]) for each in failed] == [
        ("str", TypeError),
        ("Nameless", OSError),
        ("two", Unspeakable),
    ]


def test_one_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one starts when half of the time is over; the late one is left to itself."""
    was_called, go_on, has_ended = (threading.Event() for _ in range(3))

    def hangs(state: FrozenState) -> FrozenState:
        go_on.wait(30)
        has_ended.set()
        return state

    start = time.monotonic()
    patience_s: list[float] = []
    wait = threading.Event.wait

    def noting(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and timeout is not None:
            patience_s.append(timeout)
        return wait(event, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", noting)
        run_abort(Compose(was_called.set, hangs), STATE, 0.2)
    duration_s = time.monotonic() - start
    assert was_called.wait(30)
    assert not has_ended.is_set()
    go_on.set()
    assert has_ended.wait(30)
    assert "abort hangs has not ended" in caplog.text
    assert 0 <= patience_s[0] <= 0.1
    assert duration_s < 10


def test_all_are_late(caplog: pytest.LogCaptureFixture) -> None:
    """Together they are waited for no longer than the deadline, and each has been started."""
    go_on = threading.Event()
    started = [threading.Event() for _ in range(3)]

    def hanging(event: threading.Event) -> object:
        def hangs(state: FrozenState) -> FrozenState:
            event.set()
            go_on.wait(30)
            return state

        return hangs

    start = time.monotonic()
    run_abort(Compose(*(hanging(event) for event in started)), STATE, 0.1)
    duration_s = time.monotonic() - start
    assert all(event.wait(30) for event in started)
    go_on.set()
    assert caplog.text.count("has not ended") == 3
    assert duration_s < 10


def test_members_without_parameters_or_result() -> None:
    """As in `Compose`: one may take nothing, and what one returns goes to the next."""
    other = State(2, 4).freeze()
    calls: list[str] = []
    last = Member("last", calls)
    run_abort(Compose(last, lambda _state: (other,), lambda: STATE), STATE, 10)
    assert last.given is other


def test_single_abort() -> None:
    """An abort that is no `Compose` is a chain of one."""
    calls: list[str] = []
    run_abort(Member("one", calls), STATE, 10)
    assert calls == ["one"]
