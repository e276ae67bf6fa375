# SPDX-License-Identifier: Apache-2.0
"""The session machine as a table: states, events, effects; no process and no clock."""

import dataclasses
import signal

import pytest
from slot_writer import SlotWriter

from nvidia_resiliency_ext.fault_tolerance._monitor.session import Do, Phase, Session
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SlotLayout
from nvidia_resiliency_ext.fault_tolerance._monitor.timeout_rules import Policy, Verdict

LAYOUT = SlotLayout(("step",))
T0 = 100.0


def policy(sig=signal.SIGKILL, evidence_s=2.0, limit_s=1.0):
    """Return a policy with one limit, on `step`."""
    return Policy(
        initial_heartbeat_s=None,
        heartbeat_s=None,
        sections_s={"step": limit_s},
        out_of_section_s=None,
        num_warmup_iterations=5,
        longest_pause_s=5.0,
        evidence_timeout_s=evidence_s,
        termination_signal=sig,
    )


def view(opened_at=None):
    """Return a look at a slot in which `step` is open since a time."""
    writer = SlotWriter(LAYOUT, int(T0 * 1e9))
    if opened_at is not None:
        writer.open("step", int(opened_at * 1e9))
    return writer.view()


TIMED = {"join", "wake", "inspected", "dumped", "sentence", "release"}


class Event:
    """A call of one of the machine's methods."""

    def __init__(self, method, *args, **options):
        self.method, self.args, self.options = method, args, options

    def __repr__(self):
        return self.method


def run(session, *events, rules=None):
    """Feed (event, time) pairs to a copy; return that and all effects."""
    session = dataclasses.replace(session, policy=rules or session.policy)
    effects = []
    for event, now in events:
        times = (now,) if event.method in TIMED else ()
        effects += getattr(session, event.method)(*event.args, *times, **event.options)
    return session, effects


def idle():
    """Return a rank without a session."""
    return Session(policy())


def live():
    """Return a session that was just accepted."""
    state, effects = run(idle(), (Event("join", has_live_owner=False), T0))
    assert effects == [Do.ACCEPT]
    return state


def suspected(opened_at=T0 + 1):
    """Return a session after the first look that broke a rule."""
    return run(
        dataclasses.replace(live(), wake_at=T0 + 5), (Event("wake", view(opened_at)), T0 + 5)
    )[0]


def asking():
    """Return a session whose verdict stands."""
    state, effects = run(suspected(), (Event("wake", view(T0 + 1)), T0 + 5.01))
    assert effects == [Do.INSPECT, Do.ACCUSE]
    return state


def received():
    """Return a session on which the evidence is complete."""
    return run(asking(), (Event("inspected", can_dump=False), T0 + 6), (Event("saved"), T0 + 6))[0]


def test_a_healthy_look_sleeps_until_the_next_deadline():
    """A look that breaks no rule sets the time of the next one."""
    state, effects = run(live(), (Event("wake", view(T0 + 0.5)), T0 + 0.6))
    assert (state.phase, state.wake_at) == (Phase.LIVE, pytest.approx(T0 + 1.5))
    assert effects == []


def test_nobody_is_signalled_on_one_look():
    """The first look that breaks a rule only asks for a second one soon after."""
    state = suspected()
    assert state.phase is Phase.SUSPECT
    assert T0 + 5 < state.wake_at < T0 + 5.1


def test_progress_between_the_looks_acquits():
    """A rank that moved on between the two looks is not touched."""
    state, effects = run(suspected(), (Event("wake", view()), T0 + 5.01))
    assert (state.phase, state.verdict, effects) == (Phase.LIVE, None, [])


def test_another_verdict_needs_looks_of_its_own():
    """A second look that finds another reason counts as a first look for that reason."""
    state, effects = run(suspected(), (Event("wake", view(T0 + 2)), T0 + 5.01))
    assert (state.phase, effects) == (Phase.SUSPECT, [])


def test_a_monitor_that_was_frozen_gives_the_ranks_time():
    """When the monitor wakes far too late, thawing ranks get a second before the second look."""
    state, _ = run(live(), (Event("wake", view(T0)), T0), (Event("wake", view(T0)), T0 + 60))
    assert (state.phase, state.wake_at) == (Phase.SUSPECT, T0 + 61)


def test_the_whole_way_of_a_hang_with_stacks():
    """Verdict, stacks, evidence, report, kill, and the end with the process."""
    state, effects = run(
        asking(),
        (Event("inspected", can_dump=True), T0 + 6),
        (Event("dumped", ends_line=False), T0 + 6.1),
        (Event("dumped", ends_line=True), T0 + 6.2),
    )
    assert (state.phase, effects) == (Phase.DUMPING, [Do.ASK_STACKS])
    assert state.wake_at == pytest.approx(T0 + 6.225)
    state, effects = run(state, (Event("wake", view()), T0 + 6.23), (Event("saved"), T0 + 6.24))
    assert (state.phase, effects) == (Phase.RECEIVED, [Do.SAVE_EVIDENCE, Do.TESTIFY])
    state, effects = run(state, (Event("sentence"), T0 + 6.25))
    assert (state.phase, effects) == (Phase.KILLING, [Do.TERMINATE])
    state, effects = run(state, (Event("end"), T0 + 6.3))
    assert (state.phase, state.session_id, effects) == (Phase.IDLE, 1, [Do.END])


@pytest.mark.parametrize(("can_dump", "evidence_s"), [(False, 2.0), (True, 0.0)])
def test_who_cannot_dump_is_not_asked(can_dump, evidence_s):
    """A stopped rank, or evidence switched off: straight to what the kernel says."""
    rules = policy(evidence_s=evidence_s)
    state, effects = run(asking(), (Event("inspected", can_dump=can_dump), T0 + 6), rules=rules)
    assert (state.phase, effects) == (Phase.SAVING, [Do.SAVE_EVIDENCE])


def test_silence_after_the_request_ends_with_the_limit():
    """Stacks that never come, or never end, hold up the kill no longer than configured."""
    state, _ = run(asking(), (Event("inspected", can_dump=True), T0 + 6))
    assert state.wake_at == T0 + 8
    state, _ = run(state, (Event("dumped", ends_line=True), T0 + 7.99))
    assert state.wake_at == T0 + 8
    state, _ = run(state, (Event("dumped", ends_line=False), T0 + 7.995))
    assert state.wake_at == T0 + 8


def test_a_slow_disk_does_not_hold_up_the_kill():
    """When the evidence is not written in time, it is complete all the same."""
    state, _ = run(asking(), (Event("inspected", can_dump=False), T0 + 6))
    state, effects = run(state, (Event("wake", view()), state.wake_at))
    assert effects == [Do.TESTIFY]
    state, effects = run(state, (Event("saved"), T0 + 9))
    assert effects == []


def test_escalation():
    """A gentle signal, then SIGKILL, then a report that nothing helps."""
    rules = policy(sig=signal.SIGTERM)
    state, _ = run(received(), (Event("sentence"), T0 + 6), rules=rules)
    assert (state.phase, state.wake_at) == (Phase.ENDING, T0 + 11)
    state, effects = run(state, (Event("wake", view()), T0 + 11), rules=rules)
    assert (state.phase, state.wake_at, effects) == (Phase.KILLING, T0 + 16, [Do.KILL])
    state, effects = run(state, (Event("wake", view()), T0 + 16), rules=rules)
    assert (state.phase, state.wake_at, effects) == (Phase.STUCK, None, [Do.REPORT_UNKILLABLE])
    state, effects = run(state, (Event("end"), T0 + 99), rules=rules)
    assert effects == [Do.END]


@pytest.mark.parametrize("alive", [True, False])
def test_a_second_process(alive):
    """While its process lives another one is refused; a dead one is replaced at once."""
    state, effects = run(live(), (Event("join", has_live_owner=alive), T0 + 1))
    if alive:
        assert (state.session_id, effects) == (1, [Do.REFUSE])
    else:
        assert (state.session_id, effects) == (2, [Do.END, Do.ACCEPT])


def test_another_ranks_hang_is_looked_into_without_a_verdict():
    """A rank that broke no rule is looked at like one that did, and can be blamed or let go."""
    state, effects = run(live(), (Event("summon"), T0 + 5))
    assert (state.phase, state.verdict, effects) == (Phase.ASKING, None, [Do.INSPECT])
    state, effects = run(
        state, (Event("inspected", can_dump=False), T0 + 5), (Event("saved"), T0 + 5)
    )
    assert (state.phase, effects) == (Phase.RECEIVED, [Do.SAVE_EVIDENCE, Do.TESTIFY])
    assert run(state, (Event("sentence"), T0 + 6))[1] == [Do.TERMINATE]
    free, effects = run(state, (Event("release"), T0 + 6))
    assert (free.phase, effects) == (Phase.FREE, [])
    again, _ = run(free, (Event("wake", view()), free.wake_at))
    assert again.phase is Phase.LIVE


@pytest.mark.parametrize("state", [idle(), received()], ids=["idle", "received"])
def test_who_cannot_be_looked_at_again_is_not_summoned(state):
    """Without a session, or while it is looked at, a summons changes nothing."""
    assert run(state, (Event("summon"), T0 + 9)) == (state, [])


@pytest.mark.parametrize("make", [live, suspected, asking, received])
def test_the_end_of_the_session_drops_the_suspicion(make):
    """A rank that ended its session is judged no more."""
    state, effects = run(make(), (Event("close"), T0 + 6))
    assert (state.phase, state.wake_at, effects) == (Phase.IDLE, None, [Do.END])


def test_a_condemned_rank_cannot_escape_by_closing():
    """After the verdict was carried out, closing the connection does not stop the escalation."""
    rules = policy(sig=signal.SIGTERM)
    state, _ = run(received(), (Event("sentence"), T0 + 6), (Event("close"), T0 + 6.1), rules=rules)
    assert (state.phase, state.wake_at) == (Phase.ENDING, T0 + 11)
    assert run(state, (Event("wake", view()), T0 + 11), rules=rules)[1] == [Do.KILL]


STRAYS = [
    Event("dumped", ends_line=True),
    Event("saved"),
    Event("inspected", can_dump=True),
]


@pytest.mark.parametrize(
    "event", [*STRAYS, Event("end"), Event("close"), Event("wake", view(T0))], ids=repr
)
def test_idle_does_nothing(event):
    """Without a session no event has an effect."""
    state, effects = run(idle(), (event, T0))
    assert (state.phase, effects) == (Phase.IDLE, [])


@pytest.mark.parametrize("event", STRAYS, ids=repr)
def test_late_answers_change_nothing(event):
    """An answer that belongs to an earlier phase is ignored."""
    assert run(live(), (event, T0 + 1)) == (live(), [])


def condemned():
    """Return the verdict of a health check."""
    return Verdict(
        rule="gpu_health", section=None, since=T0, limit_s=5.0, iteration=7, reason="GPU 0: reset"
    )


@pytest.mark.parametrize("state", [live(), suspected()], ids=["live", "suspected"])
def test_a_rank_whose_device_is_unfit_is_ended_like_a_hung_one(state):
    """Evidence, report, then the signal: as for a hang, and without a second look."""
    verdict = condemned()
    state, effects = run(state, (Event("condemn", verdict), T0 + 6))
    assert (state.phase, effects) == (Phase.ASKING, [Do.INSPECT, Do.ACCUSE])
    assert state.verdict == verdict
    state, effects = run(
        state, (Event("inspected", can_dump=False), T0 + 6), (Event("saved"), T0 + 6.1)
    )
    assert effects == [Do.SAVE_EVIDENCE, Do.TESTIFY]


def test_a_rank_that_is_being_ended_is_not_condemned_again():
    """One report per rank, whatever else is found."""
    state, _ = run(live(), (Event("condemn", condemned()), T0 + 6))
    assert run(state, (Event("condemn", condemned()), T0 + 7)) == (state, [])
    assert run(idle(), (Event("condemn", condemned()), T0)) == (idle(), [])
