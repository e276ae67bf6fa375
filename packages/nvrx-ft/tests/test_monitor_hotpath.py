# SPDX-License-Identifier: Apache-2.0
"""The calls of every step: what they store, what they measure, and what they refuse."""

import itertools
import random
import select
import sys
import threading
import types

import pytest
from monitored_ranks import wait_until

from nvidia_resiliency_ext.fault_tolerance._monitor import hotpath
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SlotLayout, begin_slot, read_slot
from nvidia_resiliency_ext.fault_tolerance.data import SectionAction
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import RankMonitorClientError
from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import TimeoutsCalc

SECTIONS = ("setup", "step", "checkpointing")


class Path(hotpath.HotPath):
    """A hot path over plain memory that keeps what would be sent."""

    def __init__(self, sections=SECTIONS):
        super().__init__()
        self.layout = SlotLayout(sections)
        self.posted = []
        words = memoryview(bytearray(self.layout.size_bytes)).cast("q")
        self.began = self._begin(words, self.layout, is_answered=False)
        begin_slot(words, 1, self.began)
        self.words = words

    def _post(self, message):
        self.posted.append(type(message).__name__)

    def view(self):
        """Return a look at the slot."""
        return read_slot(self.words, self.layout)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that the test moves."""
    now = types.SimpleNamespace(ns=10**12)
    monkeypatch.setattr(hotpath, "_now_ns", lambda: now.ns)
    return now


@pytest.mark.parametrize("seed", range(20))
def test_the_figures_equal_those_of_the_calculator(seed, clock):
    """Whenever they are asked for, they are what the calculator measures event by event."""
    chance = random.Random(seed)
    path = Path()
    lazy = TimeoutsCalc(SECTIONS, start_time=path.began * 1e-9)
    eager = TimeoutsCalc(SECTIONS, start_time=path.began * 1e-9)
    for _ in range(300):
        clock.ns += chance.randrange(1, 10**9)
        now = clock.ns * 1e-9
        section = chance.choice(SECTIONS)
        match chance.randrange(6):
            case 0:
                path.send_heartbeat()
                eager.update_on_heartbeat(now)
            case 1 if chance.random() < 0.1:
                path.end_all_sections()
                eager.update_on_section_event(None, SectionAction.CLOSE_ALL, now)
            case 2 if chance.random() < 0.3:
                path._flush(lazy)
            case _ if section in eager.open_sections:
                path.end_section(section)
                eager.update_on_section_event(section, SectionAction.CLOSE, now)
            case _:
                path.start_section(section)
                eager.update_on_section_event(section, SectionAction.OPEN, now)
        assert set(path.view().open_sections) == set(eager.open_sections)
    path._flush(lazy)
    for name in ("initial_max_time", "subsequent_max_time", "out_of_section_max_time"):
        assert getattr(lazy, name) == pytest.approx(getattr(eager, name)), name
    assert lazy.section_to_max_time == pytest.approx(eager.section_to_max_time)
    assert lazy.open_sections == pytest.approx(eager.open_sections)
    assert lazy.last_section_close_time == pytest.approx(eager.last_section_close_time)
    assert (lazy.count, lazy.prev_hb_time) == (eager.count, pytest.approx(eager.prev_hb_time))


def test_a_new_start_time_counts_before_the_first_heartbeat(clock):
    """The calculator's start time may be moved until the first heartbeat is sent."""
    path = Path()
    calc = TimeoutsCalc(SECTIONS, start_time=0.0, clock=lambda: clock.ns * 1e-9)
    clock.ns += 50 * 10**9
    calc.reset_start_time()
    clock.ns += 2 * 10**9
    path.send_heartbeat()
    path._flush(calc)
    assert calc.initial_max_time == pytest.approx(2.0)


def test_the_slot_shows_every_event(clock):
    """Open sections, heartbeats and the stretch outside are in the slot at once."""
    path = Path()
    clock.ns += 10**9
    path.send_heartbeat()
    path.start_section("setup")
    clock.ns += 10**9
    path.start_section("step")
    path.end_section("setup")
    view = path.view()
    assert (view.heartbeat_count, view.heartbeat_first) == (1, pytest.approx(1001.0))
    assert view.open_sections == {"step": pytest.approx(1002.0)}
    assert view.out_of_section_since == pytest.approx(1000.0)
    clock.ns += 10**9
    path.end_section("step")
    view = path.view()
    assert (view.open_sections, view.out_of_section_since) == ({}, pytest.approx(1003.0))
    assert (view.step_first_open, view.step_first_close, view.step_count) == (
        pytest.approx(1002.0),
        pytest.approx(1003.0),
        1,
    )


@pytest.mark.parametrize("sections", [SECTIONS, ("fit", "setup")])
def test_only_the_first_events_are_posted(sections, clock):
    """Life and the first step are told once; without `step` any first close is the first step."""
    path = Path(sections)
    for _ in range(3):
        for section in sections:
            clock.ns += 1
            path.start_section(section)
            path.end_section(section)
    assert path.posted == ["Ask", "Ask"]


def test_the_first_step_of_a_configuration_with_step_is_steps():
    """Where `step` is configured, another section's end is no first step."""
    path = Path()
    with path.section("setup"):
        pass
    assert path.view().step_first_close is None
    with path.section("step"):
        pass
    assert path.view().step_first_close is not None


def test_wrong_nesting_is_refused_and_unknown_names_are_ignored():
    """Double open and close raise and change nothing; a name without a limit does nothing."""
    path = Path()
    path.start_section("step")
    with pytest.raises(RankMonitorClientError, match="'step' is open already"):
        path.start_section("step")
    path.end_section("step")
    with pytest.raises(RankMonitorClientError, match="'step' is not open"):
        path.end_section("step")
    path.start_section("no such section")
    path.end_section("no such section")
    path.end_all_sections()
    assert path.view().open_sections == {}


@pytest.mark.parametrize("name", [5, None, b"step"])
def test_a_name_that_is_no_text_is_a_type_error(name):
    """Whatever is opened or closed by it, the error says what a name is, and nothing is open."""
    path = Path()
    for call in (path.start_section, path.end_section, lambda it: path.section(it).__enter__()):
        with pytest.raises(TypeError, match=f"a section's name is a text, not {name!r}"):
            call(name)
    path.start_section("step")


def test_a_name_without_a_limit_is_told_once(caplog):
    """A misspelt section is one warning with the likely name; another one is only information."""
    path = Path()
    with caplog.at_level("INFO", logger="nvrx"):
        for name in ("stepp", "data", "stepp", "data"):
            path.start_section(name)
    reported = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert reported == [
        ("WARNING", "section 'stepp' has no timeout, so it is not watched; did you mean step?"),
        ("INFO", "section 'data' has no timeout, so it is not watched"),
    ]


def test_progress_is_counted_up_to_the_last_sign_of_life(clock):
    """Steps count where there are any, else heartbeats; the time is that of the last call."""
    path = Path()
    path.send_heartbeat()
    path.send_heartbeat()
    assert (path.view().steps.count, path.view().steps.last_at) == (2, pytest.approx(1000.0))
    clock.ns += 10**9
    with path.section("step"):
        clock.ns += 10**9
    assert (path.view().steps.count, path.view().steps.last_at) == (1, pytest.approx(1002.0))
    clock.ns += 10**9
    path.start_section("setup")
    assert path.view().steps.last_at == pytest.approx(1003.0)


def test_a_section_block_closes_when_it_fails():
    """A `with` block closes its section on an exception, too."""
    path = Path()

    def fail():
        with path.section("step"):
            assert "step" in path.view().open_sections
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.view().open_sections == {}


def test_without_a_session_every_call_is_refused():
    """Before the first session and after its end all calls raise the same error."""
    path = Path()
    path._stop()
    calls = [
        path.send_heartbeat,
        path.end_all_sections,
        lambda: path.start_section("step"),
        lambda: path.end_section("step"),
    ]
    for call in calls:
        with pytest.raises(RankMonitorClientError):
            call()


def test_the_iteration_is_megatrons(monkeypatch):
    """`curr_iteration` wins over `iteration`; 1 before the arguments are set; else nothing."""
    monkeypatch.delitem(hotpath._modules, "megatron.training.global_vars", raising=False)
    assert hotpath.training_iteration() is None
    module = types.ModuleType("megatron.training.global_vars")
    monkeypatch.setitem(hotpath._modules, module.__name__, module)
    module._GLOBAL_ARGS = None
    assert hotpath.training_iteration() == 1
    module._GLOBAL_ARGS = types.SimpleNamespace(iteration=4)
    assert hotpath.training_iteration() == 4
    module._GLOBAL_ARGS.curr_iteration = 5
    path = Path()
    path.start_section("step")
    module._GLOBAL_ARGS.curr_iteration = 6
    path.end_section("step")
    assert (path.view().first_iteration, path.view().iteration) == (5, 6)
    module._GLOBAL_ARGS = types.SimpleNamespace()
    assert hotpath.training_iteration() is None


def test_threads_may_share_a_client():
    """Sections of several threads neither tear nor lose each other."""
    names = tuple(f"s{i}" for i in range(4))
    path = Path(names)
    problems = []

    def work(name):
        try:
            for _ in range(2000):
                path.start_section(name)
                path.send_heartbeat()
                path.end_section(name)
        except RankMonitorClientError as exc:
            problems.append(exc)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert problems == []
    assert path.view().open_sections == {}
    calc = TimeoutsCalc(names, start_time=0.0)
    path._flush(calc)
    assert all(calc.section_to_max_time[name] > 0 for name in names)


def test_overlapping_sections_in_every_order():
    """Sections may close in any order; the last one to close starts the stretch outside."""
    for order in itertools.permutations(SECTIONS):
        path = Path()
        before = path.view().out_of_section_since
        for name in SECTIONS:
            path.start_section(name)
        for name in order[:-1]:
            path.end_section(name)
            assert path.view().out_of_section_since == before
        path.end_section(order[-1])
        assert path.view().out_of_section_since > before


def is_at(thread, name):
    """Return whether a thread is inside a function of this name."""
    frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_name == name


def test_a_section_that_closes_while_the_slot_moves_is_closed_in_the_new_one():
    """A call that waited for a move goes on in the new slot, and the rest moved there."""
    path = Path()
    path.start_section("setup")
    path.send_heartbeat()
    for _ in range(20):
        path.start_section("step")
        closing = threading.Thread(target=path.end_section, args=("step",))
        fresh = memoryview(bytearray(path.layout.size_bytes)).cast("q")
        with path._lock:
            closing.start()
            wait_until(lambda thread=closing: is_at(thread, "end_section"))
            select.select([], [], [], 0.005)  # until it waits for the lock, most likely
        path._move(fresh)
        closing.join(60.0)
        path.words = fresh
        view = path.view()
        assert (set(view.open_sections), view.session_id) == ({"setup"}, 1)
        assert (view.heartbeat_count, view.heartbeat_last) == (1, path._heartbeat_last * 1e-9)
    assert path.view().step_count == 20
