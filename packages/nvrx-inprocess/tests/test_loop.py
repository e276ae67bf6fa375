# SPDX-License-Identifier: Apache-2.0
"""The loop of one call, with a stand-in for the monitor that answers at once."""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nvidia_resiliency_ext.inprocess import rank_assignment, rank_filter
from nvidia_resiliency_ext.inprocess._call import loop as loop_module
from nvidia_resiliency_ext.inprocess._call.loop import CallLoop
from nvidia_resiliency_ext.inprocess._call.report import Phase, describe_interruption
from nvidia_resiliency_ext.inprocess._call.settings import Settings
from nvidia_resiliency_ext.inprocess._monitor.messages import (
    Completed,
    Decided,
    Interrupted,
    StoreLost,
)
from nvidia_resiliency_ext.inprocess._monitor.page import ProgressPage
from nvidia_resiliency_ext.inprocess._protocol.decision import Decision, encode_decision
from nvidia_resiliency_ext.inprocess.abort import Abort
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.inprocess.completion import Completion
from nvidia_resiliency_ext.inprocess.exception import InternalError, RestartAbort
from nvidia_resiliency_ext.inprocess.initialize import RetryController
from nvidia_resiliency_ext.inprocess.rank_assignment import RankAssignmentCtx, ShiftRanks
from nvidia_resiliency_ext.inprocess.state import FrozenState, State
from nvidia_resiliency_ext.inprocess.store import TCPStore
from nvidia_resiliency_ext.inprocess.terminate import Terminate
from nvidia_resiliency_ext.shared_utils._report import accounting
from nvidia_resiliency_ext.shared_utils.events import InprocRestart


class Monitor:
    """Stands in for the link, and for the monitor of a job in which only this rank has faults."""

    def __init__(self) -> None:
        self.is_abandoned = False
        self.left: list[bool] = []
        self.has_left = threading.Event()
        self.departures: list[tuple[int, int, frozenset[int]]] = []
        self.records: tuple[InterruptionRecord, ...] = ()
        self.receive: Callable[[Any], None]

    def begin(self, iteration: int, rank: int, world_size: int, _who: object) -> None:
        self.iteration, self.rank, self.world_size = iteration, rank, world_size

    def report(self, kind: Interruption) -> None:
        self.records = (InterruptionRecord(self.rank, kind),)
        self.receive(Interrupted(self.iteration, self.records))

    def completed(self) -> None:
        self.receive(Completed(self.iteration))

    def arrive(self, call: str, place: str) -> None:
        self.said = call, place
        size = self.world_size
        decision = Decision(size, {each: each for each in range(size)}, (), self.records)
        self.receive(Decided(self.iteration, encode_decision(decision)))

    def leave(self, is_lost: bool, *, is_discarded: bool = False) -> bool:
        del is_discarded
        self.left.append(is_lost)
        self.has_left.set()
        return True


class Nothing:
    """Stands in for parts to which nothing here matters."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


@contextlib.contextmanager
def call_of(
    state: State, monitor: Monitor | None = None, **arguments: Any
) -> Iterator[tuple[CallLoop, Monitor]]:
    """Make the loop of a call; `arguments` are those of `Wrapper`."""
    arguments = {"rank_assignment": ShiftRanks(), **arguments}
    page, monitor, nothing = ProgressPage.create(), monitor or Monitor(), Nothing()

    def notify(*said: Any) -> None:
        monitor.departures.append(said)

    loop = CallLoop(
        settings=Settings(store_factory=TCPStore, **arguments),
        state=state,
        restart_health_check=None,
        rendezvous=SimpleNamespace(store=nothing, call=0, send_departure_notice=notify),
        link=monitor,
        page=page,
        event_log=nothing,
        inject=lambda _fn, args, kwargs: (args, kwargs),
    )  # fmt: skip
    monitor.receive = loop.receive
    with contextlib.closing(page), contextlib.closing(loop.events):
        try:
            yield loop, monitor
        finally:
            del monitor.receive  # so that all goes at once


def raises_in(iterations: int, state: State) -> Callable[[], str]:
    """Return a function that raises in the first iterations."""

    def function() -> str:
        if state.iteration < iterations:
            raise ValueError(f"in iteration {state.iteration}")
        return "done"

    return function


@pytest.mark.filterwarnings("ignore:rank_filter")
@pytest.mark.parametrize("module", [rank_assignment, rank_filter])
def test_rank_filter_is_applied(module: ModuleType) -> None:
    """A filter of either kind has the last say on who works; the others are reserves."""
    for rank, value in enumerate(("works", None)):
        state = State(rank, 2)
        with call_of(state, rank_filter=module.MaxActiveWorldSize(1)) as (loop, _):
            assert loop.run(lambda: "works", (), {}) == value
        assert (state.world_size, state.active_world_size) == (2, 1)


def test_old_events_stop_nothing() -> None:
    """An interruption that is sent again, as by another monitor, costs no second restart."""
    aborted: list[int] = []

    class LateState(State):
        def advance(self) -> None:
            loop.receive(Interrupted(self.iteration, monitor.records))
            super().advance()

    class Note(Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            aborted.append(state.iteration)
            return state

    state = LateState(0, 1)
    with call_of(state, abort=Note()) as (loop, monitor):
        assert loop.run(raises_in(1, state), (), {}) == "done"
        for thread in threading.enumerate():
            if thread.name == "nvrx-inprocess-restart":
                thread.join(30)
    assert aborted == [0]


def test_report_tells_the_last_call_of_who_has_not_reported() -> None:
    """A rank that was interrupted by another one's fault knows of its monitor how long that was."""
    state = State(0, 1)
    with call_of(state) as (loop, monitor):

        def function() -> None:
            if state.iteration == 0:
                monitor.receive(Interrupted(0, (), 0.75))
                time.sleep(30)

        loop.run(function, (), {})
        (report,) = loop.reports
    assert report.seconds["last_call"] == 0.75


def test_report_has_every_phase() -> None:
    """Readers of a report find all phases in their order, 0 for what took no time."""
    state = State(0, 1)
    with call_of(state) as (loop, _):
        loop.run(raises_in(1, state), (), {})
        (report,) = loop.reports
    assert list(report.seconds) == [phase.value for phase in Phase]
    assert report.seconds["detect"] == 0


def test_a_restart_is_logged_in_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    """By default, too, a line says what happened, who goes on and after how long."""
    state = State(0, 1)
    caplog.set_level("DEBUG", "nvrx")
    with call_of(state) as (loop, _):
        loop.run(raises_in(1, state), (), {})
    told = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 1
    assert re.fullmatch(r"rank 0 raised an exception.*; 1 rank goes on after \d+\.\d\d s", told[0])
    quiet = [each.message for each in caplog.records if each.levelname == "DEBUG"]
    assert any(text.startswith("iteration 1 begins: rank 0 of 1") for text in quiet)
    assert "all ranks have completed iteration 1" in quiet


@pytest.mark.parametrize(
    ("kinds", "lost", "said"),
    [
        (
            {0: "HARD_TIMEOUT", 1: "EXCEPTION"},
            [0],
            (
                "rank 0 made no progress for 90 s (hard_timeout) and was killed;"
                " rank 1 raised an exception, or asked for a restart"
            ),
        ),
        (
            {0: "HARD_TIMEOUT", 1: "SOFT_TIMEOUT"},
            [0],
            "rank 0 made no progress for 90 s (hard_timeout) and was killed",
        ),
        ({1: "TERMINATED"}, [1], "rank 1 was killed or crashed"),
        # What collectives of the others raised follows from the loss.
        ({0: "EXCEPTION", 1: "TERMINATED"}, [1], "rank 1 was killed or crashed"),
        (
            {2: "UNRESPONSIVE", 3: "UNRESPONSIVE"},
            [2, 3],
            "ranks {2-3} sent no heartbeat for 30 s (heartbeat_timeout)",
        ),
        (
            {0: "EXCEPTION", 1: "BASE_EXCEPTION"},
            [1],
            (
                "rank 1 left the function for good;"
                " rank 0 raised an exception, or asked for a restart; rank 1 is lost"
            ),
        ),
    ],
)
def test_what_happened_is_said_in_words(
    kinds: dict[int, str], lost: list[int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names ranks, what was seen of them with its limit, and who is lost."""
    monkeypatch.setenv("NVRX_LOG_RANK_FORMAT_VERBOSE", "1")
    records = [InterruptionRecord(rank, Interruption[kind]) for rank, kind in kinds.items()]
    settings = Settings(store_factory=TCPStore, rank_assignment=ShiftRanks())
    decision = Decision(4, {}, tuple(lost), tuple(records))
    assert describe_interruption(decision, settings) == said


def test_what_fails_while_the_function_is_stopped_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the thread that stops the function is logged, and the restart goes on."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(loop_module, "terminate", fail)
    state = State(0, 1)
    with call_of(state, barrier_timeout=timedelta(seconds=10)) as (loop, _):
        assert loop.run(raises_in(1, state), (), {}) == "done"
    assert "stopping the function: OSError('broken')" in caplog.text


def test_report_tells_how_long_a_hang_was_not_seen() -> None:
    """The restart after a hang takes the soft timeout, too: so long nobody had done anything."""
    state = State(0, 1)
    with call_of(state, soft_timeout=timedelta(seconds=20)) as (loop, monitor):

        def function() -> None:
            if state.iteration == 0:
                monitor.report(Interruption.SOFT_TIMEOUT)
                time.sleep(30)

        loop.run(function, (), {})
        (report,) = loop.reports
    assert next(iter(report.seconds.items())) == ("detect", 20)


class Failing(Completion, Terminate):
    """What is called at the end, and fails."""

    def __call__(self, state: FrozenState) -> FrozenState:
        raise OSError("at the end") from state.fn_exception


def test_what_made_a_rank_restart_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What the function raised, and where, is in the log: nobody else can tell."""
    state = State(0, 1)
    with call_of(state) as (loop, _):
        assert loop.run(raises_in(1, state), (), {}) == "done"
    (record,) = (each for each in caplog.records if each.levelno >= logging.ERROR)
    line, *trace = record.getMessage().splitlines()
    assert line == "rank=0 iteration 0: ValueError('in iteration 0')"
    assert any("in function" in each for each in trace)


def test_a_group_that_cannot_be_made_again_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    """Only after a restart: keys of the call before are in the store that the function uses."""
    state = State(0, 1)

    def init_process_group() -> str:
        return raises_in(2, state)()

    with call_of(state) as (loop, _):
        assert loop.run(init_process_group, (), {}) == "done"
    first, second = (each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR)
    assert "PrefixStore(str(call.iteration), call.store)" not in first
    assert "PrefixStore(str(call.iteration), call.store)" in second


def test_huge_message_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A message of megabytes is logged by its two ends, with where it was raised."""
    state = State(0, 1)

    def function() -> str:
        if state.iteration == 0:
            raise ValueError("x" * 10_000_000)
        return "done"

    with call_of(state) as (loop, _):
        assert loop.run(function, (), {}) == "done"
    (record,) = (each for each in caplog.records if each.levelno >= logging.ERROR)
    assert len(record.getMessage()) < 200_000
    assert "in function" in record.getMessage()


def test_failing_completion_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The function's value counts, and what the callback raised is in the log."""
    with call_of(State(0, 1), completion=Failing()) as (loop, _):
        assert loop.run(lambda: 3, (), {}) == 3
    assert "rank=0 completion: OSError('at the end')" in caplog.text


def test_who_leaves_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The log has what a rank leaves with, and what `terminate` raised after it."""

    def function() -> None:
        raise SystemExit(3)

    with (
        call_of(State(0, 1), terminate=Failing()) as (loop, monitor),
        pytest.raises(SystemExit, match="3"),
    ):
        loop.run(function, (), {})
    assert monitor.left == [True]
    assert "rank=0 leaving: SystemExit(3)" in caplog.text
    assert "rank=0 terminate: OSError('at the end')" in caplog.text


def test_who_gives_up_after_a_loss_says_who_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Where too few are left, the log names the lost rank; no restart has happened."""

    class Losing(Monitor):
        def arrive(self, *_: object) -> None:
            decision = Decision(2, {0: 0}, (1,), self.records)
            self.receive(Decided(self.iteration, encode_decision(decision)))

    events: list[InprocRestart] = []
    retries = RetryController(min_world_size=2)
    with call_of(State(0, 2), Losing(), initialize=retries) as (loop, monitor):
        loop.event_log = SimpleNamespace(record=lambda event, **_: events.append(event))

        def function() -> None:
            monitor.records = (InterruptionRecord(1, Interruption.TERMINATED),)
            monitor.receive(Interrupted(0, monitor.records))
            time.sleep(30)

        with pytest.raises(RestartAbort):
            loop.run(function, (), {})
    assert "rank 1 was killed or crashed; this rank leaves after" in caplog.text
    assert not events


def test_the_record_of_a_restart_has_its_call() -> None:
    """Restarts of two calls have the same iterations: the number of the call tells them apart."""
    events: list[InprocRestart] = []
    state = State(0, 1)
    with call_of(state) as (loop, _):
        loop.event_log = SimpleNamespace(record=lambda event, **_: events.append(event))
        loop.rendezvous.call = 5
        loop.run(raises_in(1, state), (), {})
    assert [(event.call, event.iteration) for event in events] == [(5, 0)]


def test_who_never_calls_the_function_is_done_without() -> None:
    """A call that is closed before it was made is one that this rank leaves; else it has ended."""
    with call_of(State(0, 1)) as (loop, monitor):
        loop.close()
        loop.close()
        assert monitor.left == [True]
    with call_of(State(0, 1)) as (loop, monitor):
        loop.run(lambda: None, (), {})
        loop.close()
        assert monitor.left == [False]


def test_departure_notice_is_said_where_the_others_wait() -> None:
    """A rank without monitor that fails between two iterations is missed in the second one."""
    state = State(0, 1)

    class Fails(ShiftRanks):
        def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
            if state.fn_exception is not None:
                monitor.is_abandoned = True
                raise KeyError("no number")
            return super().__call__(ctx)

    with call_of(state, rank_assignment=Fails()) as (loop, monitor):
        with pytest.raises(KeyError, match="no number"):
            loop.run(raises_in(1, state), (), {})
        assert monitor.departures == [(0, 1, frozenset({0}))]


def test_who_is_in_the_function_when_the_store_is_lost_comes_out() -> None:
    """Nobody could interrupt it any more: it is stopped, and leaves with what was lost."""
    with call_of(State(0, 1)) as (loop, monitor):

        def function() -> None:
            monitor.receive(StoreLost("the store at here:1: gone"))
            time.sleep(30)

        began = time.monotonic()
        with pytest.raises(InternalError, match="lost the store of the job: the store at here:1"):
            loop.run(function, (), {})
        assert time.monotonic() - began < 10
        assert monitor.left == [True]


def test_who_has_completed_does_not_need_the_store() -> None:
    """A store that is lost when all have completed takes no result away, and stops nothing."""

    class Late(Monitor):
        def completed(self) -> None:
            super().completed()
            self.receive(StoreLost("gone"))

    aborted: list[int] = []

    class Note(Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            aborted.append(state.iteration)
            return state

    with call_of(State(0, 1), Late(), abort=Note()) as (loop, _):
        assert loop.run(lambda: "done", (), {}) == "done"
    assert aborted == []


def test_no_abort_goes_on_after_the_call() -> None:
    """Who leaves while it is interrupted waits for the abort: it would end what comes after."""
    happened: list[str] = []

    class Slow(Abort):
        def __call__(self, state: FrozenState) -> FrozenState:
            assert monitor.has_left.wait(30)
            time.sleep(0.05)  # until the caller would be on; earlier is no fault
            happened.append("aborted")
            return state

    with call_of(State(0, 1), abort=Slow()) as (loop, monitor):

        def function() -> None:
            monitor.receive(Interrupted(0, ()))
            raise SystemExit(3)

        with pytest.raises(SystemExit):
            loop.run(function, (), {})
        happened.append("called")
    assert happened == ["aborted", "called"]


def test_every_phase_is_in_the_report_of_a_job() -> None:
    """nvrx-report counts each phase of a restart to one of its categories, none as "other"."""
    assert {phase.value for phase in Phase} <= set(accounting.PHASES)
