# SPDX-License-Identifier: Apache-2.0
"""The four timeout rules and the time of the next look, as tables."""

import itertools
import os
import stat

import pytest
from slot_writer import SlotWriter

from nvidia_resiliency_ext.fault_tolerance._monitor.slot import (
    SlotLayout,
    SlotMemory,
    begin_slot,
    read_slot,
)
from nvidia_resiliency_ext.fault_tolerance._monitor.timeout_rules import evaluate, next_look

START = 1000.0
OPTIONS = {
    "initial_heartbeat_s": "initial_rank_heartbeat_timeout",
    "heartbeat_s": "rank_heartbeat_timeout",
    "sections_s": "rank_section_timeouts",
    "out_of_section_s": "rank_out_of_section_timeout",
    "longest_pause_s": "workload_check_interval",
}


def limits(**given):
    """Return limits with nothing set but what is given."""
    defaults = {"sections_s": {}, "num_warmup_iterations": 5, "longest_pause_s": 100.0}
    values = {**dict.fromkeys(OPTIONS), **defaults, **given}
    return {OPTIONS.get(name, name): value for name, value in values.items()}


def view(*events, sections=("step", "warmup", "outer", "inner"), first_iteration=-1):
    """Return what a slot shows after events of (what, argument, seconds since the start)."""
    layout = SlotLayout(tuple(sections))
    writer = SlotWriter(layout, int(START * 1e9), first_iteration)
    opened = set()
    for what, argument, at in events:
        now = int((START + at) * 1e9)
        match what:
            case "beat":
                writer.heartbeat(now)
            case "open":
                opened.add(argument)
                writer.open(argument, now)
            case "close":
                opened.discard(argument)
                writer.close(argument, now, is_last=not opened)
            case "iteration":
                writer.iterate(argument)
    return writer.view()


BEAT = ("beat", None, 1.0)
STEP_DONE = (("open", "step", 1.0), ("close", "step", 2.0))


@pytest.mark.parametrize(
    ("events", "given", "at", "expected"),
    [
        ([], {"initial_heartbeat_s": 5.0}, 5.1, ("initial_heartbeat", None)),
        ([], {"initial_heartbeat_s": 5.0}, 5.0, None),
        ([], {"heartbeat_s": 1.0}, 99.0, None),
        ([BEAT], {"initial_heartbeat_s": 0.5, "heartbeat_s": 5.0}, 5.9, None),
        ([BEAT], {"heartbeat_s": 5.0}, 6.1, ("heartbeat", None)),
        ([BEAT], {"initial_heartbeat_s": 5.0}, 99.0, None),
        ([("open", "outer", 0.0)], {"sections_s": {"outer": 3.0}}, 3.1, ("section", "outer")),
        ([("open", "outer", 0.0)], {"sections_s": {"outer": None}}, 99.0, None),
        (
            [("open", "outer", 0.0), ("open", "inner", 2.9)],
            {"sections_s": {"outer": 3.0, "inner": 3.0}},
            3.1,
            ("section", "outer"),
        ),
        (
            [("open", "outer", 0.0), ("open", "inner", 2.0)],
            {"sections_s": {"outer": 30.0, "inner": 1.0}},
            3.1,
            ("section", "inner"),
        ),
        ([], {"out_of_section_s": 3.0}, 3.1, ("out_of_section", None)),
        ([("open", "outer", 1.0)], {"out_of_section_s": 3.0, "sections_s": {}}, 9.0, None),
        ([], {"out_of_section_s": 3.0, "sections_s": {"step": None}}, 99.0, None),
        ([], {"out_of_section_s": 3.0, "sections_s": {"warmup": 1.0}}, 3.1, ("out_of_section",)),
        (STEP_DONE, {"out_of_section_s": 3.0, "sections_s": {"step": None}}, 4.9, None),
        (
            STEP_DONE,
            {"out_of_section_s": 3.0, "sections_s": {"step": None}},
            5.1,
            ("out_of_section", None),
        ),
    ],
)
def test_rules(events, given, at, expected):
    """Each rule fires past its own limit and only then."""
    verdict = evaluate(view(*events), limits(**given), START, START + at)
    found = None if verdict is None else (verdict.rule, verdict.section)[: len(expected or ())]
    assert found == expected


@pytest.mark.parametrize(
    ("iteration", "first", "limit_s"),
    [(10, 10, 60.0), (14, 10, 60.0), (15, 10, 2.0), (None, 10, 60.0), (10, -1, 2.0)],
)
def test_warmup_stands_in_for_step_during_the_first_iterations(iteration, first, limit_s):
    """The `warmup` limit holds for `step` until enough iterations of the session passed."""
    reported = [] if iteration is None else [("iteration", iteration, 0.0)]
    seen = view(*reported, ("open", "step", 0.0), first_iteration=first)
    given = limits(sections_s={"step": 2.0, "warmup": 60.0})
    assert evaluate(seen, given, START, START + limit_s) is None
    verdict = evaluate(seen, given, START, START + limit_s + 0.1)
    assert (verdict.section, verdict.limit_s) == ("step", limit_s)


def test_the_verdict_names_the_deadline_that_passed_first():
    """With several rules broken, the first one is the reason."""
    seen = view(("open", "outer", 0.0), ("open", "inner", 1.0))
    given = limits(sections_s={"outer": 5.0, "inner": 1.0}, initial_heartbeat_s=4.0)
    assert evaluate(seen, given, START, START + 50.0).section == "inner"


def test_the_next_look_is_at_the_earliest_deadline():
    """The monitor sleeps until the earliest deadline it knows."""
    seen = view(BEAT, ("open", "outer", 2.0))
    given = limits(heartbeat_s=30.0, sections_s={"outer": 29.5})
    assert next_look(seen, given, START, START + 5.0) == pytest.approx(START + 31.0)


@pytest.mark.parametrize(("longest_s", "expected"), [(100.0, 7.0), (3.0, 3.0)])
def test_the_next_look_is_never_later_than_what_may_begin_now(longest_s, expected):
    """A section that opens right after a look is evaluated on time: no sleep over its limit."""
    given = limits(heartbeat_s=50.0, sections_s={"outer": 7.0}, longest_pause_s=longest_s)
    at = next_look(view(BEAT), given, START, START + 10.0)
    assert at == pytest.approx(START + 10.0 + expected)


def test_without_limits_the_pause_is_the_longest():
    """With no limit at all the monitor only looks at its longest pause."""
    assert next_look(view(), limits(longest_pause_s=5.0), START, START) == START + 5.0


def test_a_stop_between_two_stores_of_a_close_is_no_hang():
    """Whatever word of a close is missing, the rank does not look long outside sections."""
    layout = SlotLayout(("step",))
    given = limits(out_of_section_s=3.0, sections_s={"step": 100.0})
    writer = SlotWriter(layout, int(START * 1e9))
    writer.open("step", int((START + 1) * 1e9))
    before = bytes(writer.words)
    writer.close("step", int((START + 50) * 1e9), is_last=True)
    after = bytes(writer.words)
    # The close stores out-of-section start, then the section: the state in between.
    halfway = bytearray(before)
    halfway[8 * 8 : 9 * 8] = after[8 * 8 : 9 * 8]
    for raw in (before, halfway, after):
        seen = read_slot(memoryview(raw).cast("q"), layout)
        assert evaluate(seen, given, START, START + 51) is None


def test_layouts_agree_whatever_the_order():
    """Two sides that were given the names in different orders use the same words."""
    layouts = {SlotLayout(order) for order in itertools.permutations(("b", "a", "c"))}
    assert len(layouts) == 1
    assert layouts.pop().sections == ("a", "b", "c")


def test_slot_memory_without_memfd_is_a_file_without_a_name(tmp_path, monkeypatch):
    """Where there is no memfd a private file holds the slot, and only its descriptor leads to it.

    What lies at its name, such as another monitor's file that ranks have mapped, is not touched.
    """
    monkeypatch.setenv("NVRX_FORCE_NO_MEMFD", "1")
    (tmp_path / "slot0").write_text("somebody else's")
    layout = SlotLayout(("a",))
    memory = SlotMemory.create(layout, directory=str(tmp_path), name="slot0")
    try:
        status = os.fstat(memory.fd)
        assert stat.S_ISREG(status.st_mode)
        assert status.st_mode & 0o777 == 0o600
        assert (status.st_nlink, status.st_size) == (0, layout.size_bytes)
        # No store into the slot can meet a full disk.
        assert status.st_blocks * 512 >= layout.size_bytes
        assert [path.read_text() for path in tmp_path.iterdir()] == ["somebody else's"]
        begin_slot(memory.words, 7, 1)
        twin = SlotMemory.adopt(memory.fd, layout, must_be_sealed=False)
        assert read_slot(twin.words, layout).session_id == 7
    finally:
        memory.close()
