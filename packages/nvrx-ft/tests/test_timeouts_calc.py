# SPDX-License-Identifier: Apache-2.0
"""Timeouts from measured times, without other ranks."""

import pytest

from nvidia_resiliency_ext.fault_tolerance.data import (
    HeartbeatTimeouts,
    SectionAction,
    SectionTimeouts,
)
from nvidia_resiliency_ext.fault_tolerance.timeouts_calc import (
    TimeoutsCalc,
    TimeoutsCalcError,
    reduction_device_type,
)

OPEN, CLOSE, CLOSE_ALL = SectionAction


def calc_with(*events, sections=("a", "b"), factor=2.0):
    """A calculation that started at 0 and has seen (time, action, section)."""
    calc = TimeoutsCalc(sections, start_time=0.0, safety_factor=factor)
    for time, action, section in events:
        calc.update_on_section_event(section, action, time)
    return calc


def test_nothing_is_measured_at_first():
    """Every maximum begins as -1."""
    calc = TimeoutsCalc(["a"], start_time=3.0)
    assert vars(calc).items() >= {
        ("start_time", 3.0),
        ("prev_hb_time", None),
        ("count", 0),
        ("initial_max_time", -1),
        ("subsequent_max_time", -1),
        ("safety_factor", 5.0),
        ("out_of_section_max_time", -1),
    }
    assert calc.section_to_max_time == {"a": -1}
    assert calc.open_sections == {}
    assert calc.is_out_of_section
    assert not calc.can_get_hb_timeouts()
    assert not calc.can_get_section_timeouts()


@pytest.mark.parametrize(
    ("beats", "initial", "subsequent"),
    [
        ([], -1, -1),
        ([4.0], 4.0, -1),
        ([4.0, 5.0], 4.0, 1.0),
        ([4.0, 5.0, 8.0, 9.0], 4.0, 3.0),
    ],
)
def test_heartbeats(beats, initial, subsequent):
    """The first heartbeat counts from the start, the others from the one before."""
    calc = calc_with()
    for beat in beats:
        calc.update_on_heartbeat(beat)
    assert (calc.initial_max_time, calc.subsequent_max_time) == (initial, subsequent)
    assert calc.count == len(beats)
    assert calc.prev_hb_time == (beats[-1] if beats else None)


@pytest.mark.parametrize(
    ("events", "sections", "out_of_section"),
    [
        ([(1, OPEN, "a")], {"a": -1, "b": -1}, 1),
        ([(1, OPEN, "a"), (4, CLOSE, "a")], {"a": 3, "b": -1}, 1),
        # A longer stretch outside counts only when it ends.
        ([(1, OPEN, "a"), (4, CLOSE, "a"), (9, OPEN, "b")], {"a": 3, "b": -1}, 5),
        # The maximum stays.
        (
            [(1, OPEN, "a"), (4, CLOSE, "a"), (5, OPEN, "a"), (6, CLOSE, "a")],
            {"a": 3, "b": -1},
            1,
        ),
        # Overlapping: outside only begins when the last one is closed.
        (
            [(1, OPEN, "a"), (2, OPEN, "b"), (5, CLOSE, "a"), (7, CLOSE, "b"), (9, OPEN, "a")],
            {"a": 4, "b": 5},
            2,
        ),
        # Nested in an outer section.
        (
            [(1, OPEN, "a"), (2, OPEN, "b"), (3, CLOSE, "b"), (7, CLOSE, "a")],
            {"a": 6, "b": 1},
            1,
        ),
        ([(1, OPEN, "a"), (2, OPEN, "b"), (8, CLOSE_ALL, None)], {"a": 7, "b": 6}, 1),
        ([(8, CLOSE_ALL, None)], {"a": -1, "b": -1}, -1),
    ],
)
def test_sections(events, sections, out_of_section):
    """Sections may nest and overlap, and time outside counts when it ends."""
    calc = calc_with(*events)
    assert calc.section_to_max_time == sections
    assert calc.out_of_section_max_time == out_of_section


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([(1, OPEN, "c")], "'c' is unknown; known sections: .'a', 'b'"),
        ([(1, CLOSE, "c")], "'c' is unknown"),
        ([(1, OPEN, "a"), (2, OPEN, "a")], "'a' is open already"),
        ([(1, CLOSE, "a")], "'a' is not open"),
        ([(1, OPEN, "a"), (2, CLOSE, "a"), (3, CLOSE, "a")], "'a' is not open"),
    ],
)
def test_wrong_section_events(events, message):
    """An event that does not fit is an error that names the section."""
    with pytest.raises(TimeoutsCalcError, match=message):
        calc_with(*events)


def test_wrong_section_event_changes_nothing():
    """After a refused event the numbers are those before it."""
    calc = calc_with((1, OPEN, "a"))
    with pytest.raises(TimeoutsCalcError):
        calc.update_on_section_event("a", OPEN, 50)
    calc.update_on_section_event("a", CLOSE, 3)
    assert calc.section_to_max_time["a"] == 2


def test_current_stretch_outside_can_be_counted():
    """The stretch that still lasts counts on request, and only outside sections."""
    calc = calc_with((1, OPEN, "a"))
    calc.maybe_bump_oos_time(50)
    assert calc.out_of_section_max_time == 1
    calc.update_on_section_event("a", CLOSE, 3)
    calc.maybe_bump_oos_time(7)
    assert calc.out_of_section_max_time == 4


def test_times_come_from_the_clock_unless_given():
    """Without a time the clock is read."""
    now = [10.0]
    calc = TimeoutsCalc(["a"], clock=lambda: now[0])
    now[0] = 12.0
    calc.reset_start_time()
    now[0] = 15.0
    calc.update_on_heartbeat()
    calc.update_on_section_event("a", OPEN)
    now[0] = 19.0
    calc.update_on_section_event("a", CLOSE)
    now[0] = 24.0
    calc.maybe_bump_oos_time()
    assert calc.initial_max_time == 3.0
    assert calc.section_to_max_time == {"a": 4.0}
    assert calc.out_of_section_max_time == 5.0


def test_heartbeat_timeouts():
    """Timeouts are the maxima times the factor, halfway to the ones calculated before."""
    calc = calc_with(factor=10.0)
    with pytest.raises(TimeoutsCalcError, match="two heartbeats, 0 were seen"):
        calc.get_hb_timeouts()
    calc.update_on_heartbeat(1.0)
    calc.update_on_heartbeat(3.0)
    fresh = HeartbeatTimeouts(10.0, 20.0, were_calculated=True)
    assert calc.get_hb_timeouts() == fresh
    assert calc.get_hb_timeouts(HeartbeatTimeouts(50.0, 60.0)) == fresh
    before = HeartbeatTimeouts(50.0, 60.0, were_calculated=True)
    assert calc.get_hb_timeouts(before) == HeartbeatTimeouts(30.0, 40.0, were_calculated=True)
    for damaged in (HeartbeatTimeouts(None, 60.0, True), HeartbeatTimeouts(50.0, None, True)):
        with pytest.raises(TimeoutsCalcError, match="one is missing"):
            calc.get_hb_timeouts(damaged)


MEASURED_A = [(1, OPEN, "a"), (4, CLOSE, "a")]
MEASURED = [*MEASURED_A, (5, OPEN, "b"), (10, CLOSE, "b")]


@pytest.mark.parametrize(
    ("events", "selected", "outside", "can"),
    [
        ([], None, True, False),
        ([], [], False, True),
        ([], [], True, False),
        (MEASURED_A, None, True, False),
        (MEASURED_A, ["a"], True, True),
        (MEASURED_A, ["b"], False, False),
        (MEASURED, None, True, True),
    ],
)
def test_section_timeouts_need_data(events, selected, outside, can):
    """Exactly what is asked for must have been measured."""
    calc = calc_with(*events)
    assert calc.can_get_section_timeouts(selected, outside) is can
    if not can:
        with pytest.raises(TimeoutsCalcError, match="never measured"):
            calc.get_section_timeouts(selected, outside)


def test_unknown_sections_cannot_be_selected():
    """A misspelt selection is an error, not "no data yet" for ever."""
    calc = calc_with(*MEASURED)
    with pytest.raises(TimeoutsCalcError, match=r"'c'.* are unknown"):
        calc.can_get_section_timeouts(["a", "c"])
    with pytest.raises(TimeoutsCalcError, match=r"'c'.* are unknown"):
        calc.get_section_timeouts(["a", "c"])


@pytest.mark.parametrize(
    ("selected", "outside", "current", "expected"),
    [
        (None, True, None, SectionTimeouts({"a": 6, "b": 10}, 2, {"a", "b"}, True)),
        (["a"], False, None, SectionTimeouts({"a": 6, "b": None}, None, {"a"}, False)),
        # What was set by hand is replaced, not averaged.
        (
            ["a"],
            True,
            SectionTimeouts({"a": 100.0, "b": 200.0}, 300.0),
            SectionTimeouts({"a": 6, "b": 200.0}, 2, {"a"}, True),
        ),
        # Both calculated: the mean.
        (
            None,
            True,
            SectionTimeouts({"a": 8, "b": 200.0}, 4, {"a"}, True),
            SectionTimeouts({"a": 7, "b": 10}, 3, {"a", "b"}, True),
        ),
        # Calculated before and not selected now: kept.
        (
            ["a"],
            False,
            SectionTimeouts({"a": 1.0, "b": 9.0}, 4, {"b"}, True),
            SectionTimeouts({"a": 6, "b": 9.0}, 4, {"a", "b"}, True),
        ),
    ],
)
def test_section_timeouts_merge(selected, outside, current, expected):
    """New and present timeouts are merged section by section."""
    calc = calc_with(*MEASURED)
    assert calc.get_section_timeouts(selected, outside, current) == expected


def test_merging_leaves_the_present_timeouts_alone():
    """The timeouts that are merged into are not changed themselves."""
    current = SectionTimeouts({"a": 8, "b": None}, 4, {"a"}, True)
    calc_with(*MEASURED).get_section_timeouts(None, True, current)
    assert current == SectionTimeouts({"a": 8, "b": None}, 4, {"a"}, True)


def test_synchronizing_needs_a_process_group():
    """Without torch.distributed there is nobody to agree with."""
    with pytest.raises(TimeoutsCalcError, match="not initialised"):
        calc_with().synchronize_all()


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("xpu:ccl", "xpu"),
        ("gloo", "cpu"),
    ],
)
def test_device_of_the_reduction(backends, device):
    """The CPU side is used wherever there is one."""
    assert reduction_device_type(backends) == device
